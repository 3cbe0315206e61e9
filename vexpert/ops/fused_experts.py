"""A whole MoE layer, LoRA included, in four launches (base: three; few tokens: two and one more)."""

from dataclasses import dataclass

import torch

from vexpert.kernels.activations import Activation
from vexpert.kernels.combine import combine
from vexpert.kernels.moe_down import moe_down, moe_down_tokens
from vexpert.kernels.moe_gate_up import SiteFactors, moe_gate_up
from vexpert.kernels.moe_order import identity_order, order_pairs
from vexpert.kernels.moe_order_chunks import order_many_pairs
from vexpert.kernels.moe_shrink import moe_shrink
from vexpert.ops.moe_plan import MoePlan
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

    @property
    def num_slots(self) -> int:
        factors = self.gate_up or self.down
        assert factors is not None
        return factors.num_slots


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
    experts = weights.down.shape[0]
    slots = None if lora is None else lora.slots
    topk_weights = topk_weights.contiguous()
    if plan.is_identity:
        order = identity_order(topk_ids, slots, experts, plan.block_m)
    elif plan.order_chunk:
        order = order_many_pairs(
            topk_ids, slots, experts, plan.block_m, plan.pdl, plan.order_chunk
        )
    else:
        num_slots = 0 if lora is None else lora.num_slots
        order = order_pairs(topk_ids, slots, experts, num_slots, plan.block_m, plan.pdl)
    x, scaled = hidden, weights.scale_input
    if scaled:
        scaled_rows = hidden.unsqueeze(1) * topk_weights.unsqueeze(2)
        x = scaled_rows.to(hidden.dtype).view(-1, hidden.shape[1])
    up_lora = None if lora is None else lora.gate_up
    down_lora = None if lora is None else lora.down
    h = None
    if up_lora is not None:
        h = moe_shrink(x, order, up_lora, plan.shrink, scaled, pdl=plan.pdl)
    inter, hd = moe_gate_up(
        x,
        weights.gate_up,
        weights.gate_up_bias,
        order,
        weights.columns,
        weights.activation,
        plan.gate_up,
        h,
        up_lora,
        None if plan.down_shrink else down_lora,
        scaled,
        plan.pdl,
    )
    if down_lora is not None and plan.down_shrink is not None:
        hd = moe_shrink(inter, order, down_lora, plan.down_shrink, by_position=True, pdl=plan.pdl)
    down = moe_down_tokens if plan.is_identity else moe_down
    out = down(
        inter,
        weights.down,
        weights.down_bias,
        None if scaled else topk_weights,
        order,
        plan.down,
        hd,
        down_lora,
        plan.pdl,
    )
    if plan.is_identity:
        return out
    return combine(out, topk_ids.view(-1), None, experts, topk_ids.shape[1], plan.pdl)
