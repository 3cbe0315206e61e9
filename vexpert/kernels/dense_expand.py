"""LoRA expand of a packed dense layer: y[row[p], columns of site] += B[site, slot] h[p, site].

All sites and runs in one launch; each element of y is read, added to in float32, rounded and
written by one program. Base rows and sites without an adapter are neither read nor written. A
program takes a tile of rows, or (`by_run`) the run that starts at its position, or is cut there, or
(`steps`) a tile's runs one after another over several blocks of columns.

| array | shape | holds |
|---|---|---|
| h | [PLANES, R, sites * WIDTH] float32 | see `dense_shrink` |
| row_at, run_at, ... | | see `dense_order` |
| table | | see `dense_tiles` |
| y | [R, sum of sizes] in the arena's dtype, or float32 | columns adjacent, rows any stride apart |
"""

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
from vexpert.kernels.dense_tiles import (
    DenseTile,
    add_lora,
    column_alignment,
    column_blocks,
    lora_options,
    rows_of_b,
    rows_of_tile,
    shrunk_rows,
    site_of,
    stacked_b,
)
from vexpert.kernels.launch import direct_launch


@triton.jit
def _place(
    row, changes, before, block, y, stride_y, inside,
    COLUMN_ALIGNMENT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(addresses, mask) of a tile's elements of y."""
    column = tl.multiple_of(before + block * BLOCK_N, COLUMN_ALIGNMENT) + tl.arange(0, BLOCK_N)
    target = y + row.to(tl.int64)[:, None] * stride_y + column[None, :]
    return target, changes[:, None] & inside[None, :]


@direct_launch
@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    h, row_at, run_at, row_run, run_slot, counts, arena, table, y, num_rows, num_slots, site_step,
    stride_h, stride_y,
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
    # The first factors before the wait: nothing that runs beside this kernel writes them.
    row, _, run, first, last = rows_of_tile(
        start, row_at, run_at, row_run, counts, num_rows, IDENTITY, ONE_TILE, BLOCK_M
    )
    run0, b_tile0 = stacked_b(
        first, last, 0, run_slot, arena, table, num_slots, n, inside, size, GROUP, BLOCK_R,
        IDENTITY, ONE_TILE, ALIGNMENT,
    )  # fmt: skip
    slot = tl.load(run_slot + run, mask=run >= 0, other=-1)
    changes = tl.load(table + slot, mask=slot >= 0, other=0) > 0
    pdl_wait(PDL)
    if tl.max(changes.to(tl.int32), 0) == 0:
        return
    target, stored = _place(
        row, changes, before, block, y, stride_y, inside, COLUMN_ALIGNMENT, BLOCK_N
    )
    total = tl.load(target, mask=stored, other=0.0).to(tl.float32)
    total = add_lora(
        total, run0, b_tile0, row, run, first, last, h, run_slot, arena, table, site, n, inside,
        size, num_rows, num_slots, stride_h, IDENTITY, ONE_TILE, PLANES, WIDTH, GROUP, BLOCK_R,
        RANK_STEPS, ALIGNMENT, PRECISION,
    )  # fmt: skip
    tl.store(target, total.to(y.dtype.element_ty), mask=stored)


@direct_launch
@triton.jit(do_not_specialize=["num_rows"])
def _expand_runs_kernel(
    h, row_at, slot_at, run_start, run_end, arena, table, y, num_rows, num_slots, site_step,
    stride_h, stride_y,
    SIZES: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr,
    RANK_STEPS: tl.constexpr, ALIGNMENT: tl.constexpr, COLUMN_ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_release(PDL)
    at = tl.program_id(1)
    site, before, block, size = site_of(tl.program_id(0), SIZES, BLOCK_N)
    table += site.to(tl.int64) * site_step
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < size
    position = at + tl.arange(0, BLOCK_M)
    slot = tl.load(slot_at + at)
    if (at - tl.load(run_start + at)) % BLOCK_M != 0:
        slot = slot * 0 - 1
    rank = tl.load(table + slot, mask=slot >= 0, other=0)
    own = position < tl.where(rank > 0, tl.load(run_end + at), 0)
    row = tl.load(row_at + position, mask=own, other=0)
    r = tl.arange(0, BLOCK_R)
    b_tile = rows_of_b(slot, r, table, arena, num_slots, n, inside, size, ALIGNMENT)
    pdl_wait(PDL)
    if rank == 0:
        return
    dtype: tl.constexpr = arena.dtype.element_ty
    target, stored = _place(row, own, before, block, y, stride_y, inside, COLUMN_ALIGNMENT, BLOCK_N)
    total = tl.load(target, mask=stored, other=0.0).to(tl.float32)
    for step in tl.static_range(RANK_STEPS):
        rows = shrunk_rows(
            h, row, own, site, step, num_rows, stride_h, PLANES, WIDTH, BLOCK_R, dtype
        )
        if step > 0:
            b_tile = rows_of_b(
                slot, step * BLOCK_R + r, table, arena, num_slots, n, inside, size, ALIGNMENT
            )
        total = tl.dot(rows, b_tile, total, input_precision=PRECISION)
    tl.store(target, total.to(y.dtype.element_ty), mask=stored)


@direct_launch
@triton.jit(do_not_specialize=["num_rows"])
def _expand_wide_kernel(
    h, row_at, slot_at, run_end, counts, arena, table, y, num_rows, num_slots, site_step,
    stride_h, stride_y,
    SIZES: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr,
    RANK_STEPS: tl.constexpr, ALIGNMENT: tl.constexpr, COLUMN_ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_release(PDL)
    site, before, chunk, size = site_of(tl.program_id(0), SIZES, BLOCK_N * STEPS)
    table += site.to(tl.int64) * site_step
    at = tl.program_id(1) * BLOCK_M
    pdl_wait(PDL)
    end = tl.minimum(at + BLOCK_M, tl.load(counts))
    position = at + tl.arange(0, BLOCK_M)
    dtype: tl.constexpr = arena.dtype.element_ty
    while at < end:
        stop = tl.minimum(tl.load(run_end + at), end)
        slot = tl.load(slot_at + at)
        rank = tl.load(table + slot)
        b_at = tl.load(table + 5 * num_slots + slot)
        own = (position >= at) & (position < stop)
        row = tl.load(row_at + position, mask=own, other=0)
        if rank > 0:
            rows = shrunk_rows(
                h, row, own, site, 0, num_rows, stride_h, PLANES, WIDTH, BLOCK_R, dtype
            )
            for step in tl.range(0, STEPS, num_stages=STAGES):
                n = (chunk * STEPS + step) * BLOCK_N + tl.arange(0, BLOCK_N)
                inside = n < size
                column = before + (chunk * STEPS + step) * BLOCK_N
                column = tl.multiple_of(column, COLUMN_ALIGNMENT) + tl.arange(0, BLOCK_N)
                target = y + row.to(tl.int64)[:, None] * stride_y + column[None, :]
                stored = own[:, None] & inside[None, :]
                total = tl.load(target, mask=stored, other=0.0).to(tl.float32)
                for part in tl.static_range(RANK_STEPS):
                    if RANK_STEPS > 1:
                        rows = shrunk_rows(
                            h, row, own, site, part, num_rows, stride_h, PLANES, WIDTH, BLOCK_R,
                            dtype,
                        )  # fmt: skip
                    r = part * BLOCK_R + tl.arange(0, BLOCK_R)
                    line = tl.multiple_of(b_at + r * size, [ALIGNMENT])
                    b_tile = tl.load(
                        arena + line[:, None] + n[None, :],
                        mask=(r < rank)[:, None] & inside[None, :],
                        other=0.0,
                    )
                    total = tl.dot(rows, b_tile, total, input_precision=PRECISION)
                tl.store(target, total.to(y.dtype.element_ty), mask=stored)
        at = stop


def _options(
    factors: DenseFactors, planes: int, tile: DenseTile, pdl: bool
) -> dict[str, int | str | tuple[int, ...]]:
    """Constants of all three kernels, and Triton's own."""
    return {
        **lora_options(factors, planes, tile),
        "SIZES": factors.sizes,
        "COLUMN_ALIGNMENT": column_alignment(factors.sizes, tile.block_n),
        "PRECISION": dot_precision(factors.arena.dtype),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **pdl_options(pdl),
    }


def dense_expand(
    h: torch.Tensor,
    order: RowOrder,
    factors: DenseFactors,
    tile: DenseTile,
    y: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Change y [R, sum of sizes] in place; h as `dense_shrink` gives it.

    Every adapter of `order` has a rank of at most `factors.width`. Reference:
    `ops.reference.packed_linear`.
    """
    check_matrix("y", y)
    assert y.dtype in (factors.arena.dtype, torch.float32), (y.dtype, factors.arena.dtype)
    planes, rows, columns = h.shape
    options = _options(factors, planes, tile, pdl)
    blocks = column_blocks(factors.sizes, tile.block_n)
    rest = (
        factors.arena, factors.table, y, rows, factors.num_slots, factors.site_step, columns,
        y.stride(0),
    )  # fmt: skip
    if tile.by_run and not order.is_identity:
        options.pop("GROUP")
        _expand_runs_kernel[(blocks, rows)](
            h, order.row, order.slot, order.run_start, order.run_end, *rest, **options
        )
        return
    if tile.steps > 1 and not order.is_identity:
        options.pop("GROUP")
        blocks = column_blocks(factors.sizes, tile.block_n * tile.steps)
        _expand_wide_kernel[(blocks, ceil_div(rows, tile.block_m))](
            h, order.row, order.slot, order.run_end, order.counts, *rest, STEPS=tile.steps,
            STAGES=tile.num_stages, **options,
        )  # fmt: skip
        return
    _expand_kernel[(blocks, ceil_div(rows, tile.block_m))](
        h, order.row, order.run, order.row_run, order.run_slot, order.counts, *rest,
        IDENTITY=order.is_identity, ONE_TILE=rows <= tile.block_m, **options,
    )  # fmt: skip
