"""The Linear that expands latents into keys and values, in the absorbed form, with LoRA.

Of head h, with the weight's rows Wk[h] of keys and Wv[h] of values: `absorb` turns a query into
what meets latents instead of keys, Wk[h]^T q; `project` turns a sum of latents into that of values,
Wv[h] o. Both run on the step's own tokens, whose adapter is also that of all keys they see.
"""

from collections.abc import Iterator

import torch
from torch import nn

from vexpert.kernels.dense_factors import HeadColumns
from vexpert.lora.layers.groups import RowGroups
from vexpert.lora.layers.linear import LoraLinear
from vexpert.lora.layers.rows import SiteDelta
from vexpert.lora.site_extras import SiteExtra
from vexpert.lora.types import BatchView
from vexpert.ops.types import PackedLora

MOST = 64.0  # of a query in a product: far from float16's largest, 65504, and from its smallest


def _by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, k] times weight [H, k, n]: [T, H, n]."""
    y = x.new_empty(*x.shape[:2], weight.shape[2])
    torch.bmm(x.transpose(0, 1), weight, out=y.transpose(0, 1))
    return y


def _bounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, H, k] in float32 as a product with powers of two [m, H, 1], which are 1 where x < MOST.

    A gain of thousands, as small weights have it, takes a query out of float16's range, but not
    its product with those weights.
    """
    exponent = torch.frexp(x.abs().amax(2, keepdim=True) / MOST).exponent.clamp(min=0)
    return torch.ldexp(x, -exponent), torch.ldexp(torch.ones_like(x[..., :1]), exponent)


class LatentLinear:
    """The absorbed form of an nn.Linear or LoraLinear without bias, which stays as it is."""

    def __init__(self, linear: nn.Linear, columns: HeadColumns) -> None:
        self.columns = columns
        self.delta: SiteDelta | None = linear.delta if isinstance(linear, LoraLinear) else None
        self.key_weight, self.value_weight = self._split(linear.weight.detach())

    def _split(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of weight [out, in]: Wk [H, key, in], and Wv^T [H, in, value]."""
        heads = weight.view(self.columns.heads, self.columns.width, -1)
        key, value = torch.split(heads, [self.columns.key, self.columns.value], 1)
        return key, value.transpose(1, 2)

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """query [T, H, key] -> [T, H, in]; what it gives for a latent is the product with its key.

        But for a `shift` of keys: that adds the same to all scores of a query, so nothing to their
        softmax.
        """
        extras = self._extras()
        scales: list[tuple[torch.Tensor, torch.Tensor]] = []  # of rows, what is put off to the end
        for rows, extra in extras:
            if extra.gain is not None:
                gain = self._of_columns(extra.gain)[:, : self.columns.key]
                scaled, scale = _bounded(query[rows].float() * gain)
                query = query.index_copy(0, rows, scaled.to(query.dtype))
                scales.append((rows, scale))
        y = _by_head(query, self.key_weight)
        self._add_factors(query, y, of_keys=True)
        for rows, extra in extras:
            if extra.weight is not None:
                y[rows] = _by_head(query[rows], self._split(extra.weight)[0])
        for rows, scale in scales:
            y[rows] = (y[rows].float() * scale).to(y.dtype)
        return y

    def project(self, latents: torch.Tensor) -> torch.Tensor:
        """Weighted sums of latents [T, H, in] -> those of their values [T, H, value]."""
        y = _by_head(latents, self.value_weight)
        self._add_factors(latents, y, of_keys=False)
        for rows, extra in self._extras():
            if extra.weight is not None:
                y[rows] = _by_head(latents[rows], self._split(extra.weight)[1])
            if extra.gain is not None or extra.shift is not None:
                y[rows] = self._scaled(y[rows], extra)
        return y

    def _scaled(self, values: torch.Tensor, extra: SiteExtra) -> torch.Tensor:
        """gain * values + shift in float32, back in the dtype of `values` [m, H, value]."""
        wide = values.float()
        if extra.gain is not None:
            wide = wide * self._of_columns(extra.gain)[:, self.columns.key :]
        if extra.shift is not None:  # weights of a softmax sum to 1
            wide = wide + self._of_columns(extra.shift)[:, self.columns.key :]
        return wide.to(values.dtype)

    def _of_columns(self, values: torch.Tensor) -> torch.Tensor:
        """values [1, out] by head, [H, key + value]."""
        return values.view(self.columns.heads, self.columns.width)

    def _view(self) -> BatchView | None:
        """This step's view, if an active slot adapts the site."""
        view = None if self.delta is None else self.delta.state.view
        return view if self.delta and view and self.delta.is_adapted(view) else None

    def _extras(self) -> list[tuple[torch.Tensor, SiteExtra]]:
        """(rows, extra) of each adapter of the step that has one here; steps with any are eager."""
        view, delta = self._view(), self.delta
        if view is None or delta is None or not delta.state.extras:
            return []
        found = delta.state.extras.get(delta.site.index, ())
        groups = self._groups(view, delta)
        return [(groups.rows_of(slot), extra) for slot, extra in found]

    def _groups(self, view: BatchView, delta: SiteDelta) -> RowGroups:
        return delta.shared_group(view, LoraLinear.rows_key, view.slots)

    def _add_factors(self, x: torch.Tensor, y: torch.Tensor, of_keys: bool) -> None:
        view, delta = self._view(), self.delta
        if view is None or delta is None or not delta.most_rank(view):
            return
        for lora in self._loras(view, delta):
            delta.backend.add_by_head(x, y, lora, self.columns, of_keys)

    def _loras(self, view: BatchView, delta: SiteDelta) -> Iterator[PackedLora]:
        """All adapters of the step at once, or on the classic path one after another."""
        one = (delta.site,), (delta.table,)
        routing = self._groups(view, delta).routing
        if routing is not None:
            ranks = (delta.most_rank(view),)
            yield PackedLora(*one, routing, view.active_slots, ranks, view.most_adapters)
            return
        for slot in view.active_slots:
            if delta.table.host_rank[slot]:
                own = torch.where(view.slots == slot, view.slots, -1)
                routing = delta.backend.route(own, None, 1, len(delta.table.host_rank))
                yield PackedLora(*one, routing, (slot,))
