"""LoRA shrink of a packed dense layer: h[j, p, c] = A[site, slot] [r, part j] @ x[p, part j].

Column c belongs to site c // WIDTH and its row r = c % WIDTH of A. One plane j of float32 partial
sums per part of the depth; consumers add the planes in order. A program takes either the run that
starts at its position, or is cut at a multiple of BLOCK_M from its start (RUNS), or BLOCK_M
positions, whose runs it does one after another.

| array | shape | holds |
|---|---|---|
| x | [R, K] in the arena's dtype | inputs by row; columns adjacent |
| row_at, slot_at, run_start, run_end | [R] int32 | see `dense_order`; IDENTITY: one row, `slots` |
| table | | see `dense_tiles` |
| h | [PLANES, R, sites * WIDTH] float32 | by row; zero from a site's rank on; base unwritten |
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import (
    ceil_div,
    check_matrix,
    dot_precision,
    pdl_options,
    pdl_release,
    pdl_wait,
)
from vexpert.kernels.dense_factors import DenseFactors
from vexpert.kernels.dense_order import RowOrder
from vexpert.kernels.launch import direct_launch


@dataclass(frozen=True)
class DenseShrink:
    """Positions, columns and depth of a program's part, and how Triton runs it."""

    by_run: bool
    block_m: int
    cols: int  # of h; several sites' where they are narrower
    planes: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3


@triton.jit
def rows_of_a(
    slot, block, table, num_slots, depth, site_step,
    SITES: tl.constexpr, WIDTH: tl.constexpr, ALIGNMENT: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """(which exist, places in the arena) of the rows of A behind a block of columns, [COLS]."""
    column = block * COLS + tl.arange(0, COLS)
    exists = column < tl.where(slot >= 0, SITES * WIDTH, 0)
    r = column % WIDTH
    entry = table + (column // WIDTH).to(tl.int64) * site_step + slot
    rank = tl.load(entry, mask=exists, other=0)
    a_at = tl.load(entry + num_slots, mask=exists, other=0)
    # Here, where it is computed: the compiler forgets it of a function's argument.
    return r < rank, tl.multiple_of(a_at + r * depth, [ALIGNMENT])


@triton.jit
def shrink_rows(
    row, own, used, block, a_at, x, arena, h, left, right, stride_x,
    SITES: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Rows of one slot."""
    k = tl.arange(0, BLOCK_K)
    x_line = x + row.to(tl.int64)[:, None] * stride_x + k[None, :]
    a_at = tl.multiple_of(a_at, [ALIGNMENT])
    a_line = arena + a_at[None, :] + k[:, None]
    sums = tl.zeros((BLOCK_M, COLS), dtype=tl.float32)
    if tl.max(used.to(tl.int32), 0) > 0:  # some site's adapter has such rows
        for first in range(left, right, BLOCK_K):
            if EVEN:
                x_tile = tl.load(x_line + first, mask=own[:, None], other=0.0)
                a_tile = tl.load(a_line + first, mask=used[None, :], other=0.0)
            else:
                within = first + k < right
                x_tile = tl.load(x_line + first, mask=own[:, None] & within[None, :], other=0.0)
                a_tile = tl.load(a_line + first, mask=used[None, :] & within[:, None], other=0.0)
            sums = tl.dot(x_tile, a_tile, sums, input_precision=PRECISION)
    column = block * COLS + tl.arange(0, COLS)
    exists = column < SITES * WIDTH
    target = h + row.to(tl.int64)[:, None] * (SITES * WIDTH) + column[None, :]
    tl.store(target, sums, mask=own[:, None] & exists[None, :])


@direct_launch
@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x, row_at, slot_at, run_start, run_end, arena, table, h, num_rows, num_slots, depth, stride_x,
    site_step,
    IDENTITY: tl.constexpr, RUNS: tl.constexpr, SITES: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, PART: tl.constexpr, COLS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_release(PDL)
    block = tl.program_id(1)
    left = tl.program_id(2) * PART
    right = tl.minimum(left + PART, depth)
    plane = h + tl.program_id(2).to(tl.int64) * num_rows * (SITES * WIDTH)
    if RUNS:
        # All but x before the wait: nothing that runs beside this kernel writes it.
        at = tl.program_id(0)
        position = at + tl.arange(0, BLOCK_M)
        slot = tl.load(slot_at + at)
        own = position < at + 1
        row = position
        if not IDENTITY:
            own = position < tl.load(run_end + at)
            if (at - tl.load(run_start + at)) % BLOCK_M != 0:
                slot = slot * 0 - 1
            row = tl.load(row_at + position, mask=own, other=0)
        used, a_at = rows_of_a(
            slot, block, table, num_slots, depth, site_step, SITES, WIDTH, ALIGNMENT, COLS
        )
        pdl_wait(PDL)
        if slot >= 0:
            shrink_rows(
                row, own, used, block, a_at, x, arena, plane, left, right, stride_x, SITES, WIDTH,
                EVEN, ALIGNMENT, PRECISION, BLOCK_M, BLOCK_K, COLS,
            )  # fmt: skip
    else:
        pdl_wait(PDL)
        at = tl.program_id(0) * BLOCK_M
        end = tl.minimum(at + BLOCK_M, num_rows)
        while at < end:
            stop = tl.minimum(tl.load(run_end + at), end)
            slot = tl.load(slot_at + at)
            if slot >= 0:
                used, a_at = rows_of_a(
                    slot, block, table, num_slots, depth, site_step, SITES, WIDTH, ALIGNMENT, COLS
                )
                position = at + tl.arange(0, BLOCK_M)
                own = position < stop
                row = tl.load(row_at + position, mask=own, other=0)
                shrink_rows(
                    row, own, used, block, a_at, x, arena, plane, left, right, stride_x, SITES,
                    WIDTH, EVEN, ALIGNMENT, PRECISION, BLOCK_M, BLOCK_K, COLS,
                )  # fmt: skip
            at = stop


def shrink_part(depth: int, shape: DenseShrink) -> int:
    """Depth of one plane's part."""
    blocks: int = ceil_div(ceil_div(depth, shape.planes), shape.block_k)
    return blocks * shape.block_k


def room_for_h(x: torch.Tensor, factors: DenseFactors, shape: DenseShrink) -> torch.Tensor:
    """Memory for h of x [R, K]."""
    rows, depth = x.shape
    planes = ceil_div(depth, shrink_part(depth, shape))
    columns = len(factors.sizes) * factors.width
    return torch.empty(planes, rows, columns, dtype=torch.float32, device=x.device)


def dense_shrink(
    x: torch.Tensor,
    order: RowOrder,
    factors: DenseFactors,
    shape: DenseShrink,
    pdl: bool = False,
    h: torch.Tensor | None = None,
) -> torch.Tensor:
    """h of x [R, K]; `h`: memory from `room_for_h`, then written in place, else new.

    Tiles of rows (not `shape.by_run`) need an order of two rows or more. Reference:
    `ops.reference.packed_linear`.
    """
    check_matrix("x", x)
    assert x.dtype == factors.arena.dtype, (x.dtype, factors.arena.dtype)
    assert shape.by_run or not order.is_identity
    rows, depth = x.shape
    sites, part = len(factors.sizes), shrink_part(depth, shape)
    pdl = pdl and order.is_settled()
    h = room_for_h(x, factors, shape) if h is None else h
    planes, _, columns = h.shape
    programs = rows if shape.by_run else ceil_div(rows, shape.block_m)
    _shrink_kernel[(programs, ceil_div(columns, shape.cols), planes)](
        x, order.row, order.slot, order.run_start, order.run_end, factors.arena, factors.table, h,
        rows, factors.num_slots, depth, x.stride(0), factors.site_step,
        IDENTITY=order.is_identity, RUNS=shape.by_run, SITES=sites, WIDTH=factors.width,
        EVEN=depth % shape.block_k == 0, ALIGNMENT=factors.alignment_of(depth),
        PRECISION=dot_precision(x.dtype), BLOCK_M=shape.block_m, BLOCK_K=shape.block_k,
        PART=part, COLS=shape.cols,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
        **pdl_options(pdl),
    )  # fmt: skip
    return h
