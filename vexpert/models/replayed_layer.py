"""Whole decoder layers of prompts as one program each (`kernels/replay.py`).

What a layer launches follows from what it is made of, from the step's lengths, and from the bounds
of the step's adapters. All of that is the key, so layers that are alike share a program; weights,
tables and the step's arrays are its inputs. Few tokens run in captured graphs; of many, the device
is the slower one anyway, and all that a layer makes would live until its end.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vexpert.kernels.dense_order import RowOrder
from vexpert.kernels.norm_router import MOST_TOKENS as LEAST_TOKENS
from vexpert.kernels.replay import Replays
from vexpert.lora.layers import LoraLinear, LoraPackedLinear
from vexpert.lora.layers.rows import SiteDelta
from vexpert.lora.types import BatchView, LoraState
from vexpert.models.attention import AttentionLayer
from vexpert.models.fused_attention import FusedAttention, prompt_lengths
from vexpert.models.fused_norm import FusedNorm
from vexpert.models.plan import StepPlan
from vexpert.ops.fused_experts import FusedExpertsKernel
from vexpert.ops.triton_backend import TritonRouting
from vexpert.ops.types import LoraSite, SiteTable

if TYPE_CHECKING:
    from vexpert.models.fused_layer import Parts

MOST_TOKENS = 4096

Both = tuple[torch.Tensor, torch.Tensor | None]  # total, and the norm that follows of it


class LayerReplays:
    """The programs of one model's layers. Equal facts get equal small numbers, as keys."""

    def __init__(self) -> None:
        self.replays = Replays("decoder layer")
        self._numbers: dict[Hashable, int] = {}

    def number(self, facts: Hashable) -> int:
        return self._numbers.setdefault(facts, len(self._numbers))


@dataclass(frozen=True)
class _Layer:
    """What one layer is made of, as far as no step changes it."""

    number: int  # of all that the host decides by
    # [...], weights and caches, each of the shape and dtype that its module gives it
    tensors: list[torch.Tensor]
    sites: tuple[int, ...]  # that adapters may change
    state: LoraState | None
    rows: SiteDelta | None  # whose grouping of the rows all dense layers share
    # arenas [N], model's dtype; of a site SiteTable.packed [3 + 4 * n, S], int64, and arrivals
    tables_of_sites: list[torch.Tensor]


@dataclass(frozen=True)
class _Step:
    """What all layers of a step share."""

    angles: tuple[torch.Tensor, torch.Tensor]  # cos and sin, the model's dtype: [1, T, D]
    key: Hashable
    # angles; the batch's and the order's, [T] or [B, ...], of dtype int32 or int64
    tensors: list[torch.Tensor]
    order: RowOrder | None


class ReplayedLayer:
    """Runs one decoder layer, or replays it. Built when everything is in its place."""

    def __init__(self, parts: "Parts", shared: LayerReplays) -> None:
        self._parts = parts
        self._shared = shared
        self._known: _Layer | None = None
        self._of: tuple[object, object] | None = None  # the cache and the tables that it is of

    def __call__(
        self,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor] | None,
        run: Callable[[], Both],
    ) -> Both:
        """(total, its norm or None) of hidden and its norm [1, T, H]: as `run()` gives them."""
        running = self._prompt(hidden, normed)
        if running is None or angles is None:
            return run()
        layer = self._layer()
        if layer is None:
            return run()
        view = None if layer.state is None else layer.state.view
        if view is not None and not _is_bounded(layer, view):
            return run()
        step = _find_step(running, _fused(self._parts), angles, layer, view)
        key: Hashable = layer.number, step.key
        inputs = [hidden, normed, *layer.tensors, *step.tensors]
        if view is not None and step.order is not None:
            assert view.signature is not None
            ranks = tuple([view.signature.ranks[site] for site in layer.sites])
            key = key, ranks, view.signature.adapters
            inputs += layer.tables_of_sites
        total, ahead = self._shared.replays(None, key, inputs, run, unsaid=2)
        assert total is not None
        return total, ahead

    def _prompt(self, hidden: torch.Tensor, normed: torch.Tensor) -> StepPlan | None:
        """The running step, if it is one of prompts that may be replayed."""
        tokens = hidden.numel() // hidden.shape[-1]
        router = self._parts.router
        if not LEAST_TOKENS < tokens <= MOST_TOKENS or not _is_on_gpu(hidden):
            return None
        if router is None or router.is_adapted or hidden.dtype is not normed.dtype:
            return None
        running = _cached(self._parts).context.running
        return running if running.attention_batch.max_query_len > 1 else None

    def _layer(self) -> _Layer | None:
        """What the layer is made of; None: something that is not replayed as a whole."""
        cached, packed = _cached(self._parts), _packed(self._parts)
        deltas = () if packed is None else packed.deltas
        tables = deltas[0].state.tables if deltas else None
        if self._of is None or self._of[0] is not cached.keys or self._of[1] is not tables:
            self._of = cached.keys, tables
            self._known = _describe(self._parts, cached, self._shared)
        return self._known


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _fused(parts: "Parts") -> FusedAttention:
    fused = parts.attention.forward
    assert isinstance(fused, FusedAttention)
    return fused


def _cached(parts: "Parts") -> AttentionLayer:
    layer = parts.attention.vexpert_layer
    assert isinstance(layer, AttentionLayer)
    return layer


def _packed(parts: "Parts") -> LoraPackedLinear | None:
    """q, k and v, if they are one product."""
    fused = parts.attention.forward
    return fused.packed if isinstance(fused, FusedAttention) else None


def _is_bounded(layer: _Layer, view: BatchView) -> bool:
    """Whether the host decides by the signature alone."""
    state = layer.state
    assert state is not None
    return view.signature is not None and view.use_virtual_experts and not state.extras


def _find_step(
    running: StepPlan,
    fused: FusedAttention,
    angles: tuple[torch.Tensor, torch.Tensor],
    layer: _Layer,
    view: BatchView | None,
) -> _Step:
    """Made by the first layer of the step that asks with these angles."""
    found = running.found.get(id(angles[0]))
    if isinstance(found, _Step):
        return found
    batch = running.attention_batch
    tensors = [*angles, running.step.cache_rows, *fused.arrays(batch)]
    order = None
    if view is not None and layer.rows is not None:
        group = layer.rows.shared_group(view, LoraLinear.rows_key, view.slots)
        assert isinstance(group.routing, TritonRouting)
        order = group.routing.order
        order.settle()  # else the first layer's launches would be others
        tensors += [order.slots, *order.arrays]
    key = prompt_lengths(batch), tuple([(t.dtype, t.shape, t.stride()) for t in tensors])
    made = running.found[id(angles[0])] = _Step(angles, key, tensors, order)
    return made


def _describe(parts: "Parts", cached: AttentionLayer, shared: LayerReplays) -> _Layer | None:
    fused, experts = parts.attention.forward, parts.experts
    runner = None if experts is None else experts.runner
    kernel = getattr(runner, "fused", None)
    if not isinstance(fused, FusedAttention) or not isinstance(kernel, FusedExpertsKernel):
        return None
    assert experts is not None
    router, q_k_v, output = parts.router, fused.packed, fused.output or fused.module.o_proj
    if q_k_v is None or router is None or not isinstance(output, LoraLinear | LoraPackedLinear):
        return None
    own, bias = kernel.experts, router.bias()
    linears = q_k_v, output, router.module
    given = [tensor for one in linears for tensor in (one.weight, getattr(one, "bias", None))]
    norms = [parts.second, parts.following]
    given += [None if norm is None else norm.norm.weight for norm in norms]
    given += [bias, own.gate_up, own.down, own.gate_up_bias, own.down_bias]
    tensors = [*fused.tensors, *(one for one in given if one is not None)]
    tensors += [cached.keys, cached.values]
    deltas = _deltas(q_k_v, output)
    sites = (*(delta.site for delta in deltas), *experts.sites)
    state = deltas[0].state if deltas else None
    tables = None if state is None else state.tables
    found = [] if tables is None else [tables[site.index] for site in sites]
    facts: tuple[Hashable, ...] = (
        (id(type(parts.block)), parts.multiplier, *map(_norm_facts, norms)),
        (fused.facts, cached.kind, cached.batch_invariant, len(fused.tensors)),
        (router.choice, router.product, router.weights, router.ids_first),
        (own.activation, own.is_interleaved, own.scale_input, kernel.can_use_tma),
        tuple([one is None for one in given]),
        tuple([(one.dtype, one.shape, one.stride()) for one in tensors]),
        tuple(map(_site_facts, sites)),
        _table_facts(found),
    )
    return _Layer(
        shared.number(facts),
        tensors,
        tuple(site.index for site in sites),
        state,
        deltas[0] if deltas else None,
        _tensors_of(found),
    )


def _deltas(q_k_v: LoraPackedLinear, output: LoraLinear | LoraPackedLinear) -> list[SiteDelta]:
    """Of the sites of q, k, v and o; none on a server without LoRA."""
    if isinstance(output, LoraPackedLinear):
        return [*q_k_v.deltas, *output.deltas]
    return [*q_k_v.deltas, output.delta]


def _norm_facts(norm: FusedNorm | None) -> Hashable:
    return None if norm is None else (norm.norm.eps, norm.norm.form, norm.norm.width, norm.dtype)


def _site_facts(site: LoraSite) -> Hashable:
    return site.max_rank, site.in_features, site.out_features, site.slices


def _table_facts(tables: list[SiteTable]) -> Hashable:
    """Shapes, and where tables lie from one another: launches are given the steps between them."""
    return tuple(
        (
            table.packed.shape,
            table.packed.data_ptr() - tables[0].packed.data_ptr(),
            table.alignment,
            table.arena.dtype,
            table.arena is tables[0].arena,
        )
        for table in tables
    )


def _tensors_of(tables: list[SiteTable]) -> list[torch.Tensor]:
    """Each once."""
    arenas = {id(table.arena): table.arena for table in tables}
    both = [tensor for table in tables for tensor in (table.packed, table.arrivals)]
    return [*arenas.values(), *both]
