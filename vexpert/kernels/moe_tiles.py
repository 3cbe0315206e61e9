"""What the kernels over tiles of one expert share: reading a tile, LoRA on the rows of it.

A tile may mix adapters and base rows. Its LoRA is one dot of a block-diagonal matrix of shrunk rows
with the factors of several *items* stacked: an item is a row, or where runs are long a run of equal
(expert, slot). All factors of a group are thus loaded at once; a loop would wait for each item.
The first group's factors may be loaded before the base product, which then hides their latency; of
runs only where they lie.
"""

import triton
import triton.language as tl


@triton.jit
def read_tile(
    tile,
    topk_ids,
    tile_expert,
    tile_start,
    tile_end,
    num_tiles,
    num_experts,
    IDENTITY: tl.constexpr,
):
    """(expert, first position, end); an end of -1: no such tile."""
    if IDENTITY:
        expert = tl.load(topk_ids + tile).to(tl.int32)
        start = tile
        end = tl.where((expert >= 0) & (expert < num_experts), tile + 1, -1)
    else:
        # One wait: what lies behind the last tile is read, and dropped.
        expert = tl.load(tile_expert + tile)
        start = tl.load(tile_start + tile)
        end = tl.where(tile < tl.load(num_tiles), tl.load(tile_end + tile), -1)
    return expert, start, end


@triton.jit
def _load_in_halves(at):
    """An integer, 2 bytes at a time: Triton sends wider loads through shared memory in a loop."""
    half = at.to(tl.pointer_type(tl.uint16), bitcast=True)
    dtype: tl.constexpr = at.dtype.element_ty
    value = tl.load(half).to(dtype)
    for i in tl.static_range(1, dtype.primitive_bitwidth // 16):
        value |= tl.load(half + i).to(dtype) << (16 * i)
    return value


@triton.jit
def of_runs(at, item, GROUP: tl.constexpr):
    """at[item], for items below GROUP."""
    value = _load_in_halves(at) + tl.zeros_like(item)
    for i in tl.static_range(1, GROUP):
        value = tl.where(item == i, _load_in_halves(at + i), value)
    return value


@triton.jit
def items_of(
    first_item,
    tile,
    start,
    end,
    run_first,
    run_stop,
    BY_RUN: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """GROUP items whose factors are stacked: (index of the first, of each stacked row its item,
    the item's first position and stop, whether it exists, r). A run that does not has rank 0.
    """
    stacked = tl.arange(0, GROUP * BLOCK_R)
    item = stacked // BLOCK_R
    if BY_RUN:
        index = tile * STRIDE + first_item
        first = of_runs(run_first + index, item, GROUP)
        stop = of_runs(run_stop + index, item, GROUP)
        exists = item < GROUP
    else:
        index = start + first_item
        first = index + item
        stop = first + 1
        exists = first < end
    return index, item, first, stop, exists, stacked % BLOCK_R


@triton.jit
def _table_part(
    slots, table, position, mask, num_slots, ROW: tl.constexpr, TOP_K: tl.constexpr
):  # fmt: skip
    """(address in a packed site table of B's rank, whether there is a slot), at positions."""
    slot = tl.load(slots + position // TOP_K, mask=mask, other=-1)
    part: tl.constexpr = 3 + (ROW - 2) % 2  # gate and down are slice 0 of their sites, up is 1
    return table + part * num_slots + slot, mask & (slot >= 0)


@triton.jit
def find_b(
    address, rank, index, item, exists, expert, r, stride, num_slots,
    ROW: tl.constexpr, SLICES: tl.constexpr, TOP_K: tl.constexpr, IDENTITY: tl.constexpr,
    BY_RUN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Of stacked factor rows: which exist, and where their factors begin in the arena.

    `address` and `rank` are `moe_factors`', rows `stride` apart; with IDENTITY, slots and the
    packed table.
    """
    if IDENTITY:
        at, active = _table_part(address, rank, index + item, exists, num_slots, ROW, TOP_K)
        step = SLICES * num_slots
        used = active & (r < tl.load(at, mask=active, other=0))
        b_at = tl.load(at + 2 * step, mask=active, other=0)
        b_at += expert * tl.load(at + 3 * step, mask=active, other=0)
    elif BY_RUN:
        used = r < of_runs(rank + ROW * stride + index, item, GROUP)
        b_at = of_runs(address + ROW * stride + index, item, GROUP)
    else:
        at = ROW * stride + index + item
        used = exists & (r < tl.load(rank + at, mask=exists, other=0))
        b_at = tl.load(address + at, mask=used, other=0)
    return used, b_at


@triton.jit
def load_b(arena, b_at, used, r, n, inside, size, ALIGNMENT: tl.constexpr):
    """B^T [GROUP * BLOCK_R, N]."""
    # Of what is computed here: the compiler forgets it of a function's argument.
    b_at = tl.multiple_of(b_at + r * size, [ALIGNMENT])
    return tl.load(
        arena + b_at[:, None] + n[None, :], mask=used[:, None] & inside[None, :], other=0.0
    )


@triton.jit
def _sum_planes(at, mask, plane, PLANES: tl.constexpr):
    # Not through the L1 cache: other programs of this launch may have written them.
    total = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    for i in tl.static_range(1, PLANES):
        total += tl.load(at + i * plane, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def shrunk_of_items(
    h, address, rank, first, own, used, r, plane, num_pairs, num_slots, max_rank,
    ROW: tl.constexpr, SLICES: tl.constexpr, TOP_K: tl.constexpr, IDENTITY: tl.constexpr,
    DTYPE: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """The block-diagonal matrix [M, GROUP * BLOCK_R] of items that are rows."""
    if IDENTITY:
        at, active = _table_part(address, rank, first, used, num_slots, ROW, TOP_K)
        column = tl.load(at + SLICES * num_slots, mask=active, other=0).to(tl.int32)
    else:
        column = tl.load(rank + (ROW + 3) * num_pairs + first, mask=used, other=0)
    values = _sum_planes(h + first * max_rank + column + r, used, plane, PLANES).to(DTYPE)
    return tl.where(own, values[None, :], 0.0).to(DTYPE)


@triton.jit
def shrunk_rows(
    h, position, mine, plane, width,
    SLICE: tl.constexpr, SLICE_WIDTH: tl.constexpr, STEP: tl.constexpr, BLOCK_R: tl.constexpr,
    DTYPE: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Each position's own shrunk row, [M, BLOCK_R]; what no adapter wrote is anything."""
    r = SLICE * SLICE_WIDTH + STEP * BLOCK_R + tl.arange(0, BLOCK_R)
    at = h + (position * width)[:, None] + r[None, :]
    return _sum_planes(at, mine[:, None], plane, PLANES).to(DTYPE)


@triton.jit
def spread_rows(rows, own, GROUP: tl.constexpr, BLOCK_R: tl.constexpr):
    """The block-diagonal matrix [M, GROUP * BLOCK_R] of items that are runs."""
    M: tl.constexpr = rows.shape[0]
    if GROUP > 1:
        wide = tl.broadcast_to(rows[:, None, :], (M, GROUP, BLOCK_R))
        rows = tl.reshape(wide, (M, GROUP * BLOCK_R))
    return tl.where(own, rows, 0.0).to(rows.dtype)


@triton.jit
def own_rows(position, first, stop):
    """[M, N]: whether a position is of the item of a stacked factor row."""
    return (position[:, None] >= first[None, :]) & (position[:, None] < stop[None, :])
