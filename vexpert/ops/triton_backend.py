"""The backend for GPUs: Triton kernels and device-side routing, without any sync."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from vexpert.kernels.blocks import Blocks, make_blocks, virtual_keys
from vexpert.kernels.combine import combine
from vexpert.kernels.dense_factors import DenseDelta, HeadColumns
from vexpert.kernels.dense_order import RowOrder, order_rows
from vexpert.kernels.grouped_gemm import grouped_gemm
from vexpert.kernels.head_lora import head_lora
from vexpert.kernels.lora_expand import SliceRun, lora_expand
from vexpert.kernels.lora_shrink import lora_shrink
from vexpert.ops.backend import check_operands
from vexpert.ops.dense_plan import choose_dense_plan
from vexpert.ops.fused_experts import MAX_EXPERTS, FusedExpertsKernel
from vexpert.ops.packed_linear import (
    add_dense,
    deferred_linear,
    find_factors,
    is_dense,
    packed_linear,
    shape_of,
)
from vexpert.ops.plan_rows import PlanRows, packaged
from vexpert.ops.routing import Arrangement, Routing
from vexpert.ops.types import ExpertsTensors, LoraSite, OutputSlice, PackedLora, SiteTable


@dataclass(frozen=True)
class TritonRouting(Routing):
    """What a step's rows are; each kind of kernel finds its own arrays when it first asks."""

    slots: torch.Tensor  # [R] int64, < 0: base
    experts: torch.Tensor | None  # [R] int64, or a sentinel; None: a dense layer
    num_experts: int
    num_slots: int
    block_m: int | None = None  # rows of a block; None: by how many rows a key has

    @cached_property
    def blocks(self) -> Blocks:
        """Blocks of one virtual expert's rows."""
        experts = torch.zeros_like(self.slots) if self.experts is None else self.experts
        keys = virtual_keys(self.slots, experts, self.num_experts, self.num_slots)
        num_keys = self.num_slots * self.num_experts
        return make_blocks(keys, self.num_experts, num_keys, self.block_m)

    @cached_property
    def order(self) -> RowOrder:
        """Rows of a dense layer by slot."""
        assert self.experts is None
        return order_rows(self.slots.contiguous(), self.num_slots)


@dataclass(frozen=True)
class TritonArrangement(Arrangement):
    """Pairs in their natural order; the blocks hold the order by expert."""

    blocks: Blocks
    num_experts: int
    top_k: int


@lru_cache(maxsize=1024)
def slice_runs(slices: tuple[OutputSlice, ...]) -> tuple[SliceRun, ...]:
    """All slices in one run if they are evenly spaced (gate and up always are), else one each."""
    first, step = slices[0], slices[1].start - slices[0].start if len(slices) > 1 else 0
    even = [
        OutputSlice(first.start + i * step, first.size, first.stride) for i in range(len(slices))
    ]
    if list(slices) == even:
        return (SliceRun(0, len(slices), first.start, step, first.size, first.stride),)
    return tuple(
        SliceRun(i, 1, part.start, 0, part.size, part.stride) for i, part in enumerate(slices)
    )


class TritonBackend:
    """Implements `LoraBackend`. Graph capture is safe: shapes alone decide what is launched."""

    name = "triton"
    can_fuse = True
    can_pack = True

    def __init__(self, rows: PlanRows | None = None) -> None:
        self.rows = packaged() if rows is None else rows  # of plans
        # Of what runs step by step: one for all steps, where plans are.
        self.block_m = 16 if self.rows.is_batch_invariant else None
        self.splits = 1 if self.rows.is_batch_invariant else None

    def route(
        self, slots: torch.Tensor, experts: torch.Tensor | None, num_experts: int, num_slots: int
    ) -> TritonRouting:
        return TritonRouting(slots.shape[0], slots, experts, num_experts, num_slots, self.block_m)

    def shrink(
        self,
        x: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        routing: Routing,
        x_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(routing, TritonRouting)
        return lora_shrink(
            x if x.stride(1) == 1 else x.contiguous(),
            x_rows,
            table.arena,
            table.rank,
            table.a_offset,
            table.a_stride,
            routing.blocks,
            site.max_rank,
            self.splits,
        )

    def expand(
        self,
        h: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        routing: Routing,
        y: torch.Tensor,
        fuse_add_to_output: bool = True,
        add_output_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(routing, TritonRouting)
        out = y if fuse_add_to_output else torch.zeros_like(y)
        columns = (table.slice_rank, table.slice_column, table.b_offset, table.b_stride)
        for run in slice_runs(site.slices):
            lora_expand(
                h,
                table.arena,
                columns,
                routing.blocks,
                run,
                add_output_mask,
                out,
                fuse_add_to_output,
            )
        return out

    def apply(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        routing: Routing,
        x_rows: torch.Tensor | None = None,
    ) -> None:
        check_operands(self.name, x, y, site, table, routing.num_rows)
        assert isinstance(routing, TritonRouting)
        if x_rows is None and routing.experts is None and is_dense(site, table):
            every = tuple(range(routing.num_slots))
            self._add_dense(x, y, PackedLora((site,), (table,), routing, every))
            return
        self.expand(self.shrink(x, site, table, routing, x_rows), site, table, routing, y)

    def apply_per_adapter(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        slots: torch.Tensor,
        experts: torch.Tensor | None,
        active_slots: tuple[int, ...],
        x_rows: torch.Tensor | None = None,
    ) -> None:
        """One routing, shrink and expand per adapter of `active_slots`; can be captured too."""
        for slot in active_slots:
            if table.host_rank[slot]:
                own = torch.where(slots == slot, slots, -1)
                routing = self.route(own, experts, site.num_experts, len(table.host_rank))
                self.apply(x, y, site, table, routing, x_rows)

    def packed_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lora: PackedLora | None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        adapters = 0 if lora is None else lora.num_adapters
        plan = choose_dense_plan(shape_of(x, weight.shape[0]), adapters, self.rows)
        if lora is None:
            return packed_linear(x, weight, bias, None, None, plan, out_dtype)
        assert isinstance(lora.routing, TritonRouting)
        return packed_linear(x, weight, bias, lora, lora.routing.order, plan, out_dtype)

    def deferred_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lora: PackedLora,
        tiles: bool = False,
    ) -> tuple[torch.Tensor, DenseDelta | None]:
        assert isinstance(lora.routing, TritonRouting)
        for site, table in zip(lora.sites, lora.tables, strict=True):
            assert is_dense(site, table), site
        if self.rows.is_batch_invariant:  # readers end LoRA of few rows only, and otherwise
            return self.packed_linear(x, weight, bias, lora), None
        plan = choose_dense_plan(shape_of(x, weight.shape[0]), lora.num_adapters, self.rows)
        return deferred_linear(x, weight, bias, lora, lora.routing.order, plan, tiles)

    def add_by_head(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        lora: PackedLora,
        columns: HeadColumns,
        of_keys: bool,
    ) -> None:
        assert isinstance(lora.routing, TritonRouting)
        (site,), (table,) = lora.sites, lora.tables
        assert is_dense(site, table), site
        order, most_rank = lora.routing.order, lora.most_rank
        where = table.arena, table.packed
        head_lora(x, y, order, *where, columns, of_keys, most_rank, table.alignment)

    def _add_dense(self, x: torch.Tensor, y: torch.Tensor, lora: PackedLora) -> None:
        assert isinstance(lora.routing, TritonRouting)
        rows = x if x.stride(1) == 1 else x.contiguous()
        plan = choose_dense_plan(shape_of(x, y.shape[1]), lora.num_adapters, self.rows)
        add_dense(rows, y, find_factors(lora), lora.routing.order, plan)

    def fuse_experts(self, experts: ExpertsTensors) -> FusedExpertsKernel | None:
        """None above MAX_EXPERTS experts."""
        fits = experts.down.shape[0] <= MAX_EXPERTS
        return FusedExpertsKernel(experts, self.rows) if fits else None

    def prepare_weight(self, weight: torch.Tensor, is_transposed: bool) -> None:
        """Nothing to do: the kernel reads both layouts."""

    def arrange(self, topk_ids: torch.Tensor, num_experts: int) -> TritonArrangement:
        tokens, top_k = topk_ids.shape
        expert = topk_ids.reshape(-1)
        pair = torch.arange(tokens * top_k, device=topk_ids.device)
        keys = virtual_keys(None, expert, num_experts, 1)
        return TritonArrangement(
            pair=pair,
            token=pair // top_k,
            expert=expert,
            num_tokens=tokens,
            blocks=make_blocks(keys, num_experts, num_experts),
            num_experts=num_experts,
            top_k=top_k,
        )

    def grouped_gemm(
        self,
        x: torch.Tensor,
        x_rows: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        arrangement: Arrangement,
        is_transposed: bool,
    ) -> torch.Tensor:
        assert isinstance(arrangement, TritonArrangement)
        view = weight.transpose(1, 2) if is_transposed else weight
        return grouped_gemm(x, x_rows, view, bias, arrangement.blocks)

    def combine(
        self, y: torch.Tensor, weights: torch.Tensor | None, arrangement: Arrangement
    ) -> torch.Tensor:
        assert isinstance(arrangement, TritonArrangement)
        return combine(
            y.contiguous(),
            arrangement.expert,
            None if weights is None else weights.contiguous(),
            arrangement.num_experts,
            arrangement.top_k,
        )
