"""A whole MoE layer in four launches (one token: three); LoRA adds one for each product it adapts."""

from dataclasses import dataclass

import torch

from vexpert.kernels.activations import Activation
from vexpert.kernels.combine import combine
from vexpert.kernels.moe_down import moe_down
from vexpert.kernels.moe_factors import PairFactors, SiteFactors
from vexpert.kernels.moe_gate_up import Expand, moe_gate_up
from vexpert.kernels.moe_order import PairOrder, identity_order, order_pairs
from vexpert.kernels.moe_order_chunks import order_many_pairs
from vexpert.kernels.moe_runs import find_runs
from vexpert.kernels.moe_shrink import moe_shrink
from vexpert.ops.moe_plan import BasePlan, MoePlan
from vexpert.ops.types import LoraSite, SiteTable


@dataclass(frozen=True)
class FusedWeights:
    """Weights of one layer as views: gate_up [E, n * I, H], down [E, H, I], in any strides."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None  # [E, n * I]
    down_bias: torch.Tensor | None  # [E, H]
    activation: Activation
    is_interleaved: bool
    scale_input: bool

    @property
    def columns(self) -> tuple[int, int, int]:
        """(I, first column of up, step between columns)."""
        size = self.down.shape[2]
        if not self.activation.has_gate:
            return size, 0, 1
        return (size, 1, 2) if self.is_interleaved else (size, size, 1)


@dataclass(frozen=True)
class FusedLora:
    """Adapters of one step on one layer; a product that no adapter of the step has is None."""

    slots: torch.Tensor  # [T], < 0: base
    gate_up: SiteFactors | None
    down: SiteFactors | None


def site_factors(site: LoraSite, table: SiteTable) -> SiteFactors:
    """A site's table as the kernels take it."""
    return SiteFactors(
        table.arena,
        table.rank,
        table.a_offset,
        table.a_stride,
        table.slice_rank,
        table.slice_column,
        table.b_offset,
        table.b_stride,
        site.max_rank,
    )


def fused_experts(
    weights: FusedWeights,
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora: FusedLora | None,
    plan: MoePlan,
) -> torch.Tensor:
    """hidden [T, H], topk_ids and topk_weights [T, K] -> [T, H] in hidden's dtype.

    Pairs with a sentinel expert add nothing.
    """
    base, pdl = plan.base, plan.base.pdl
    topk_weights = topk_weights.contiguous()
    order = _order(topk_ids, lora, weights.down.shape[0], base)
    runs = None
    if lora is not None and plan.lora.by_run:
        runs = find_runs(order, pdl)
    x, scaled = hidden, weights.scale_input
    if scaled:
        scaled_rows = hidden.unsqueeze(1) * topk_weights.unsqueeze(2)
        x = scaled_rows.to(hidden.dtype).view(-1, hidden.shape[1])

    def expand(source: torch.Tensor, factors: SiteFactors | None, is_down: bool) -> Expand | None:
        if factors is None:
            return None
        shape = plan.lora.down_shrink if is_down else plan.lora.shrink
        h = moe_shrink(source, order, shape, is_down, scaled and not is_down, pdl)
        how = plan.lora
        return Expand(
            h, factors, runs, how.group, how.item_stages, how.prefetch, how.early and how.by_run
        )

    inter = moe_gate_up(
        x,
        weights.gate_up,
        weights.gate_up_bias,
        order,
        weights.columns,
        weights.activation,
        base.gate_up,
        expand(x, lora.gate_up if lora else None, is_down=False),
        scaled,
        pdl,
    )
    out = moe_down(
        inter,
        weights.down,
        weights.down_bias,
        None if scaled else topk_weights,
        order,
        base.down,
        expand(inter, lora.down if lora else None, is_down=True),
        pdl,
    )
    return combine(out, topk_ids.view(-1), None, weights.down.shape[0], topk_ids.shape[1], pdl)


def _order(
    topk_ids: torch.Tensor, lora: FusedLora | None, num_experts: int, plan: BasePlan
) -> PairOrder:
    factors = None
    if lora is not None:
        factors = PairFactors.empty(lora.slots, lora.gate_up, lora.down, topk_ids.numel())
    if plan.is_identity:
        return identity_order(topk_ids, factors, num_experts, plan.block_m, plan.pdl)
    if plan.order_chunk:
        return order_many_pairs(
            topk_ids, factors, num_experts, plan.block_m, plan.pdl, plan.order_chunk
        )
    return order_pairs(topk_ids, factors, num_experts, plan.block_m, plan.pdl)
