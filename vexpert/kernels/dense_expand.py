"""LoRA expand of a packed dense layer: y[row[p], columns of site] += B[site, slot] h[p, site].

All sites and runs in one launch; each element of y is read, added to in float32, rounded and
written by one program. Base rows and sites without an adapter are neither read nor written.

| array | shape | holds |
|---|---|---|
| h | [PLANES, R, sites * WIDTH] float32 | see `dense_shrink` |
| row_at, run_at, run_slot, active | | see `dense_order` |
| table | | see `dense_tiles` |
| y | [R, sum of sizes] | columns adjacent, rows in any stride |
"""

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import (
    check_matrix,
    dot_precision,
    pdl_options,
    pdl_release,
    pdl_wait,
)
from vexpert.kernels.dense_order import RowOrder
from vexpert.kernels.dense_tiles import (
    DenseFactors,
    DenseTile,
    add_lora,
    column_alignment,
    column_blocks,
    lora_options,
    runs_of_tile,
    site_of,
    stacked_b,
)


@triton.jit
def _expand_kernel(
    h, row_at, run_at, run_slot, active, arena, table, y, plane, num_slots, site_step, stride_h,
    stride_y,
    IDENTITY: tl.constexpr, ONE_TILE: tl.constexpr, SIZES: tl.constexpr, PLANES: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr, RANK_STEPS: tl.constexpr,
    ALIGNMENT: tl.constexpr, COLUMN_ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_release(PDL)
    start = tl.program_id(1) * BLOCK_M
    site, before, block, size = site_of(tl.program_id(0), SIZES, BLOCK_N)
    table += site.to(tl.int64) * site_step
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < size
    end, row_run, first, last = runs_of_tile(start, run_at, active, IDENTITY, ONE_TILE, BLOCK_M)
    # The first factors before the wait: nothing that runs beside this kernel writes them.
    run0, b_tile0 = stacked_b(
        first, last, 0, run_slot, arena, table, num_slots, n, inside, size, GROUP, BLOCK_R,
        IDENTITY, ONE_TILE, ALIGNMENT,
    )  # fmt: skip
    pdl_wait(PDL)
    if start >= end:
        return
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    total = add_lora(
        total, run0, b_tile0, row_run, first, last, start, end, h, run_slot, arena, table, site, n,
        inside, size, plane, num_slots, stride_h, IDENTITY, ONE_TILE, PLANES, WIDTH, GROUP,
        BLOCK_R, RANK_STEPS, ALIGNMENT, PRECISION, BLOCK_M,
    )  # fmt: skip
    position = start + tl.arange(0, BLOCK_M)
    slot = tl.load(run_slot + row_run, mask=row_run >= 0, other=-1)
    changes = tl.load(table + slot, mask=slot >= 0, other=0) > 0
    row = position
    if not IDENTITY:
        row = tl.load(row_at + position, mask=changes, other=0)
    column = tl.multiple_of(before + block * BLOCK_N, COLUMN_ALIGNMENT) + tl.arange(0, BLOCK_N)
    target = y + row.to(tl.int64)[:, None] * stride_y + column[None, :]
    stored = changes[:, None] & inside[None, :]
    total += tl.load(target, mask=stored, other=0.0).to(tl.float32)
    tl.store(target, total.to(y.dtype.element_ty), mask=stored)


def dense_expand(
    h: torch.Tensor,
    order: RowOrder,
    factors: DenseFactors,
    tile: DenseTile,
    y: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Change y [R, sum of sizes] in place, see the table above."""
    check_matrix("y", y)
    assert y.dtype == factors.arena.dtype, (y.dtype, factors.arena.dtype)
    planes, rows, columns = h.shape
    grid = column_blocks(factors.sizes, tile.block_n), triton.cdiv(rows, tile.block_m)
    _expand_kernel[grid](
        h, order.row, order.run, order.run_slot, order.active, factors.arena, factors.table, y,
        rows * columns, factors.num_slots, factors.site_step, columns, y.stride(0),
        IDENTITY=order.is_identity, ONE_TILE=rows <= tile.block_m, SIZES=factors.sizes,
        **lora_options(factors, planes, tile),
        COLUMN_ALIGNMENT=column_alignment(factors.sizes, tile.block_n),
        PRECISION=dot_precision(y.dtype), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl_options(pdl),
    )  # fmt: skip
