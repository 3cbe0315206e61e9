"""Decoder layers whose residual adds run in the launch of the norm that follows them.

A layer is norm, attention, add, norm, block, add. The last add also computes the norm that reads
the layer's output, if it is known: the next layer's first one, or the model's last.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vexpert.kernels.dense_factors import DenseDelta
from vexpert.kernels.norm_router import MOST_TOKENS, Scratch, norm_router
from vexpert.kernels.rms_norm import add_rms_norm
from vexpert.models.experts import ExpertsLayer
from vexpert.models.fused_attention import FusedAttention
from vexpert.models.fused_norm import FusedNorm
from vexpert.models.fused_record import Call, Records
from vexpert.models.fused_router import FusedRouter
from vexpert.models.replayed_layer import Both, LayerReplays, ReplayedLayer
from vexpert.ops.types import Finish

MOST_ENDED = 8  # tokens; each program of `norm_router` reads its token's factors anew


@dataclass
class Parts:
    """What a decoder layer is made of."""

    first: FusedNorm
    attention: nn.Module
    second: FusedNorm
    block: nn.Module
    multiplier: float  # of what is added to the residual
    options: tuple[str, ...]  # the layer's keywords that attention gets
    following: FusedNorm | None  # the norm that reads the layer's output
    experts: ExpertsLayer | None  # of a block that returns what its experts give, unchanged
    router: FusedRouter | None  # of a block that routes what it is given, unchanged


class FusedLayer:
    """The forward of one decoder layer."""

    def __init__(
        self, parts: Parts, scratch: Scratch | None, pdl: bool, replays: LayerReplays
    ) -> None:
        self.parts = parts
        self.scratch = scratch  # with a router
        self.pdl = pdl
        self.replayed = ReplayedLayer(parts, replays)

    def __call__(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        """hidden_states [1, T, H] -> [1, T, H]."""
        parts = self.parts
        normed = parts.first(hidden_states)
        given = {name: options[name] for name in parts.options}
        total, ahead = self.replayed(
            hidden_states,
            normed,
            given.get("position_embeddings"),
            lambda: self._run(hidden_states, normed, given),
        )
        if parts.following is not None and ahead is not None:
            parts.following.ahead = total, ahead
        return total

    def _run(self, hidden: torch.Tensor, normed: torch.Tensor, given: dict[str, Any]) -> Both:
        """(the layer's output, the norm that follows of it, if it is known)."""
        parts = self.parts
        fused = parts.attention.forward
        if isinstance(fused, FusedAttention) and self._defers(hidden):
            attended, rest = fused.deferred(hidden_states=normed, **given)
        else:
            attended, rest = parts.attention(hidden_states=normed, **given)[0], None
        return self._block(*self._second(attended, hidden, rest))

    def _defers(self, hidden: torch.Tensor) -> bool:
        """Whether the norm of so many rows had better end what o_proj's adapters add."""
        tokens = hidden.numel() // hidden.shape[-1]
        return tokens <= MOST_ENDED or tokens > MOST_TOKENS

    def _second(
        self, branch: torch.Tensor, residual: torch.Tensor, rest: DenseDelta | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first sum and the norm of it; few tokens are routed in the same launch."""
        parts, router = self.parts, self.parts.router
        norm, width = parts.second.norm, residual.shape[-1]
        few = residual.numel() <= MOST_TOKENS * width
        if router is None or self.scratch is None or not few or router.is_adapted:
            return add_rms_norm(branch, residual, norm, parts.multiplier, self.pdl, rest)
        total, normed, ids, weights = norm_router(
            branch.reshape(-1, width),
            residual.reshape(-1, width),
            norm,
            parts.multiplier,
            router.kernel_router(branch.dtype),
            self.scratch,
            self.pdl,
            rest,
        )
        router.set_ahead(normed, (self.scratch.logits, weights, ids))
        return total.view(residual.shape), normed.view(residual.shape)

    def _block(self, residual: torch.Tensor, normed: torch.Tensor) -> Both:
        """residual plus what the block gives for `normed`, and the norm of it, if it is known."""
        parts = self.parts
        following = parts.following
        norm = None if following is None else following.norm
        rows = residual.view(-1, residual.shape[-1])
        finish = Finish(rows, parts.multiplier, norm)
        if parts.experts is not None:
            parts.experts.finish = finish
        out: torch.Tensor = _first(parts.block(normed)).view(residual.shape)
        if finish.total is not None:
            return out, None if finish.normed is None else finish.normed.view(out.shape)
        if norm is not None:
            return add_rms_norm(out, residual, norm, parts.multiplier, self.pdl)
        return residual + (out if parts.multiplier == 1.0 else out * parts.multiplier), None


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def recognise_layer(
    layer: nn.Module,
    attention: nn.Module,
    records: Records,
    norms: Mapping[nn.Module, FusedNorm],
    experts: Mapping[nn.Module, ExpertsLayer],
    routers: Mapping[nn.Module, FusedRouter],
) -> Parts | str:
    """The parts of `layer`, or why it is another kind of layer."""
    children = [child for child in layer.children() if records.only(child) is not None]
    called = sorted(children, key=lambda child: _place(records, child))
    if len(called) != 4 or called[1] is not attention:
        return "it is not norm, attention, norm, block"
    first, _, second, block = called
    if first not in norms or second not in norms:
        return "one of its norms is of an unknown form"
    calls = [records.only(module) for module in (layer, *called)]
    own, *inner = [call for call in calls if call is not None]
    if len(inner) != 4 or len(own.args) > 1 or isinstance(own.output, tuple):
        return "it is called in another way"
    options = _options(own, inner[1])
    if options is None:
        return "it computes what attention gets"
    multiplier = float(getattr(layer, "residual_multiplier", 1.0))
    if not _adds(own, inner, multiplier):
        return "its residual adds are of another kind"
    readers = [norm for module, norm in norms.items() if _reads(records, module, own.output)]
    return Parts(
        norms[first],
        attention,
        norms[second],
        block,
        multiplier,
        options,
        readers[0] if len(readers) == 1 else None,
        _experts_of(block, inner[3], records, experts),
        _router_of(block, inner[3], records, routers),
    )


def _place(records: Records, module: nn.Module) -> int:
    """When `module` was called, among all."""
    return list(records.calls).index(module)


def _options(layer: Call, attention: Call) -> tuple[str, ...] | None:
    """Keywords that attention gets as the layer got them; None: there are others."""
    names = [name for name in attention.kwargs if name != "hidden_states"]
    passed = all(
        name in layer.kwargs and layer.kwargs[name] is attention.kwargs[name] for name in names
    )
    by_name = "hidden_states" in attention.kwargs and not attention.args
    return tuple(names) if passed and by_name else None


def _adds(layer: Call, inner: list[Call], multiplier: float) -> bool:
    """Whether the layer is two adds to the residual, each of a normed branch."""
    first, attention, second, block = inner

    def add(branch: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        scaled = branch if multiplier == 1.0 else branch * multiplier
        return residual + scaled.view(residual.shape)

    return (
        first.hidden is layer.hidden
        and attention.hidden is first.output
        and torch.equal(second.hidden, add(attention.result, layer.hidden))
        and block.hidden is second.output
        and len(block.args) == 1
        and not block.kwargs
        and torch.equal(layer.output, add(block.result, second.hidden))
    )


def _reads(records: Records, norm: nn.Module, tensor: torch.Tensor) -> bool:
    call = records.only(norm)
    return call is not None and call.hidden is tensor


def _experts_of(
    block: nn.Module, call: Call, records: Records, experts: Mapping[nn.Module, ExpertsLayer]
) -> ExpertsLayer | None:
    """The experts below `block` whose output it returns as it is; None if it does not."""
    inside = [module for module in block.modules() if module in experts]
    found = records.only(inside[0]) if len(inside) == 1 else None
    if found is None:
        return None
    given, result = found.result, call.result
    same = given.data_ptr() == result.data_ptr() and given.numel() == result.numel()
    return experts[inside[0]] if same else None


def _router_of(
    block: nn.Module, call: Call, records: Records, routers: Mapping[nn.Module, FusedRouter]
) -> FusedRouter | None:
    """The router below `block` that is given the block's own input; None if there is none."""
    inside = [module for module in block.modules() if module in routers]
    found = records.only(inside[0]) if len(inside) == 1 else None
    if found is None or found.hidden.dtype != call.hidden.dtype:
        return None
    given, own = found.hidden, call.hidden
    same = given.data_ptr() == own.data_ptr() and given.numel() == own.numel()
    return routers[inside[0]] if same else None
