"""LoRA of one product of routed experts, by position, computed beside the base product.

  delta[p, slice i] = B[s, e, i] (A[s, e] x[p])     at position p of expert e and slot s >= 0

A few programs for each multiprocessor take the pieces of `moe_pieces` in the order of their tiles,
and count each down in `pending`. The base product may start when all of these programs run, and
adds a tile's delta once its pieces are done. Shrunk rows never leave a program.

| array | shape | holds |
|---|---|---|
| hidden | [T, H] in the arena's dtype; [P, H] when SCALED or BY_POSITION | inputs of x |
| delta | [P, n * N] | a block a slice; x's dtype; rows of base and sentinels unspecified |
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import (
    dot_precision,
    pdl_options,
    pdl_release,
    pdl_wait,
    power_of_two,
)
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.moe_order import PairOrder
from vexpert.kernels.moe_pieces import TilePieces

MOST_RANKS = 256  # rows of A, of all slices together: their sums stay in registers


@dataclass(frozen=True)
class DeltaShape:
    """How pieces are taken, and how Triton runs it."""

    block_k: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 4
    share: int = 1  # programs that share a tile's pieces
    programs: int = 1  # for each multiprocessor


@dataclass(frozen=True)
class Delta:
    """What a base product adds."""

    rows: torch.Tensor  # [P, n * N], in the dtype of the product's input
    pending: torch.Tensor  # [max_tiles] int32
    slot: torch.Tensor  # [P] int32: rows of slots < 0 get nothing


@triton.jit
def _slice_of(part_at, b_at, stride, SLICE: tl.constexpr):
    """(first row of A, number of rows, where B^T lies) of a slice."""
    count = tl.load(part_at + SLICE * stride).to(tl.int32)
    column = tl.load(part_at + (3 + SLICE) * stride).to(tl.int32)
    return column, count, tl.load(b_at + SLICE * stride)


@triton.jit
def _expand(
    h, r, arena, column, count, b_at, line, own, size,
    EVEN: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A slice's columns of the rows at `line`: those of B times shrunk rows h [M, R]."""
    n = tl.arange(0, BLOCK_N)
    row = r - column
    its = (row >= 0) & (row < count)
    b_row = tl.multiple_of(b_at + tl.where(its, row, 0) * size, [ALIGNMENT])
    b_line = arena + b_row[:, None] + n[None, :]
    for first in tl.range(0, size, BLOCK_N, num_stages=STAGES):
        keep = its[:, None]
        mask = own[:, None]
        if not EVEN:
            inside = (first + n < size)[None, :]
            keep = keep & inside
            mask = mask & inside
        b_tile = tl.load(b_line + first, mask=keep, other=0.0)
        out = tl.dot(h, b_tile, input_precision=PRECISION).to(h.dtype)
        tl.store(line + first + n[None, :], out, mask=mask)


@triton.jit
def _delta_piece(
    at, stop, hidden, pair_at, arena, a_at, rank, b_at, part_at, max_pieces,
    delta, depth, size, stride_x,
    TOP_K: tl.constexpr, BY_POSITION: tl.constexpr, SCALED: tl.constexpr, SLICES: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, A_ALIGNMENT: tl.constexpr,
    B_ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Positions at ... stop, at most BLOCK_M of them, of one slot and expert."""
    # What the end needs is asked for here: there it would be waited for.
    column, count, b_first = _slice_of(part_at, b_at, max_pieces, 0)
    if SLICES == 2:
        column1, count1, b_second = _slice_of(part_at, b_at, max_pieces, 1)
    position = at + tl.arange(0, BLOCK_M)
    own = position < stop
    source = position
    if not BY_POSITION:
        source = tl.load(pair_at + position, mask=own, other=0)
        if not SCALED:
            source = source // TOP_K
    k = tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_R)
    used = r < rank
    x_line = hidden + source.to(tl.int64)[:, None] * stride_x + k[None, :]
    # Of what is computed here: the compiler forgets it of a loop's variable.
    a_row = tl.multiple_of(a_at + r * depth, [A_ALIGNMENT])
    a_line = arena + a_row[None, :] + k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for first in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            x_tile = tl.load(x_line + first, mask=own[:, None], other=0.0)
            a_tile = tl.load(a_line + first, mask=used[None, :], other=0.0)
        else:
            within = first + k < depth
            x_tile = tl.load(x_line + first, mask=own[:, None] & within[None, :], other=0.0)
            a_tile = tl.load(a_line + first, mask=used[None, :] & within[:, None], other=0.0)
        sums = tl.dot(x_tile, a_tile, sums, input_precision=PRECISION)
    h = sums.to(delta.dtype.element_ty)
    line = delta + position.to(tl.int64)[:, None] * (SLICES * size)
    _expand(
        h, r, arena, column, count, b_first, line, own, size, EVEN_N, B_ALIGNMENT, PRECISION,
        STAGES, BLOCK_N,
    )  # fmt: skip
    if SLICES == 2:
        _expand(
            h, r, arena, column1, count1, b_second, line + size, own, size, EVEN_N, B_ALIGNMENT,
            PRECISION, STAGES, BLOCK_N,
        )  # fmt: skip


@direct_launch
@triton.jit
def _delta_kernel(
    hidden, pair_at, num_tiles, count_at, pending, first_at, stop_at, arena,
    a_address, a_rank, b_address, b_rank, delta, max_pieces, depth, size, stride_x,
    TOP_K: tl.constexpr, BY_POSITION: tl.constexpr, SCALED: tl.constexpr, SLICES: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, A_ALIGNMENT: tl.constexpr,
    B_ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    TILE: tl.constexpr, SHARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_release(PDL)
    # An item is every SHARE-th piece of a tile. Where a piece lies is read one piece ahead.
    item = tl.program_id(0)
    items = tl.load(num_tiles) * SHARE
    last = tl.maximum(items - 1, 0)
    tile = tl.minimum(item, last) // SHARE
    piece = tile * TILE + item % SHARE
    count = tl.load(count_at + tile)
    at = tl.load(first_at + piece)
    stop = tl.load(stop_at + piece)
    rank = tl.load(a_rank + piece)
    a_at = tl.load(a_address + piece)
    while item < items:
        goes_on = piece + SHARE < tile * TILE + count
        next_item = tl.where(goes_on, item, item + tl.num_programs(0))
        next_tile = tl.minimum(next_item, last) // SHARE
        next_piece = tl.where(goes_on, piece + SHARE, next_tile * TILE + next_item % SHARE)
        next_count = tl.load(count_at + next_tile)
        next_at = tl.load(first_at + next_piece)
        next_stop = tl.load(stop_at + next_piece)
        next_rank = tl.load(a_rank + next_piece)
        next_a_at = tl.load(a_address + next_piece)
        if piece < tile * TILE + count:
            _delta_piece(
                at, stop, hidden, pair_at, arena, a_at, rank,
                b_address + piece, b_rank + piece, max_pieces, delta, depth, size, stride_x,
                TOP_K, BY_POSITION, SCALED, SLICES, EVEN_K, EVEN_N, A_ALIGNMENT, B_ALIGNMENT,
                PRECISION, STAGES, BLOCK_M, BLOCK_K, BLOCK_R, BLOCK_N,
            )  # fmt: skip
            tl.debug_barrier()  # all threads' rows before the count that tells of them
            tl.atomic_add(pending + tile, -1, sem="release")
        item, tile, piece, count = next_item, next_tile, next_piece, next_count
        at, stop, rank, a_at = next_at, next_stop, next_rank, next_a_at


@triton.jit
def wait_for_pieces(pending):
    """Until a tile's delta is complete; its programs run, so this ends."""
    while tl.atomic_add(pending, 0, sem="acquire") > 0:
        pass


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def moe_delta(
    hidden: torch.Tensor,
    order: PairOrder,
    pieces: TilePieces,
    shape: DeltaShape,
    size: int,
    is_down: bool = False,
    scaled: bool = False,
    pdl: bool = False,
) -> Delta:
    """Of gate_up, or of down, whose input `hidden` is by position; size: N, of a slice.

    hidden float16, bfloat16 or float32 with adjacent columns, as the arena; by pair if `scaled`.
    The order has factors of that product, of MOST_RANKS ranks at most. Counts `pieces.pending`
    down. pdl: may start before the launch before it has ended. Reference: `ops.reference`.
    """
    assert order.factors is not None
    assert hidden.stride(1) == 1, hidden.stride()
    lora = order.factors.down if is_down else order.factors.gate_up
    assert lora is not None
    assert lora.max_rank <= MOST_RANKS, lora.max_rank
    depth, slices, site = hidden.shape[1], lora.num_slices, int(is_down)
    part = 4 if is_down else 2
    rows = torch.empty(order.num_pairs, slices * size, dtype=hidden.dtype, device=hidden.device)
    delta = Delta(rows, pieces.pending[site], order.slot)
    share = min(shape.share, order.block_m)  # a tile has no more pieces
    items = order.max_tiles * share
    _delta_kernel[(min(items, shape.programs * _processors(hidden.device)),)](
        hidden, order.pair, order.num_tiles, pieces.count, delta.pending, pieces.first,
        pieces.stop, lora.arena, pieces.address[site], pieces.rank[site], pieces.address[part],
        pieces.rank[part], rows, pieces.first.shape[0], depth, size, hidden.stride(0),
        TOP_K=order.top_k, BY_POSITION=is_down, SCALED=scaled, SLICES=slices,
        EVEN_K=depth % shape.block_k == 0, EVEN_N=size % shape.block_n == 0,
        A_ALIGNMENT=lora.alignment_of(depth), B_ALIGNMENT=lora.alignment_of(size),
        PRECISION=dot_precision(hidden.dtype), STAGES=shape.num_stages, TILE=order.block_m,
        SHARE=share, BLOCK_M=pieces.piece, BLOCK_K=shape.block_k,
        BLOCK_R=power_of_two(lora.max_rank, 16, MOST_RANKS), BLOCK_N=shape.block_n,
        num_warps=shape.num_warps, **pdl_options(pdl),
    )  # fmt: skip
    return delta
