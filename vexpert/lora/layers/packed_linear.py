"""Linears that read one input as one product, each with its own LoRA site: q, k, v; gate, up."""

from collections.abc import Sequence

import torch
from torch import nn

from vexpert.errors import UnsupportedError
from vexpert.kernels.dense_factors import DenseDelta
from vexpert.lora.layers.linear import LoraLinear
from vexpert.lora.layers.rows import SiteDelta
from vexpert.lora.types import BatchView
from vexpert.ops.backend import LoraBackend
from vexpert.ops.types import PackedLora


def why_not_packed(linears: Sequence[nn.Linear]) -> str | None:
    """Why these modules cannot be one product, or None."""
    first = linears[0]
    if any(
        type(linear).forward not in (nn.Linear.forward, LoraLinear.forward) for linear in linears
    ):
        return "one of them is more than a Linear"
    if any(linear.in_features != first.in_features for linear in linears):
        return "they read inputs of different sizes"
    if len({(linear.weight.dtype, linear.weight.device) for linear in linears}) > 1:
        return "their weights differ in dtype or device"
    if len({linear.bias is None for linear in linears}) > 1:
        return "some have a bias and some have none"
    deltas = [linear.delta for linear in linears if isinstance(linear, LoraLinear)]
    if deltas and len(deltas) < len(linears):
        return "some are targets of adapters and some are not"
    if len({id(delta.state) for delta in deltas}) > 1:
        return "their rows are not the same"
    return None


class LoraPackedLinear(nn.Module):
    """y = W x + b + B A x of several Linears at once; columns of y are theirs, in their order.

    The Linears stay modules of the model: their parameters become views of the packed ones, under
    the same names, and calling one of them still works. This module has no parameters of its own.
    Each is either a LoraLinear (all of them: a server with LoRA) or an nn.Linear.
    """

    def __init__(self, linears: Sequence[nn.Linear], backend: LoraBackend) -> None:
        """Raises UnsupportedError, with the reason, for Linears that cannot be packed."""
        super().__init__()
        reason = why_not_packed(linears)
        if reason is not None:
            raise UnsupportedError(f"cannot pack {len(linears)} Linears: {reason}")
        self.backend = backend
        self.linears = tuple(linears)  # a tuple: the modules are registered elsewhere
        self.deltas: tuple[SiteDelta, ...] = tuple(
            linear.delta for linear in linears if isinstance(linear, LoraLinear)
        )
        self.sizes = [linear.out_features for linear in linears]
        self.in_features = linears[0].in_features
        self.out_features = sum(self.sizes)
        self.weight = _pack([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = _pack(biases) if biases else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., sum of outs]; leading dimensions, flattened, are the step's rows."""
        rows = x.reshape(-1, self.in_features)
        view = self._adapted_view()
        if view is None:
            y = self.backend.packed_linear(rows, self.weight, self.bias, None)
        elif all(delta.fits(view, x, self.weight) for delta in self.deltas):
            y = self.backend.packed_linear(rows, self.weight, self.bias, self._lora(view))
        else:
            y = self.backend.packed_linear(rows, self.weight, self.bias, None)
            self._add_by_site(view, rows, y)
        return y.view(*x.shape[:-1], self.out_features)

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same as one tensor [..., out] for each Linear; on a GPU views of one matrix."""
        if not self.backend.can_pack:
            return tuple(linear(x) for linear in self.linears)
        return torch.split(self.forward(x), self.sizes, -1)

    def deferred_parts(
        self, x: torch.Tensor, tiles: bool = False
    ) -> tuple[tuple[torch.Tensor, ...], DenseDelta | None]:
        """The same, and what their reader has still to add to them; None: nothing.

        `tiles`: the reader can do tiles of many rows.
        """
        view = self._adapted_view()
        if view is None or not all(delta.fits(view, x, self.weight) for delta in self.deltas):
            return self.parts(x), None
        if not self.backend.can_pack:
            return self.parts(x), None
        rows = x.reshape(-1, self.in_features)
        lora = self._lora(view)
        y, rest = self.backend.deferred_linear(rows, self.weight, self.bias, lora, tiles)
        return torch.split(y.view(*x.shape[:-1], self.out_features), self.sizes, -1), rest

    def _adapted_view(self) -> BatchView | None:
        """This step's view, if an active slot adapts one of the sites."""
        view = self.deltas[0].state.view if self.deltas else None
        if view is not None and any(delta.is_adapted(view) for delta in self.deltas):
            return view
        return None

    def _lora(self, view: BatchView) -> PackedLora:
        first = self.deltas[0]
        routing = first.shared_group(view, LoraLinear.rows_key, view.slots).routing
        assert routing is not None, "the classic path goes site by site"
        sites = tuple(delta.site for delta in self.deltas)
        tables = tuple(delta.table for delta in self.deltas)
        ranks = tuple(delta.most_rank(view) for delta in self.deltas)
        return PackedLora(sites, tables, routing, view.active_slots, ranks, view.most_adapters)

    def _add_by_site(self, view: BatchView, rows: torch.Tensor, y: torch.Tensor) -> None:
        """Each site's delta and extras, added to its columns of y [R, sum of outs] in place."""
        groups = self.deltas[0].shared_group(view, LoraLinear.rows_key, view.slots)
        parts = zip(self.deltas, self.linears, torch.split(y, self.sizes, 1), strict=True)
        for delta, linear, part in parts:
            if delta.is_adapted(view):
                delta.add(view, groups, rows, part, bias=linear.bias)


@torch.no_grad()
def _pack(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """All of them in one tensor, along dimension 0; they become views of it. One stays itself."""
    if len(parameters) == 1:
        return parameters[0].detach()
    packed = torch.cat([parameter.detach() for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = packed[start : start + parameter.shape[0]]
        start += parameter.shape[0]
    return packed
