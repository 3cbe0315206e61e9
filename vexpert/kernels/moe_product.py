"""What the launchers of gate_up and down share: how a tile runs, and what it takes of LoRA."""

from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from vexpert.kernels.common import ceil_div, dot_precision, pdl_options, power_of_two
from vexpert.kernels.moe_delta import Delta
from vexpert.kernels.moe_factors import SiteFactors
from vexpert.kernels.moe_order import PairOrder, present
from vexpert.kernels.moe_runs import TileRuns
from vexpert.kernels.moe_shrink import ShrinkShape, shrink_parts


@dataclass(frozen=True)
class Expand:
    """LoRA of one product: shrunk rows, factors, and how items are stacked."""

    h: torch.Tensor  # [PLANES, P, max_rank] float32; of runs as `moe_shrink` says
    factors: SiteFactors
    runs: TileRuns | None  # None: every row is an item
    group: int  # items of one dot
    item_stages: int = 1  # of the loop over groups
    # The first group's B, or of runs where it is, before the base product; ranks of one step only.
    prefetch: bool = False
    early: bool = False  # shrunk rows too: the product then waits for the shrink; runs only
    shrink: ShrinkShape | None = None  # of the launch's first programs; None: h is complete


@dataclass(frozen=True)
class TileShape:
    """Columns and depth of a tile, and how Triton runs it."""

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    tail_m: int = (
        0  # rows of the smaller tile that an expert's last pairs take if they fit; 0: none
    )
    tma: bool = False  # weights through the tensor memory accelerator: [E, N, K] contiguous


@dataclass(frozen=True)
class ProductArguments:
    """What both kernels take."""

    programs: int  # those that shrink, then those of tiles
    # topk_ids [T, K] ... num_tiles [1] (moe_order.py), run_first ... part (moe_runs.py,
    # moe_delta.py), num_pairs ... size; dtypes as in those tables
    middle: tuple[torch.Tensor | int, ...]
    width: int  # of a shrunk row
    options: dict[str, Any]  # constants, and Triton's own


def product_arguments(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: PairOrder,
    size: int,
    shape: TileShape,
    lora: Expand | Delta | None,
    pdl: bool,
) -> ProductArguments:
    """Of a product of x [*, depth] that has `size` columns; x stands for what is not read."""
    assert weight.dtype == x.dtype, (weight.dtype, x.dtype)
    depth, pairs = x.shape[1], order.num_pairs
    expand, delta = (None, lora) if isinstance(lora, Delta) else (lora, None)
    shrinks, inner = _inner_shrinks(expand, order, x, depth)
    lists = order.topk_ids, order.pair, order.tile_expert, order.tile_start, order.tile_end
    num_slots = 0 if expand is None else expand.factors.num_slots
    numbers = pairs, _factor_stride(expand, pairs), num_slots, order.num_experts, depth, size
    return ProductArguments(
        shrinks + _tile_count(order) * ceil_div(size, shape.block_n),
        (*lists, order.num_tiles, *_expand_tensors(expand, delta, order, x), *inner, *numbers),
        0 if expand is None else expand.h.shape[2],
        {
            "TOP_K": order.top_k,
            "IDENTITY": order.is_identity,
            "HAS_DELTA": delta is not None,
            **_expand_options(expand, size),
            **_inner_options(expand, depth),
            **_tile_options(order, shape, x.dtype, depth, size),
            **pdl_options(pdl),
        },
    )


def _tile_options(
    order: PairOrder, shape: TileShape, dtype: torch.dtype, depth: int, size: int
) -> dict[str, Any]:
    """The constants of tiles, and Triton's options."""
    return {
        "EVEN": depth % shape.block_k == 0 and size % shape.block_n == 0,
        "TMA": shape.tma,
        "PRECISION": dot_precision(dtype),
        "RUN_STRIDE": order.block_m,
        "BLOCK_M": order.block_m,
        "TAIL_M": shape.tail_m or order.block_m,
        "BLOCK_N": shape.block_n,
        "BLOCK_K": shape.block_k,
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
    }


def weight_rows(weight: torch.Tensor, shape: TileShape) -> TensorDescriptor | torch.Tensor:
    """All experts' rows [E * N, K] for block loads of [block_n, block_k]; without TMA not read."""
    if not shape.tma:
        return weight
    assert weight.is_contiguous(), weight.stride()
    rows = weight.view(-1, weight.shape[2])
    return TensorDescriptor.from_tensor(rows, [shape.block_n, shape.block_k])


def _tile_count(order: PairOrder) -> int:
    """The most tiles that there may be."""
    return order.num_pairs if order.is_identity else order.max_tiles


def _expand_tensors(
    lora: Expand | None, delta: Delta | None, order: PairOrder, none: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """run_first ... num_runs, delta, pending and slot_at, h, arena, address and rank."""
    added = (none,) * 3 if delta is None else (delta.rows, delta.pending, delta.slot)
    if lora is None:
        return none, none, none, *added, none, none, none, none
    assert order.factors is not None
    arena, runs = lora.factors.arena, lora.runs
    if runs is not None:
        lists = runs.run_first, runs.run_stop, runs.num_runs
        return *lists, *added, lora.h, arena, runs.run_address, runs.run_rank
    found = order.factors.address, order.factors.rank
    if order.is_identity:
        found = order.factors.slots, lora.factors.packed
    return none, none, none, *added, lora.h, arena, *found


def _factor_stride(lora: Expand | None, pairs: int) -> int:
    """Between rows of the arrays of `moe_factors`."""
    return pairs if lora is None or lora.runs is None else lora.runs.run_first.shape[0]


def _group(lora: Expand) -> int:
    """Items of one dot: B's tile is bounded, as large a one as a plan says for 16 ranks."""
    rows = 128 if lora.runs is None else min(128, 16 * lora.group)
    return max(1, min(lora.group, rows // lora.factors.block_r))


def _expand_options(lora: Expand | None, size: int) -> dict[str, int | bool]:
    """The constants of LoRA."""
    if lora is None:
        off = dict.fromkeys(("HAS_LORA", "BY_RUN", "PREFETCH", "EARLY"), False)
        ones = dict.fromkeys(("PLANES", "GROUP", "ITEM_STAGES", "RANK_STEPS", "ALIGNMENT"), 1)
        return {**off, **ones, "BLOCK_R": 16, "SLICE_WIDTH": 16}
    factors, block_r = lora.factors, lora.factors.block_r
    one_step = factors.slice_max_rank <= block_r
    return {
        "HAS_LORA": True,
        "PLANES": lora.h.shape[0],
        "BY_RUN": lora.runs is not None,
        "GROUP": _group(lora),
        "ITEM_STAGES": lora.item_stages,
        "PREFETCH": lora.prefetch and one_step,
        "EARLY": lora.early and one_step,
        "BLOCK_R": block_r,
        "RANK_STEPS": ceil_div(factors.slice_max_rank, block_r),
        "SLICE_WIDTH": factors.slice_width,
        "ALIGNMENT": factors.alignment_of(size),
    }


def _inner_shrinks(
    lora: Expand | None, order: PairOrder, none: torch.Tensor, depth: int
) -> tuple[int, tuple[torch.Tensor | int, ...]]:
    """Programs of a launch that shrink, and what they need: arrivals, runs, their number, part."""
    if lora is None or lora.shrink is None:
        return 0, (none, none, none, 0, 0)
    assert lora.factors.arrivals is not None, lora
    start, end = present([order.run_start, order.run_end])
    part, planes = shrink_parts(depth, lora.shrink)
    shrinks = order.num_pairs * planes
    return shrinks, (lora.factors.arrivals, start, end, shrinks, part)


def _inner_options(lora: Expand | None, depth: int) -> dict[str, int | bool]:
    """Their constants."""
    if lora is None or lora.shrink is None:
        ones = dict.fromkeys(("A_M", "A_K", "A_R", "A_ALIGNMENT"), 1)
        return {"INNER": False, "A_EVEN": False, **ones}
    shape, factors = lora.shrink, lora.factors
    return {
        "INNER": True,
        "A_M": shape.block_m,
        "A_K": shape.block_k,
        "A_R": power_of_two(factors.max_rank, 16, shape.most_ranks),
        "A_EVEN": depth % shape.block_k == 0,
        "A_ALIGNMENT": factors.alignment_of(depth),
    }
