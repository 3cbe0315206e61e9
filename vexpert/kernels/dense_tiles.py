"""What the kernels of dense layers share: the sites of a packed layer, and LoRA on a tile of rows.

A packed layer's sites read one input and write adjacent columns. A tile's LoRA is one dot of a
block-diagonal matrix of its shrunk rows with the factors of GROUP runs stacked, as in `moe_items`:
  total[m] += sum over i, r of (run of m = run i) * h[row m, r] * B^T[slot of run i, r]

| array | shape | holds |
|---|---|---|
| table | [7, S] int64 | of a site, by slot; the next site's lies `site_step` elements on |
| its rows 0, 1, 2 | | rank; where A [rank, K] lies in the arena; A's stride from expert to expert |
| its rows 3, 4, 5, 6 | | rows of B^T; first shrunk column; where B^T [rank, size] lies; stride |
| h | [PLANES, R, sites * WIDTH] float32 | shrunk rows, zero from a site's rank on |
| row_at, run_at, row_run, run_slot, counts | | see `dense_order` |
"""

from dataclasses import dataclass
from math import gcd

import triton
import triton.language as tl

from vexpert.kernels.common import ceil_div, power_of_two
from vexpert.kernels.dense_factors import DenseFactors

MOST_STACKED = 16384  # elements of stacked factors that one dot takes


@dataclass(frozen=True)
class DenseTile:
    """Rows, columns and depth of a program's tile, and how Triton runs it."""

    block_m: int
    block_n: int
    block_k: int = 0  # of the base product; 0: LoRA alone
    num_warps: int = 4
    num_stages: int = 3
    group: int = 1  # runs whose factors one dot takes
    by_run: bool = False  # of LoRA alone: a program takes a run, or a part of one
    steps: int = 1  # of LoRA alone: blocks of columns that a program takes in turn


@triton.jit
def site_of(block, SIZES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of a block of columns: its site, columns before that, its number in it, the site's size."""
    site = 0
    before = 0
    first = 0
    size = SIZES[0]
    blocks = 0
    columns = 0
    for i in tl.static_range(len(SIZES)):
        here = block >= blocks
        site = tl.where(here, i, site)
        before = tl.where(here, columns, before)
        first = tl.where(here, blocks, first)
        size = tl.where(here, SIZES[i], size)
        blocks += (SIZES[i] + BLOCK_N - 1) // BLOCK_N
        columns += SIZES[i]
    return site, before, block - first, size


@triton.jit
def rows_of_tile(
    start, row_at, run_at, row_run, counts, num_rows,
    IDENTITY: tl.constexpr, ONE_TILE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(rows, which exist, their runs (-1: base), first run, last run) of a tile.

    A single tile has its rows as they are, and all runs: nothing waits for the order.
    """
    position = start + tl.arange(0, BLOCK_M)
    mine = position < num_rows
    if IDENTITY:
        return position, mine, tl.where(mine, 0, -1), 0, 0
    elif ONE_TILE:  # noqa: RET505 - Triton would compile what stands behind a return
        run = tl.load(row_run + position, mask=mine, other=-1)
        return position, mine, run, 0, tl.load(counts + 1) - 1
    else:
        active = tl.load(counts)
        row = tl.load(row_at + position, mask=mine, other=0)
        run = tl.load(run_at + position, mask=position < active, other=-1)
        first = tl.load(run_at + start, mask=start < active, other=0)
        stop = tl.minimum(start + BLOCK_M, active)
        last = tl.load(run_at + stop - 1, mask=start < active, other=-1)
        return row, mine, run, first, last


@triton.jit
def slots_of_runs(
    run, last_run, run_slot, IDENTITY: tl.constexpr, ONE_TILE: tl.constexpr
):  # fmt: skip
    """Slots of runs, -1 behind the last; IDENTITY: `run_slot` holds the one row's slot."""
    if IDENTITY:
        return tl.load(run_slot + run, mask=run == 0, other=-1)
    elif ONE_TILE:  # noqa: RET505
        return tl.load(run_slot + run)
    else:
        return tl.load(run_slot + run, mask=run <= last_run, other=-1)


@triton.jit
def rows_of_b(slot, r, table, arena, num_slots, n, inside, size, ALIGNMENT: tl.constexpr):
    """B^T [len(r), N]: row r[i] of slot[i]'s factor, zero where it has none."""
    there = slot >= 0
    rank = tl.load(table + 3 * num_slots + slot, mask=there, other=0)
    b_at = tl.load(table + 5 * num_slots + slot, mask=there, other=0)
    # Here, where it is computed: the compiler forgets it of a function's argument.
    b_at = tl.multiple_of(b_at + r * size, [ALIGNMENT])
    return tl.load(
        arena + b_at[:, None] + n[None, :], mask=(r < rank)[:, None] & inside[None, :], other=0.0
    )


@triton.jit
def stacked_b(
    first_run, last_run, step, run_slot, arena, table, num_slots, n, inside, size,
    GROUP: tl.constexpr, BLOCK_R: tl.constexpr, IDENTITY: tl.constexpr, ONE_TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Of GROUP runs' factors, stacked: the run of each row, and B^T [GROUP * BLOCK_R, N]."""
    stacked = tl.arange(0, GROUP * BLOCK_R)
    run = first_run + stacked // BLOCK_R
    slot = slots_of_runs(run, last_run, run_slot, IDENTITY, ONE_TILE)
    r = step * BLOCK_R + stacked % BLOCK_R
    return run, rows_of_b(slot, r, table, arena, num_slots, n, inside, size, ALIGNMENT)


@triton.jit
def shrunk_rows(
    h, row, mask, site, step, num_rows, stride_h,
    PLANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows of h, [M, BLOCK_R]: planes added in order."""
    r = step * BLOCK_R + tl.arange(0, BLOCK_R)
    both = mask[:, None] & (r < WIDTH)[None, :]
    at = h + row.to(tl.int64)[:, None] * stride_h + (site * WIDTH + r)[None, :]
    # Not through the L1 cache: other programs of this launch may have written them.
    total = tl.load(at, mask=both, other=0.0, cache_modifier=".cg")
    plane = num_rows.to(tl.int64) * stride_h
    for i in tl.static_range(1, PLANES):
        total += tl.load(at + i * plane, mask=both, other=0.0, cache_modifier=".cg")
    return total.to(DTYPE)


@triton.jit
def block_diagonal(rows, row_run, run, GROUP: tl.constexpr, BLOCK_R: tl.constexpr):
    """Shrunk rows [M, BLOCK_R] in the columns of their own runs, [M, GROUP * BLOCK_R]."""
    M: tl.constexpr = rows.shape[0]
    if GROUP > 1:
        wide = tl.broadcast_to(rows[:, None, :], (M, GROUP, BLOCK_R))
        rows = tl.reshape(wide, (M, GROUP * BLOCK_R))
    return tl.where(row_run[:, None] == run[None, :], rows, 0.0).to(rows.dtype)


@triton.jit
def add_lora(
    total, run0, b_tile0, row, run, first, last, h, run_slot, arena, table, site, n, inside, size,
    num_rows, num_slots, stride_h,
    IDENTITY: tl.constexpr, ONE_TILE: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_R: tl.constexpr, RANK_STEPS: tl.constexpr, ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`total` [M, N] float32 and the deltas of the tile; the first group's factors are loaded."""
    dtype: tl.constexpr = arena.dtype.element_ty
    for step in tl.static_range(RANK_STEPS):
        rows = shrunk_rows(
            h, row, run >= 0, site, step, num_rows, stride_h, PLANES, WIDTH, BLOCK_R, dtype
        )
        if step == 0:
            h_tile = block_diagonal(rows, run, run0, GROUP, BLOCK_R)
            total = tl.dot(h_tile, b_tile0, total, input_precision=PRECISION)
        for group in range(first + (GROUP if step == 0 else 0), last + 1, GROUP):
            its_run, b_tile = stacked_b(
                group, last, step, run_slot, arena, table, num_slots, n, inside, size, GROUP,
                BLOCK_R, IDENTITY, ONE_TILE, ALIGNMENT,
            )  # fmt: skip
            h_tile = block_diagonal(rows, run, its_run, GROUP, BLOCK_R)
            total = tl.dot(h_tile, b_tile, total, input_precision=PRECISION)
    return total


def lora_options(factors: DenseFactors, planes: int, tile: DenseTile) -> dict[str, int]:
    """Constants of `add_lora` and `stacked_b`."""
    block_r = power_of_two(factors.width, 16, 64)
    return {
        "PLANES": planes,
        "WIDTH": factors.width,
        "GROUP": max(1, min(tile.group, MOST_STACKED // tile.block_n // block_r)),
        "BLOCK_R": block_r,
        "RANK_STEPS": ceil_div(factors.width, block_r),
        "ALIGNMENT": factors.alignment_of(gcd(*factors.sizes)),
    }


def column_blocks(sizes: tuple[int, ...], block_n: int) -> int:
    """Blocks of columns, none of which has two sites'."""
    return sum(ceil_div(size, block_n) for size in sizes)


def column_alignment(sizes: tuple[int, ...], block_n: int) -> int:
    """What every block's first column is a multiple of, as stores may assume."""
    return gcd(*sizes[:-1], block_n, 16) if len(sizes) > 1 else gcd(block_n, 16)
