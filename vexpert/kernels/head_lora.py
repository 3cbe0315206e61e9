"""LoRA of a Linear that expands latents into keys and values, in the absorbed form, head by head.

The output has, for each head h, columns of keys and then columns of values; Bk[h], Bv[h] are B's
rows of them. For token t with slot s >= 0, in place:
  keys:    y[t, h] += A[s]^T (Bk[s, h]^T x[t, h])    what queries meet instead of keys
  values:  y[t, h] += Bv[s, h] (A[s] x[t, h])        of what attention sums up instead of values
Both are right^T (left x) of two factors with `rank` rows: left is a part of B^T and right is A, or
the other way round. A program does the rows of one run (RUNS: it starts at the program's position,
or is cut at a multiple of BLOCK_M from its start), or those of BLOCK_M positions run by run.

| array | shape | holds |
|---|---|---|
| x | [T, H, DEPTH] in the arena's dtype | inputs, any strides of tokens and heads |
| y | [T, H, COLUMNS] in the arena's dtype | outputs, any strides of tokens and heads |
| row_at, slot_at, run_start, run_end, counts | | see `dense_order`; IDENTITY: one row, `slots` |
| arena | [N] float | the site's factors |
| table | [7, S] int64 | where they lie, see `SiteTable` |
"""

from math import gcd

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import ceil_div, dot_precision, power_of_two
from vexpert.kernels.dense_factors import HeadColumns
from vexpert.kernels.dense_order import RowOrder
from vexpert.kernels.launch import direct_launch

A_AT, B_AT = 1, 5  # rows of the table
MOST_BY_RUN = 256  # rows: from there on most positions start no run, and programs would idle


@triton.jit
def _add_rows(
    row, own, slot, rank, head, x, y, arena, table, num_slots, stride_xt, stride_xh, stride_yt,
    stride_yh,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Rows of one slot. LEFT, RIGHT: (row of the table, row's width, first column, head's step)."""
    dtype: tl.constexpr = arena.dtype.element_ty
    left = tl.load(table + LEFT[0] * num_slots + slot) + LEFT[2] + head * LEFT[3]
    right = tl.load(table + RIGHT[0] * num_slots + slot) + RIGHT[2] + head * RIGHT[3]
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < COLUMNS
    target = y + row.to(tl.int64)[:, None] * stride_yt + head * stride_yh + n[None, :]
    stored = own[:, None] & inside[None, :]
    total = tl.load(target, mask=stored, other=0.0).to(tl.float32)
    x_line = x + row.to(tl.int64)[:, None] * stride_xt + head * stride_xh
    for first in range(0, rank, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        there = r < rank
        left_line = tl.multiple_of(left + r * LEFT[1], [ALIGNMENT])
        shrunk = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for start in range(0, DEPTH, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            within = k < DEPTH
            x_tile = tl.load(x_line + k[None, :], mask=own[:, None] & within[None, :], other=0.0)
            left_tile = tl.load(
                arena + left_line[None, :] + k[:, None],
                mask=there[None, :] & within[:, None],
                other=0.0,
            )
            shrunk = tl.dot(x_tile, left_tile, shrunk, input_precision=PRECISION)
        right_line = tl.multiple_of(right + r * RIGHT[1], [ALIGNMENT])
        right_tile = tl.load(
            arena + right_line[:, None] + n[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        total = tl.dot(shrunk.to(dtype), right_tile, total, input_precision=PRECISION)
    tl.store(target, total.to(y.dtype.element_ty), mask=stored)


@direct_launch
@triton.jit(do_not_specialize=["num_rows"])
def _head_kernel(
    x, y, row_at, slot_at, run_start, run_end, counts, arena, table, num_rows, num_slots,
    stride_xt, stride_xh, stride_yt, stride_yh,
    IDENTITY: tl.constexpr, RUNS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    if RUNS:
        at = tl.program_id(0)
        end = at + 1
        if not IDENTITY:
            is_cut = (at - tl.load(run_start + at)) % BLOCK_M == 0
            end = tl.where(is_cut, tl.minimum(tl.load(run_end + at), at + BLOCK_M), at)
    else:
        at = tl.program_id(0) * BLOCK_M
        end = tl.minimum(at + BLOCK_M, tl.load(counts))
    while at < end:
        slot = tl.load(slot_at + at)
        stop = end
        if not RUNS:
            stop = tl.minimum(tl.load(run_end + at), end)
        rank = tl.load(table + slot, mask=slot >= 0, other=0).to(tl.int32)
        if rank > 0:
            position = at + tl.arange(0, BLOCK_M)
            own = position < stop
            row = position
            if not IDENTITY:
                row = tl.load(row_at + position, mask=own, other=0)
            _add_rows(
                row, own, slot, rank, head, x, y, arena, table, num_slots, stride_xt, stride_xh,
                stride_yt, stride_yh, LEFT, RIGHT, DEPTH, COLUMNS, ALIGNMENT, PRECISION, BLOCK_M,
                BLOCK_K, BLOCK_N, BLOCK_R,
            )  # fmt: skip
        at = stop


def head_lora(
    x: torch.Tensor,
    y: torch.Tensor,
    order: RowOrder,
    arena: torch.Tensor,
    table: torch.Tensor,
    columns: HeadColumns,
    of_keys: bool,
    most_rank: int,
    alignment: int = 1,
) -> None:
    """Change y [T, H, COLUMNS] in place, see above; `of_keys`: the first formula.

    most_rank: bound of the active slots' ranks, for tiles alone. alignment: every factor starts at
    a multiple of so many elements. Reference: `ops.reference.reference_head_delta`.
    """
    rows, heads, depth = x.shape
    width = y.shape[2]
    assert x.dtype == y.dtype == arena.dtype, (x.dtype, y.dtype, arena.dtype)
    assert x.stride(2) == y.stride(2) == 1, (x.stride(), y.stride())
    assert y.shape[:2] == x.shape[:2] == (order.num_rows, columns.heads), (x.shape, y.shape)
    assert table.is_contiguous(), table.stride()
    latents, own = (width, depth) if of_keys else (depth, width)
    assert own == (columns.key if of_keys else columns.value), (columns, x.shape, y.shape)
    first = 0 if of_keys else columns.key
    a = (A_AT, latents, 0, 0)
    b = (B_AT, columns.heads * columns.width, first, columns.width)
    by_run = rows <= MOST_BY_RUN
    wide = x.dtype == torch.float32  # its tiles would not stay in registers
    block_m = 16 if by_run or wide else 64
    block_n = power_of_two(width, 16, 128)
    tiles = rows if by_run else ceil_div(rows, block_m)
    _head_kernel[(tiles, heads, ceil_div(width, block_n))](
        x, y, order.row, order.slot, order.run_start, order.run_end, order.counts, arena, table,
        rows, table.shape[1], *x.stride()[:2], *y.stride()[:2],
        IDENTITY=order.is_identity, RUNS=by_run,
        LEFT=b if of_keys else a, RIGHT=a if of_keys else b,
        DEPTH=depth, COLUMNS=width,
        ALIGNMENT=gcd(alignment, latents, columns.width, columns.key, 16),
        PRECISION=dot_precision(x.dtype),
        BLOCK_M=block_m,
        BLOCK_K=power_of_two(depth, 16, 32 if wide else 128),
        BLOCK_N=block_n,
        BLOCK_R=power_of_two(most_rank, 16, 64),
    )  # fmt: skip
