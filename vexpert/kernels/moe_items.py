"""LoRA on the rows of a tile, added to the sums of its base product.

A tile may mix adapters and base rows. Its LoRA is one dot of a block-diagonal matrix of shrunk rows
with the factors of several *items* stacked: an item is a row, or where runs are long a run of equal
(expert, slot). All factors of a group are thus loaded at once; a loop would wait for each item.
The first group's factors may be loaded before the base product, which then hides their latency; of
runs only where they lie.

A gated product has two slices, gate and up, whose sums are `first` and `second`; another has one,
and `second` comes back as it was.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from vexpert.kernels.arrivals import await_arrivals
from vexpert.kernels.common import pdl_wait
from vexpert.kernels.moe_delta import wait_for_pieces


class TileLora(NamedTuple):
    """LoRA of one product: a kernel's arguments, and in capitals its constants."""

    run_first: Any  # of the product's tiles, see `moe_runs`
    run_stop: Any
    num_runs: Any
    delta: Any  # see `moe_delta`
    pending: Any
    slot_at: Any
    h: Any  # see `moe_shrink`
    arena: Any
    address: Any  # see `moe_factors`; IDENTITY: slots
    rank: Any  # the same; IDENTITY: the packed table
    arrivals: Any  # of this launch's own shrinks
    shrinks: Any
    consumers: Any
    num_pairs: Any
    factor_stride: Any
    num_slots: Any
    width: Any  # of a shrunk row
    HAS_LORA: Any
    HAS_DELTA: Any
    INNER: Any
    PLANES: Any
    BY_RUN: Any
    GROUP: Any
    ITEM_STAGES: Any
    PREFETCH: Any
    EARLY: Any
    BLOCK_R: Any
    RANK_STEPS: Any
    SLICE_WIDTH: Any
    ALIGNMENT: Any
    ROW: Any  # of the first slice in `rank`
    SLICES: Any
    TOP_K: Any
    IDENTITY: Any
    RUN_STRIDE: Any
    PRECISION: Any
    PDL: Any


class Items(NamedTuple):
    """A group: items whose factors are stacked. All but the index are [GROUP * BLOCK_R]."""

    index: Any  # of the first item
    item: Any  # of a stacked row, counted from there
    first: Any  # its first position
    stop: Any
    exists: Any
    r: Any  # rank of a stacked row


class Factors(NamedTuple):
    """A group's B, of either slice."""

    used: Any  # [GROUP * BLOCK_R], whether a stacked row exists
    b_at: Any  # [GROUP * BLOCK_R], where it begins in the arena
    b: Any  # B^T [GROUP * BLOCK_R, N], if loaded
    used_up: Any
    b_at_up: Any
    b_up: Any


class Begun(NamedTuple):
    """What was loaded before the base product; the rest is not read."""

    plane: Any  # elements of a plane of shrunk rows
    runs: Any  # of the tile
    rows: Any  # shrunk, with EARLY
    rows_up: Any
    items: Any  # the first group, with PREFETCH
    factors: Any  # its factors: where they lie, and unless it is of runs B


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
def _of_runs(at, item, GROUP: tl.constexpr):
    """at[item], for items below GROUP."""
    value = _load_in_halves(at) + tl.zeros_like(item)
    for i in tl.static_range(1, GROUP):
        value = tl.where(item == i, _load_in_halves(at + i), value)
    return value


@triton.jit
def _table_part(
    slots, table, position, mask, num_slots, ROW: tl.constexpr, TOP_K: tl.constexpr
):  # fmt: skip
    """(address in a packed site table of B's rank, whether there is a slot), at positions."""
    slot = tl.load(slots + position // TOP_K, mask=mask, other=-1)
    part: tl.constexpr = 3 + (ROW - 2) % 2  # gate and down are slice 0 of their sites, up is 1
    return table + part * num_slots + slot, mask & (slot >= 0)


@triton.jit
def _find_b(lora, items, expert, ROW: tl.constexpr):
    """Of stacked factor rows: which exist, and where their factors begin in the arena."""
    if lora.IDENTITY:
        at, active = _table_part(
            lora.address, lora.rank, items.index + items.item, items.exists, lora.num_slots, ROW,
            lora.TOP_K,
        )  # fmt: skip
        step = lora.SLICES * lora.num_slots
        used = active & (items.r < tl.load(at, mask=active, other=0))
        b_at = tl.load(at + 2 * step, mask=active, other=0)
        b_at += expert * tl.load(at + 3 * step, mask=active, other=0)
    elif lora.BY_RUN:
        row = ROW * lora.factor_stride
        used = items.r < _of_runs(lora.rank + row + items.index, items.item, lora.GROUP)
        b_at = _of_runs(lora.address + row + items.index, items.item, lora.GROUP)
    else:
        at = ROW * lora.factor_stride + items.index + items.item
        used = items.exists & (items.r < tl.load(lora.rank + at, mask=items.exists, other=0))
        b_at = tl.load(lora.address + at, mask=used, other=0)
    return used, b_at


@triton.jit
def _load_b(b_at, used, r, tile, lora):
    """B^T [GROUP * BLOCK_R, N]."""
    # Of what is computed here: the compiler forgets it of a function's argument.
    b_at = tl.multiple_of(b_at + r * tile.size, [lora.ALIGNMENT])
    keep = used[:, None] & tile.inside[None, :]
    return tl.load(lora.arena + b_at[:, None] + tile.n[None, :], mask=keep, other=0.0)


@triton.jit
def _items_of(item, step, tile, lora):
    """The group that begins with `item`, in step `step` of its ranks; what no run is has rank 0."""
    stacked = tl.arange(0, lora.GROUP * lora.BLOCK_R)
    its = stacked // lora.BLOCK_R
    if lora.BY_RUN:
        index = tile.index * lora.RUN_STRIDE + item
        first = _of_runs(lora.run_first + index, its, lora.GROUP)
        stop = _of_runs(lora.run_stop + index, its, lora.GROUP)
        exists = its < lora.GROUP
    else:
        index = tile.start + item
        first = index + its
        stop = first + 1
        exists = first < tile.end
    r = stacked % lora.BLOCK_R + step * lora.BLOCK_R
    return Items(index, its, first, stop, exists, r)


@triton.jit
def _factors_of(items, tile, lora, LOAD: tl.constexpr):
    """Of a group. LOAD: B too, and not only where it lies."""
    used, b_at = _find_b(lora, items, tile.expert, lora.ROW)
    b = used
    if LOAD:
        b = _load_b(b_at, used, items.r, tile, lora)
    used_up, b_at_up, b_up = used, b_at, b
    if lora.SLICES == 2:
        used_up, b_at_up = _find_b(lora, items, tile.expert, lora.ROW + 1)
        if LOAD:
            b_up = _load_b(b_at_up, used_up, items.r, tile, lora)
    return Factors(used, b_at, b, used_up, b_at_up, b_up)


@triton.jit
def _own_rows(tile, items):
    """[M, GROUP * BLOCK_R]: whether a position is of the item of a stacked factor row."""
    position = tile.position[:, None]
    return (position >= items.first[None, :]) & (position < items.stop[None, :])


@triton.jit
def _sum_planes(at, mask, plane, PLANES: tl.constexpr):
    # Not through the L1 cache: other programs of this launch may have written them.
    total = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    for i in tl.static_range(1, PLANES):
        total += tl.load(at + i * plane, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _shrunk_of_items(lora, items, plane, own, used, ROW: tl.constexpr):
    """The block-diagonal matrix [M, GROUP * BLOCK_R] of items that are rows."""
    dtype: tl.constexpr = lora.arena.dtype.element_ty
    first = items.first
    if lora.IDENTITY:
        at, active = _table_part(
            lora.address, lora.rank, first, used, lora.num_slots, ROW, lora.TOP_K
        )
        column = tl.load(at + lora.SLICES * lora.num_slots, mask=active, other=0).to(tl.int32)
    else:
        column = tl.load(lora.rank + (ROW + 3) * lora.num_pairs + first, mask=used, other=0)
    at = lora.h + first * lora.width + column + items.r
    values = _sum_planes(at, used, plane, lora.PLANES).to(dtype)
    return tl.where(own, values[None, :], 0.0).to(dtype)


@triton.jit
def _shrunk_rows(tile, lora, plane, SLICE: tl.constexpr, STEP: tl.constexpr):
    """Each position's own shrunk row, [M, BLOCK_R]; what no adapter wrote is anything."""
    dtype: tl.constexpr = lora.arena.dtype.element_ty
    r = SLICE * lora.SLICE_WIDTH + STEP * lora.BLOCK_R + tl.arange(0, lora.BLOCK_R)
    at = lora.h + (tile.position * lora.width)[:, None] + r[None, :]
    return _sum_planes(at, tile.mine[:, None], plane, lora.PLANES).to(dtype)


@triton.jit
def _rows_of_slices(tile, lora, plane, STEP: tl.constexpr):
    """The shrunk rows of either slice."""
    rows = _shrunk_rows(tile, lora, plane, 0, STEP)
    rows_up = rows
    if lora.SLICES == 2:
        rows_up = _shrunk_rows(tile, lora, plane, 1, STEP)
    return rows, rows_up


@triton.jit
def _spread_rows(rows, own, GROUP: tl.constexpr, BLOCK_R: tl.constexpr):
    """The block-diagonal matrix [M, GROUP * BLOCK_R] of items that are runs."""
    M: tl.constexpr = rows.shape[0]
    if GROUP > 1:
        wide = tl.broadcast_to(rows[:, None, :], (M, GROUP, BLOCK_R))
        rows = tl.reshape(wide, (M, GROUP * BLOCK_R))
    return tl.where(own, rows, 0.0).to(rows.dtype)


@triton.jit
def _add_slice(total, rows, plane, own, used, b, items, lora, ROW: tl.constexpr):
    """total plus a group's LoRA of one slice."""
    if lora.BY_RUN:
        h = _spread_rows(rows, own & used[None, :], lora.GROUP, lora.BLOCK_R)
    else:
        h = _shrunk_of_items(lora, items, plane, own, used, ROW)
    return tl.dot(h, b, total, input_precision=lora.PRECISION)


@triton.jit
def _add_group(first, second, rows, rows_up, plane, own, items, its, b, b_up, lora):
    """Either slice's sums plus a group's LoRA; its: factors."""
    row: tl.constexpr = lora.ROW
    first = _add_slice(first, rows, plane, own, its.used, b, items, lora, row)
    if lora.SLICES == 2:
        second = _add_slice(second, rows_up, plane, own, its.used_up, b_up, items, lora, row + 1)
    return first, second


@triton.jit
def begin_lora(tile, lora):
    """What a tile's LoRA loads before the base product, as `add_lora` takes it."""
    plane = lora.num_pairs * lora.width
    runs, rows, rows_up, items, factors = 0, 0, 0, 0, 0
    if lora.BY_RUN:
        runs = tl.load(lora.num_runs + tile.index)
    if lora.EARLY:
        pdl_wait(lora.PDL)
    if lora.BY_RUN and lora.EARLY:
        rows, rows_up = _rows_of_slices(tile, lora, plane, 0)
    if lora.PREFETCH:
        items = _items_of(0, 0, tile, lora)
        factors = _factors_of(items, tile, lora, not lora.BY_RUN)
    return Begun(plane, runs, rows, rows_up, items, factors)


@triton.jit
def _add_begun(first, second, rows, rows_up, begun, tile, lora):
    """Either slice's sums plus the first group's LoRA."""
    items, its = begun.items, begun.factors
    own = _own_rows(tile, items)
    b, b_up = its.b, its.b_up
    if lora.BY_RUN:
        b = _load_b(its.b_at, its.used, items.r, tile, lora)
        if lora.SLICES == 2:
            b_up = _load_b(its.b_at_up, its.used_up, items.r, tile, lora)
    return _add_group(first, second, rows, rows_up, begun.plane, own, items, its, b, b_up, lora)


@triton.jit
def add_lora(first, second, begun, tile, lora):
    """The sums of either slice plus LoRA."""
    if lora.INNER:
        await_arrivals(lora.arrivals, lora.shrinks, lora.consumers, tl.program_id(0) - lora.shrinks)
    elif not lora.EARLY:
        # For the shrink; what came before it was complete before this kernel could start.
        pdl_wait(lora.PDL)
    count = tile.end - tile.start
    if lora.BY_RUN:
        count = begun.runs
    rows, rows_up = begun.rows, begun.rows_up
    for step in tl.static_range(lora.RANK_STEPS):
        if lora.BY_RUN and not lora.EARLY:
            rows, rows_up = _rows_of_slices(tile, lora, begun.plane, step)
        if lora.PREFETCH:
            first, second = _add_begun(first, second, rows, rows_up, begun, tile, lora)
        begin = lora.GROUP if lora.PREFETCH else 0
        for item in tl.range(begin, count, lora.GROUP, num_stages=lora.ITEM_STAGES):
            items = _items_of(item, step, tile, lora)
            own = _own_rows(tile, items)
            its = _factors_of(items, tile, lora, True)
            first, second = _add_group(
                first, second, rows, rows_up, begun.plane, own, items, its, its.b, its.b_up, lora
            )
    return first, second


@triton.jit
def add_delta(first, second, tile, lora):
    """The sums of either slice plus the delta of another kernel, once it is complete."""
    slot = tl.load(lora.slot_at + tile.position, mask=tile.mine, other=-1)
    wait_for_pieces(lora.pending + tile.index)
    line = tile.position.to(tl.int64)[:, None] * (lora.SLICES * tile.size)
    at = lora.delta + line + tile.n[None, :]
    adapted = (slot >= 0)[:, None] & tile.inside[None, :]
    # -0: what is added to a base row leaves its bits alone.
    first += tl.load(at, mask=adapted, other=-0.0).to(tl.float32)
    if lora.SLICES == 2:
        second += tl.load(at + tile.size, mask=adapted, other=-0.0).to(tl.float32)
    return first, second
