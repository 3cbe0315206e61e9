"""A whole MoE layer in four launches (one token: three); LoRA adds one a product it adapts."""

from dataclasses import dataclass

import torch
import triton

from vexpert.kernels.combine import combine
from vexpert.kernels.combine_norm import combine_norm
from vexpert.kernels.common import can_use_pdl, ceil_div
from vexpert.kernels.moe_delta import MOST_RANKS, Delta, moe_delta
from vexpert.kernels.moe_down import moe_down
from vexpert.kernels.moe_factors import PairFactors, SiteFactors
from vexpert.kernels.moe_gate_up import moe_gate_up
from vexpert.kernels.moe_order import PairOrder, identity_order, order_pairs
from vexpert.kernels.moe_order_chunks import order_many_pairs
from vexpert.kernels.moe_pieces import TilePieces, find_pieces
from vexpert.kernels.moe_product import Expand
from vexpert.kernels.moe_runs import TileRuns, find_runs
from vexpert.kernels.moe_shrink import moe_shrink, room_for_h
from vexpert.ops.experts_replay import EXPERTS, experts_inputs, experts_key
from vexpert.ops.moe_plan import MoePlan, MoeShape, choose_plan
from vexpert.ops.plan_rows import PlanRows
from vexpert.ops.types import ExpertsLora, ExpertsTensors, Finish, LoraSite, SiteTable

MOST_INNER = 64  # shrunk columns of a product whose launch shrinks too; more need registers
MAX_EXPERTS = 4094  # bins of the order's histogram, less two


class FusedExpertsKernel:
    """Implements `ops.backend.FusedExperts`. Graphs can be captured: the host chooses the plan."""

    def __init__(self, experts: ExpertsTensors, rows: PlanRows | None = None) -> None:
        assert experts.down.shape[0] <= MAX_EXPERTS, experts.down.shape
        self.experts = experts
        self.rows = rows  # of plans; None: the packaged ones
        weights = (experts.gate_up, experts.down)
        interpreted = triton.knobs.runtime.interpret
        self.can_use_tma = not (experts.is_interleaved or interpreted) and all(
            weight.is_contiguous() and weight.data_ptr() % 16 == 0 and row_bytes(weight) % 16 == 0
            for weight in weights
        )
        self.can_use_pdl = can_use_pdl(experts.down.device)

    def __call__(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        lora: ExpertsLora | None,
        finish: Finish | None = None,
    ) -> torch.Tensor:
        if hidden.shape[0] == 0:
            return torch.empty_like(hidden)
        plan = self.choose(topk_ids, lora)
        return fused_experts(self.experts, hidden, topk_ids, topk_weights, lora, plan, finish)

    def order(self, topk_ids: torch.Tensor, lora: ExpertsLora | None) -> PairOrder:
        """What the layer launches before its products: to be timed alone."""
        plan = self.choose(topk_ids, lora)
        return _order(topk_ids, None, lora, self.experts.down.shape[0], plan)

    def choose(self, topk_ids: torch.Tensor, lora: ExpertsLora | None) -> MoePlan:
        """The plan of a step with topk_ids [T, K]."""
        shape = self.shape(topk_ids)
        if lora is None:
            return choose_plan(shape, 0, rows=self.rows)
        rank = max(lora.most_rank(is_down=True), lora.most_rank(is_down=False) // 2)
        return choose_plan(shape, lora.num_adapters, rank, self.rows)

    def shape(self, topk_ids: torch.Tensor) -> MoeShape:
        """What the plan depends on, for topk_ids [T, K]."""
        num_experts, hidden_size, intermediate_size = self.experts.down.shape
        return MoeShape(
            tokens=topk_ids.shape[0],
            top_k=topk_ids.shape[1],
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            dtype=self.experts.down.dtype,
            can_use_tma=self.can_use_tma,
            can_use_pdl=self.can_use_pdl,
        )


def row_bytes(weight: torch.Tensor) -> int:
    """Bytes of a row along the last dimension."""
    return weight.shape[-1] * weight.element_size()


def site_factors(pair: tuple[LoraSite, SiteTable] | None, most_rank: int) -> SiteFactors | None:
    """A site as the kernels take it; shrunk rows are as wide as the widest active adapter needs."""
    if pair is None:
        return None
    site, table = pair
    width = ceil_div(max(most_rank, 1), 16) * 16
    slice_width = min(width, ceil_div(site.max_rank // len(site.slices), 16) * 16)
    numbers = (width, slice_width, table.alignment)
    return SiteFactors(table.arena, table.packed, *numbers, table.arrivals)


def fused_experts(
    experts: ExpertsTensors,
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora: ExpertsLora | None,
    plan: MoePlan,
    finish: Finish | None = None,
) -> torch.Tensor:
    """hidden [T, H], topk_ids and topk_weights [T, K] -> [T, H] in hidden's dtype.

    Pairs with a sentinel expert add nothing. The result is `finish.total` if there is a finish.
    """
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    out, normed = EXPERTS(
        plan,
        experts_key(experts, lora, finish),
        experts_inputs(hidden, topk_ids, topk_weights, experts, lora, finish),
        lambda: _launch(experts, hidden, topk_ids, topk_weights, lora, plan, finish),
    )
    assert out is not None
    if finish is not None:
        finish.total, finish.normed = out, normed
    return out


def _launch(
    experts: ExpertsTensors,
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora: ExpertsLora | None,
    plan: MoePlan,
    finish: Finish | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, None), or total and normed of the finish; topk_ids and topk_weights contiguous."""
    base, pdl = plan.base, plan.base.pdl
    scales = None if experts.scale_input else topk_weights
    order = _order(topk_ids, scales, lora, experts.down.shape[0], plan)
    step_lora = _step_lora(order, lora, plan)
    x, scaled = hidden, experts.scale_input
    if scaled:
        scaled_rows = hidden.unsqueeze(1) * topk_weights.unsqueeze(2)
        x = scaled_rows.to(hidden.dtype).view(-1, hidden.shape[1])

    inter = moe_gate_up(
        x,
        experts.gate_up,
        experts.gate_up_bias,
        order,
        experts.columns,
        experts.activation,
        base.gate_up,
        step_lora.before(x, experts.columns[0], is_down=False, scaled=scaled),
        scaled,
        pdl,
    )
    out = moe_down(
        inter,
        experts.down,
        experts.down_bias,
        order.scale,
        order,
        base.down,
        step_lora.before(inter, experts.down.shape[1], is_down=True),
        pdl,
    )
    pairs = (out, topk_ids.view(-1), None, experts.down.shape[0])
    if finish is None:
        return combine(*pairs, topk_ids.shape[1], pdl), None
    return combine_norm(*pairs, finish.residual, finish.multiplier, finish.norm, pdl)


@dataclass(frozen=True)
class _StepLora:
    """What LoRA adds to the products of a step; of pieces and runs at most one is there."""

    order: PairOrder
    plan: MoePlan
    pieces: TilePieces | None  # then by deltas
    runs: TileRuns | None  # then by run; else by row

    def before(
        self, source: torch.Tensor, size: int, is_down: bool, scaled: bool = False
    ) -> Expand | Delta | None:
        """Launches what has to come before the product of `source` that has `size` columns a slice.

        scaled: `source` is by pair.
        """
        order, how, pdl = self.order, self.plan.lora, self.plan.base.pdl
        factors = order.factors
        site = None if factors is None else factors.down if is_down else factors.gate_up
        if site is None:
            return None
        if self.pieces is not None:
            assert how.delta is not None
            delta = how.delta.down if is_down else how.delta.gate_up
            return moe_delta(source, order, self.pieces, delta, size, is_down, scaled, pdl)
        shape = how.down_shrink if is_down else how.shrink
        by_row = self.runs is None and not order.is_identity
        inner = how.inner and by_row and site.max_rank <= MOST_INNER
        if inner:
            h = room_for_h(order, shape, is_down, source.shape[1])
        else:
            h = moe_shrink(source, order, shape, is_down, scaled, pdl, self.runs)
        return Expand(
            h,
            site,
            self.runs,
            how.group,
            how.item_stages,
            how.prefetch,
            early=how.early and self.runs is not None,
            shrink=shape if inner else None,
        )


def _step_lora(order: PairOrder, lora: ExpertsLora | None, plan: MoePlan) -> _StepLora:
    """Finds the pieces, or the runs, that the plan takes."""
    how, pdl = plan.lora, plan.base.pdl
    pieces = runs = None
    if how.delta is not None and _fits(order.factors):
        pieces = find_pieces(order, how.delta.piece, pdl)
    elif lora is not None and how.by_run:
        runs = find_runs(order, how.shrink.block_m, lora.num_adapters, pdl)
    return _StepLora(order, plan, pieces, runs)


def _fits(factors: PairFactors | None) -> bool:
    """Whether `moe_delta` takes the ranks of all sites."""
    if factors is None:
        return False
    sites = (factors.gate_up, factors.down)
    return all(site is None or site.max_rank <= MOST_RANKS for site in sites)


def _order(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    lora: ExpertsLora | None,
    num_experts: int,
    plan: MoePlan,
) -> PairOrder:
    base, by_run = plan.base, plan.lora.by_run
    factors = None
    if lora is not None:
        up = site_factors(lora.gate_up, lora.most_rank(is_down=False))
        down = site_factors(lora.down, lora.most_rank(is_down=True))
        factors = PairFactors.empty(lora.slots, up, down, 0 if by_run else topk_ids.numel())
    if base.is_identity:
        return identity_order(topk_ids, factors, num_experts, base.block_m, topk_weights)
    block_m, pdl = base.block_m, base.pdl
    if base.order_chunk:
        assert by_run, plan
        return order_many_pairs(
            topk_ids, factors, num_experts, block_m, pdl, base.order_chunk, topk_weights
        )
    return order_pairs(topk_ids, factors, num_experts, block_m, pdl, not by_run, topk_weights)
