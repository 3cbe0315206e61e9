"""What the kernels over tiles of one expert share: reading a tile, LoRA on the rows of it.

A tile may mix adapters and base rows. Its LoRA is one dot of a block-diagonal matrix of shrunk rows
with the factors of several *items* stacked: an item is a row, or a run of equal (expert, slot) where
runs are long. All factors of a group are thus loaded at once; a loop over items would wait for each.
The first group's factors may be loaded before the base product, which then hides their latency.
"""

import triton
import triton.language as tl


@triton.jit
def read_tile(
    tile, topk_ids, tile_expert, tile_start, tile_end, num_tiles, num_experts, IDENTITY: tl.constexpr
):
    """(expert, first position, end); an end of -1: no such tile."""
    if IDENTITY:
        expert = tl.load(topk_ids + tile).to(tl.int32)
        start = tile
        end = tl.where((expert >= 0) & (expert < num_experts), tile + 1, -1)
    else:
        exists = tile < tl.load(num_tiles)
        expert = tl.load(tile_expert + tile, mask=exists, other=0)
        start = tl.load(tile_start + tile, mask=exists, other=0)
        end = tl.load(tile_end + tile, mask=exists, other=-1)
    return expert, start, end


@triton.jit
def slot_of(position, mask, slots, slot_at, TOP_K: tl.constexpr, IDENTITY: tl.constexpr):
    """Slot of positions, -1 where masked off."""
    if IDENTITY:
        slot = tl.load(slots + position // TOP_K, mask=mask, other=-1).to(tl.int32)
    else:
        slot = tl.load(slot_at + position, mask=mask, other=-1)
    return slot


@triton.jit
def items_of(
    first_item,
    tile,
    start,
    end,
    slots,
    slot_at,
    run_end,
    tile_runs,
    tile_num_runs,
    TOP_K: tl.constexpr,
    IDENTITY: tl.constexpr,
    BY_RUN: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """(first position, stop, slot, r) of each row of GROUP stacked factors; slot -1: nothing."""
    stacked = tl.arange(0, GROUP * BLOCK_R)
    item = first_item + stacked // BLOCK_R
    if BY_RUN:
        there = item < tl.load(tile_num_runs + tile)
        first = tl.load(tile_runs + tile * STRIDE + item, mask=there, other=0)
        stop = tl.minimum(tl.load(run_end + first, mask=there, other=0), end)
    else:
        first = start + item
        there = first < end
        stop = first + 1
    slot = slot_of(first, there, slots, slot_at, TOP_K, IDENTITY)
    return first, stop, slot, stacked % BLOCK_R


@triton.jit
def load_b(
    arena,
    slice_rank,
    slice_column,
    b_offset,
    b_stride,
    entry,
    active,
    expert,
    r,
    n,
    inside,
    size,
    ALIGNMENT: tl.constexpr,
):
    """Of stacked factor rows: which exist, their columns of h, and B^T [GROUP * BLOCK_R, N]."""
    used = active & (r < tl.load(slice_rank + entry, mask=active, other=0))
    column = tl.load(slice_column + entry, mask=active, other=0) + r
    b_at = tl.load(b_offset + entry, mask=active, other=0)
    b_at += expert * tl.load(b_stride + entry, mask=active, other=0) + r * size
    b_at = tl.multiple_of(b_at, [ALIGNMENT])
    b_tile = tl.load(
        arena + b_at[:, None] + n[None, :], mask=used[:, None] & inside[None, :], other=0.0
    )
    return used, column, b_tile


@triton.jit
def _sum_planes(at, mask, plane, PLANES: tl.constexpr):
    total = tl.load(at, mask=mask, other=0.0)
    for i in tl.static_range(1, PLANES):
        total += tl.load(at + i * plane, mask=mask, other=0.0)
    return total


@triton.jit
def shrunk_of_items(
    h, first, own, used, column, plane, max_rank, DTYPE: tl.constexpr, PLANES: tl.constexpr
):
    """The block-diagonal matrix [M, GROUP * BLOCK_R] of items that are rows."""
    at = h + first * max_rank + column
    values = _sum_planes(at, used, plane, PLANES).to(DTYPE)
    return tl.where(own, values[None, :], 0.0).to(DTYPE)


@triton.jit
def shrunk_rows(
    h,
    slice_rank,
    slice_column,
    position,
    entry,
    active,
    plane,
    max_rank,
    STEP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DTYPE: tl.constexpr,
    PLANES: tl.constexpr,
):
    """Each position's own shrunk row, [M, BLOCK_R]."""
    rank = tl.load(slice_rank + entry, mask=active, other=0)
    column = tl.load(slice_column + entry, mask=active, other=0)
    r = STEP * BLOCK_R + tl.arange(0, BLOCK_R)
    at = h + (position * max_rank + column)[:, None] + r[None, :]
    return _sum_planes(at, r[None, :] < rank[:, None], plane, PLANES).to(DTYPE)


@triton.jit
def spread_rows(rows, own, GROUP: tl.constexpr, BLOCK_R: tl.constexpr):
    """The block-diagonal matrix [M, GROUP * BLOCK_R] of items that are runs."""
    M: tl.constexpr = rows.shape[0]
    if GROUP > 1:
        wide = tl.broadcast_to(rows[:, None, :], (M, GROUP, BLOCK_R))
        rows = tl.reshape(wide, (M, GROUP * BLOCK_R))
    return tl.where(own, rows, 0.0).to(rows.dtype)
