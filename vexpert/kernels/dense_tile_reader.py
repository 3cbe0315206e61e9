"""The end of a dense layer's LoRA in the kernel that reads its output, a tile of rows a program.

  y[r] + sum over i of h[r, i] * B^T[slot of r, i]            rounded to y's dtype; base rows: y[r]
The tile's slots take turns, so each adapter's B is read once for all of its rows there, and what
one adapter holds, NaN too, never meets another one's rows. Rows are in the step's order: most
tiles of prompts have one slot. The arrays are those of a `DenseDelta`:

| array | shape | holds |
|---|---|---|
| h | [PLANES, R, sites * WIDTH] float32 | shrunk rows, see `dense_shrink` |
| slots | [R] int64 | slot of each row; < 0: base |
| table | [7, S] int64 | see `dense_tiles`; of the site that is read |
| arena | [N] float | factors |
"""

from math import gcd

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import ceil_div, dot_precision, power_of_two
from vexpert.kernels.dense_factors import DenseDelta
from vexpert.kernels.dense_tiles import rows_of_b, shrunk_rows


@triton.jit
def slots_of_tile(row, exists, slots, table):
    """Slots of rows [M] at one site; -1: nothing is added."""
    slot = tl.load(slots + row, mask=exists, other=-1).to(tl.int32)
    rank = tl.load(table + slot, mask=slot >= 0, other=0)
    return tl.where(rank > 0, slot, -1)


@triton.jit
def rows_of_h(
    h, row, slot, site, num_rows, stride_h, arena,
    WIDTH: tl.constexpr, BLOCK_RANK: tl.constexpr, RANK_STEPS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Shrunk rows [M, BLOCK_RANK], where that is all of them; else nothing."""
    rows = row
    if RANK_STEPS == 1:
        dtype: tl.constexpr = arena.dtype.element_ty
        rows = shrunk_rows(
            h, row, slot >= 0, site, 0, num_rows, stride_h, PLANES, WIDTH, BLOCK_RANK, dtype
        )
    return rows


@triton.jit
def add_of_tile(
    y, row, slot, rows, n, inside, site, h, num_rows, stride_h, arena, table, num_slots,
    dtype: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_RANK: tl.constexpr,
    RANK_STEPS: tl.constexpr, PLANES: tl.constexpr, ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y [M, N] float32 with what each row's adapter adds, as `dtype` rounds it.

    n [N]: columns of the site; slot [M]: from `slots_of_tile`; rows: from `rows_of_h`.
    """
    NONE: tl.constexpr = 2147483647
    kind: tl.constexpr = arena.dtype.element_ty
    turn = tl.min(tl.where(slot >= 0, slot, NONE), 0)
    while turn < NONE:
        mine = slot == turn
        added = tl.zeros((y.shape[0], y.shape[1]), dtype=tl.float32)
        for step in tl.static_range(RANK_STEPS):
            part = rows
            if RANK_STEPS > 1:
                part = shrunk_rows(
                    h, row, slot >= 0, site, step, num_rows, stride_h, PLANES, WIDTH, BLOCK_RANK,
                    kind,
                )  # fmt: skip
            r = step * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
            b = rows_of_b(turn, r, table, arena, num_slots, n, inside, SIZE, ALIGNMENT)
            added = tl.dot(part, b, added, input_precision=PRECISION)
        y = tl.where(mine[:, None], (y + added).to(dtype).to(tl.float32), y)
        turn = tl.min(tl.where(slot > turn, slot, NONE), 0)
    return y


def tile_tensors(rest: DenseDelta) -> tuple[torch.Tensor | int, ...]:
    """h, slots, arena, table; rows, slots, steps between sites, rows of h."""
    factors, h = rest.factors, rest.h
    tensors = h, rest.slots, factors.arena, factors.table
    return *tensors, h.shape[1], factors.num_slots, factors.site_step, h.stride(1)


def tile_options(rest: DenseDelta) -> dict[str, int | str]:
    """Constants."""
    width = rest.factors.width
    block = power_of_two(width, 16, 64)
    return {
        "WIDTH": width,
        "BLOCK_RANK": block,
        "RANK_STEPS": ceil_div(width, block),
        "PLANES": rest.h.shape[0],
        "ALIGNMENT": rest.factors.alignment_of(gcd(*rest.factors.sizes)),
        "PRECISION": dot_precision(rest.factors.arena.dtype),
    }
