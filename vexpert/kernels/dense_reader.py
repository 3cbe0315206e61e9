"""The end of a dense layer's LoRA in the kernel that reads its output, one row a program.

  y[r] + sum over i of h[r, i] * B^T[slot of r, i]            rounded to y's dtype; base rows: y[r]
B's first rows are loaded before the kernel in front of this one has ended. The arrays are those of
a `DenseDelta` of a layer with one site:

| array | shape | holds |
|---|---|---|
| h | [PLANES, R, WIDTH] float32 | shrunk rows, see `dense_shrink` |
| slots | [R] int64 | slot of each row; < 0: base |
| table | [7, S] int64 | see `dense_tiles`; here rows 0, rank, and 5, B^T |
| arena | [N] float | factors |
"""

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import ceil_div, power_of_two
from vexpert.kernels.dense_factors import DenseDelta


@triton.jit
def factors_of_row(
    row, column, inside, slots, arena, table, num_slots,
    SIZE: tl.constexpr, BLOCK_R: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """(rank, where B^T lies, its first rows [BLOCK_R, N]) of one row's adapter; base: rank 0."""
    slot = tl.load(slots + row)
    there = slot >= 0
    rank = tl.load(table + slot, mask=there, other=0).to(tl.int32)
    b_at = tl.load(table + 5 * num_slots + slot, mask=there, other=0)
    r = tl.arange(0, BLOCK_R)
    # Divided and multiplied: so the compiler knows what it is a multiple of.
    at = arena + b_at // ALIGNMENT * ALIGNMENT + r[:, None] * SIZE + column[None, :]
    return rank, b_at, tl.load(at, mask=(r < rank)[:, None] & inside[None, :], other=0.0)


@triton.jit
def shrunk_row(
    h, rank, plane, step, BLOCK_R: tl.constexpr, PLANES: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """BLOCK_R of a row's shrunk columns, in float32 as `dtype` rounds them; planes added."""
    r = step * BLOCK_R + tl.arange(0, BLOCK_R)
    # One load and a sum over planes: threads that each need all of them do not load them all.
    COUNT: tl.constexpr = triton.next_power_of_2(PLANES)
    i = tl.arange(0, COUNT)
    mask = (i < PLANES)[:, None] & (r < rank)[None, :]
    parts = tl.load(h + i[:, None] * plane + r[None, :], mask=mask, other=0.0)
    return tl.sum(parts, 0).to(dtype).to(tl.float32)


@triton.jit
def add_of_row(
    y, row, rank, b_at, b, column, inside, h, plane, stride_h, arena, dtype: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_R: tl.constexpr, RANK_STEPS: tl.constexpr, PLANES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """y [N] float32 with what its adapter adds, as `dtype` rounds it."""
    kind: tl.constexpr = arena.dtype.element_ty
    if rank > 0:
        for step in tl.static_range(RANK_STEPS):
            r = step * BLOCK_R + tl.arange(0, BLOCK_R)
            value = shrunk_row(h + row * stride_h, rank, plane, step, BLOCK_R, PLANES, kind)
            if step > 0:
                line = arena + b_at // ALIGNMENT * ALIGNMENT + r[:, None] * SIZE + column[None, :]
                b = tl.load(line, mask=(r < rank)[:, None] & inside[None, :], other=0.0)
            y += tl.sum(value[:, None] * b.to(tl.float32), 0)
        y = y.to(dtype).to(tl.float32)
    return y


def rest_tensors(rest: DenseDelta | None, none: torch.Tensor) -> tuple[torch.Tensor | int, ...]:
    """h, slots, arena, table; slots, steps between sites, rows of h and planes of h."""
    if rest is None:
        return none, none, none, none, 0, 0, 0, 0
    factors, h = rest.factors, rest.h
    tensors = h, rest.slots, factors.arena, factors.table
    return *tensors, factors.num_slots, factors.site_step, h.stride(1), h.stride(0)


def rest_options(rest: DenseDelta | None, size: int) -> dict[str, int | bool]:
    """Constants; every row of a factor is a multiple of `size` elements long."""
    if rest is None:
        ones = dict.fromkeys(("WIDTH", "BLOCK_RANK", "RANK_STEPS", "PLANES", "ALIGNMENT"), 1)
        return {"LORA": False, **ones}
    width = rest.factors.width
    block = power_of_two(width, 16, 16)
    return {
        "LORA": True,
        "WIDTH": width,
        "BLOCK_RANK": block,
        "RANK_STEPS": ceil_div(width, block),
        "PLANES": rest.h.shape[0],
        "ALIGNMENT": rest.factors.alignment_of(size),
    }


def row_rest(
    rest: DenseDelta | None, none: torch.Tensor, size: int
) -> tuple[tuple[torch.Tensor | int, ...], dict[str, int | bool]]:
    """Tensors and numbers, and constants, of a kernel that reads a layer of one site."""
    assert rest is None or rest.factors.sizes == (size,), (rest, size)
    *first, _, stride_h, plane = rest_tensors(rest, none)
    options = rest_options(rest, size)
    options.pop("WIDTH")
    return (*first, stride_h, plane), options
