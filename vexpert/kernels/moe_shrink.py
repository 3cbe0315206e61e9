"""LoRA shrink of routed experts by position: h[j, p] = A[s, e][:, part j] @ x[p, part j].

One plane j of partial sums per part of the depth; consumers add the planes in order. Base rows and
sentinels are neither read nor written. A program takes the run that starts at its position, or is
cut at a multiple of BLOCK_M from its start; or with `moe_runs` every so many pieces of the list.

| array | shape | holds |
|---|---|---|
| hidden | [T, H] in the arena's dtype; [P, H] when SCALED or BY_POSITION | inputs of x |
| address, rank_at | | `moe_factors` by position, or by piece; IDENTITY: slots, packed table |
| h | [PLANES, P, max_rank] float32 | by position; unspecified from the slot's rank on |
| h, of pieces | [PLANES, P, n * SLICE_WIDTH] | a block a slice; x's dtype if one plane |
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import (
    ceil_div,
    dot_precision,
    pdl_options,
    pdl_release,
    pdl_wait,
    power_of_two,
)
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.moe_order import PairOrder
from vexpert.kernels.moe_runs import TileRuns


@dataclass(frozen=True)
class ShrinkShape:
    """Positions and depth of a program's part, and how Triton runs it."""

    block_m: int
    planes: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    most_ranks: int = 64  # of one step; more take another pass over the input


@triton.jit
def _shrink_run(
    at, stop, hidden, pair_at, arena, a_at, rank, h, left, right, depth, width, stride_x,
    part_at, part_stride,
    TOP_K: tl.constexpr, BY_POSITION: tl.constexpr, SCALED: tl.constexpr, IDENTITY: tl.constexpr,
    SLICES: tl.constexpr, SLICE_WIDTH: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Positions at ... stop, at most BLOCK_M of them, of one slot and expert.

    SLICES: the columns of each slice, 3 * part_stride behind its rank at `part_at`, go to its block
    of h; 0: they stay as they are.
    """
    position = at + tl.arange(0, BLOCK_M)
    own = position < stop
    source = position
    if not BY_POSITION:
        if not IDENTITY:
            source = tl.load(pair_at + position, mask=own, other=0)
        if not SCALED:
            source = source // TOP_K
    k = tl.arange(0, BLOCK_K)
    x_line = hidden + source.to(tl.int64)[:, None] * stride_x + k[None, :]
    a = arena + a_at
    line = h + position.to(tl.int64)[:, None] * width
    for r in range(0, rank, BLOCK_R):
        inner = r + tl.arange(0, BLOCK_R)
        used = inner < rank
        a_line = a + inner[None, :] * depth + k[:, None]
        sums = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for first in range(left, right, BLOCK_K):
            if EVEN:
                x_tile = tl.load(x_line + first, mask=own[:, None], other=0.0)
                a_tile = tl.load(a_line + first, mask=used[None, :], other=0.0)
            else:
                within = first + k < right
                x_tile = tl.load(x_line + first, mask=own[:, None] & within[None, :], other=0.0)
                a_tile = tl.load(a_line + first, mask=used[None, :] & within[:, None], other=0.0)
            sums = tl.dot(x_tile, a_tile, sums, input_precision=PRECISION)
        out = sums.to(h.dtype.element_ty)
        if SLICES == 0:
            tl.store(line + inner[None, :], out, mask=own[:, None] & used[None, :])
        for i in tl.static_range(SLICES):
            column = inner - tl.load(part_at + (3 + i) * part_stride).to(tl.int32)
            its = (column >= 0) & (column < tl.load(part_at + i * part_stride).to(tl.int32))
            target = line + (i * SLICE_WIDTH + column)[None, :]
            tl.store(target, out, mask=own[:, None] & its[None, :])


@triton.jit
def shrink_position(
    at, number, hidden, topk_ids, pair_at, run_start, run_end, arena, address, rank_at, h,
    num_pairs, num_experts, num_slots, depth, part, width, stride_x,
    TOP_K: tl.constexpr, BY_POSITION: tl.constexpr, SCALED: tl.constexpr,
    IDENTITY: tl.constexpr, EVEN: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, RELEASE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The run at position `at`, part `number` of the depth. Waits for the kernel before.

    RELEASE: the next may start from then on, what is before this one being complete.
    """
    left = number * part
    right = tl.minimum(left + part, depth)
    plane = h + number.to(tl.int64) * num_pairs * width
    if IDENTITY:
        # Nothing that runs beside this kernel writes slots and tables.
        stop = at + 1
        slot = tl.load(address + at // TOP_K)
        there = slot >= 0
        rank = tl.load(rank_at + slot, mask=there, other=0)
        a_at = tl.load(rank_at + num_slots + slot, mask=there, other=0)
        step = tl.load(rank_at + 2 * num_slots + slot, mask=there, other=0)
    pdl_wait(PDL)
    pdl_release(PDL and RELEASE)
    if IDENTITY:
        expert = tl.load(topk_ids + at).to(tl.int64)
        rank = tl.where((expert >= 0) & (expert < num_experts), rank, 0)
        a_at += expert * step
    else:
        stop = tl.minimum(tl.load(run_end + at), at + BLOCK_M)
        rank = tl.load(rank_at + at).to(tl.int64)
        rank = tl.where((at - tl.load(run_start + at)) % BLOCK_M == 0, rank, 0)
        a_at = tl.load(address + at)
    # Here, where it is computed: the compiler forgets it of a function's argument.
    a_at = tl.multiple_of(a_at, ALIGNMENT)
    if rank > 0:
        _shrink_run(
            at, stop, hidden, pair_at, arena, a_at, rank, plane, left, right, depth, width,
            stride_x, rank_at, 0, TOP_K, BY_POSITION, SCALED, IDENTITY, 0, 0, EVEN, PRECISION,
            BLOCK_M, BLOCK_K, BLOCK_R,
        )  # fmt: skip


@direct_launch
@triton.jit
def _shrink_kernel(
    hidden, topk_ids, pair_at, run_start, run_end, arena, address, rank_at, h, num_pairs,
    num_experts, num_slots, depth, part, width, stride_x,
    TOP_K: tl.constexpr, BY_POSITION: tl.constexpr, SCALED: tl.constexpr,
    IDENTITY: tl.constexpr, EVEN: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    shrink_position(
        tl.program_id(0), tl.program_id(1), hidden, topk_ids, pair_at, run_start, run_end, arena,
        address, rank_at, h, num_pairs, num_experts, num_slots, depth, part, width, stride_x, TOP_K,
        BY_POSITION, SCALED, IDENTITY, EVEN, ALIGNMENT, PRECISION, BLOCK_M, BLOCK_K, BLOCK_R, True,
        PDL,
    )  # fmt: skip


@direct_launch
@triton.jit
def _shrink_pieces_kernel(
    hidden, pair_at, num_pieces, piece_first, piece_stop, arena, address, rank_at, part_at, h,
    num_pairs, max_pieces, depth, part, width, stride_x,
    TOP_K: tl.constexpr, BY_POSITION: tl.constexpr, SCALED: tl.constexpr,
    SLICES: tl.constexpr, SLICE_WIDTH: tl.constexpr,
    EVEN: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_release(PDL)
    left = tl.program_id(1) * part
    right = tl.minimum(left + part, depth)
    plane = h + tl.program_id(1).to(tl.int64) * num_pairs * width
    piece = tl.program_id(0)
    count = tl.load(num_pieces)
    while piece < count:
        at = tl.load(piece_first + piece)
        stop = tl.load(piece_stop + piece)
        rank = tl.load(rank_at + piece)
        a_at = tl.multiple_of(tl.load(address + piece), ALIGNMENT)
        if rank > 0:
            _shrink_run(
                at, stop, hidden, pair_at, arena, a_at, rank, plane, left, right, depth, width,
                stride_x, part_at + piece, max_pieces, TOP_K, BY_POSITION, SCALED, False, SLICES,
                SLICE_WIDTH, EVEN, PRECISION, BLOCK_M, BLOCK_K, BLOCK_R,
            )  # fmt: skip
        piece += tl.num_programs(0)


def shrink_parts(depth: int, shape: ShrinkShape) -> tuple[int, int]:
    """(depth of a plane, planes)."""
    part = ceil_div(ceil_div(depth, shape.planes), shape.block_k) * shape.block_k
    return part, ceil_div(depth, part)


def room_for_h(order: PairOrder, shape: ShrinkShape, is_down: bool, depth: int) -> torch.Tensor:
    """Memory for h by position."""
    assert order.factors is not None
    lora = order.factors.down if is_down else order.factors.gate_up
    assert lora is not None
    lead = shrink_parts(depth, shape)[1], order.num_pairs
    return torch.empty(*lead, lora.max_rank, dtype=torch.float32, device=order.topk_ids.device)


def moe_shrink(
    hidden: torch.Tensor,
    order: PairOrder,
    shape: ShrinkShape,
    is_down: bool = False,
    scaled: bool = False,
    pdl: bool = False,
    runs: TileRuns | None = None,
) -> torch.Tensor:
    """h of gate_up, or of down, whose input `hidden` is by position; see the table above.

    hidden float16, bfloat16 or float32 with adjacent columns, as the arena; by pair if `scaled`.
    The order has factors of that product. runs: pieces of `shape.block_m` positions; None: by
    position. pdl: may start before the launch before it has ended. Reference: `ops.reference`.
    """
    assert order.factors is not None
    assert hidden.stride(1) == 1, hidden.stride()
    factors = order.factors
    lora = factors.down if is_down else factors.gate_up
    assert lora is not None
    pairs, depth = order.num_pairs, hidden.shape[1]
    part, planes = shrink_parts(depth, shape)
    options = {
        "TOP_K": order.top_k,
        "BY_POSITION": is_down,
        "SCALED": scaled,
        "EVEN": depth % shape.block_k == 0,
        "ALIGNMENT": lora.alignment_of(depth),
        "PRECISION": dot_precision(hidden.dtype),
        "BLOCK_M": shape.block_m,
        "BLOCK_K": shape.block_k,
        "BLOCK_R": power_of_two(lora.max_rank, 16, shape.most_ranks),
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
        **pdl_options(pdl),
    }
    device, site = hidden.device, int(is_down)
    if runs is not None:
        assert shape.block_m == runs.piece, (shape, runs.piece)
        dtype, width = torch.float32 if planes > 1 else hidden.dtype, lora.slice_width
        slices = lora.num_slices
        h = torch.empty(planes, pairs, slices * width, dtype=dtype, device=device)
        _shrink_pieces_kernel[(runs.programs, planes)](
            hidden, order.pair, runs.num_pieces, runs.piece_first, runs.piece_stop, lora.arena,
            runs.piece_address[site], runs.piece_rank[site], runs.piece_rank[4 if is_down else 2],
            h, pairs, runs.piece_first.shape[0], depth, part, h.shape[2], hidden.stride(0),
            SLICES=slices, SLICE_WIDTH=width, **options,
        )  # fmt: skip
        return h
    found = factors.address[site], factors.rank[site]
    if order.is_identity:
        found = factors.slots, lora.packed
    h = room_for_h(order, shape, is_down, depth)
    _shrink_kernel[(pairs, planes)](
        hidden, order.topk_ids, order.pair, order.run_start, order.run_end, lora.arena, *found, h,
        pairs, order.num_experts, lora.num_slots, depth, part, lora.max_rank, hidden.stride(0),
        IDENTITY=order.is_identity, **options,
    )  # fmt: skip
    return h
