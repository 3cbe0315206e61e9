"""Residual add and RMS norm of many rows, with the end of a dense layer's LoRA: tiles of rows.

  x'[t]    = x[t] + B[slot of t] h[t], rounded; base rows as they are
  total[t] = residual[t] + multiplier * x'[t]
  y[t]     = norm of total[t], as in rms_norm.py
A program has some rows and takes their columns in turn; where that is more than one turn, it reads
the total that it has written once more for the norm.

| array | shape | holds |
|---|---|---|
| x, residual | [T, W] float | rows any stride apart |
| weight | [W] float | of the norm |
| h, slots, arena, table | | of the `DenseDelta`, of a layer with one site |
| total, y | [T, W] in x's dtype | contiguous |
"""

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import (
    ceil_div,
    check_matrix,
    pdl_options,
    pdl_release,
    pdl_wait,
    power_of_two,
)
from vexpert.kernels.dense_factors import DenseDelta
from vexpert.kernels.dense_tile_reader import (
    add_of_tile,
    rows_of_h,
    slots_of_tile,
    tile_options,
    tile_tensors,
)
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.norms import Norm
from vexpert.kernels.rms_norm import add_residual, scale_rows


@triton.jit
def _store_normed(
    y, weight, value, factor, row, exists, column, FORM: tl.constexpr, WIDTH: tl.constexpr
):
    """Columns of y of the tile's rows, from total (float32) and the norm's factor."""
    w = column
    if FORM != "plain":
        w = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    normed = scale_rows(value * factor[:, None], w[None, :], FORM, y.dtype.element_ty)
    inside = exists[:, None] & (column < WIDTH)[None, :]
    tl.store(y + row[:, None] * WIDTH + column[None, :], normed, mask=inside)


@direct_launch
@triton.jit(do_not_specialize=["num_rows"])
def _norm_tile_kernel(
    x, residual, weight, total, y, stride_x, stride_residual, eps, multiplier, h, slots, arena,
    table, num_rows, num_slots, stride_h,
    SIZE: tl.constexpr, FORM: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_RANK: tl.constexpr,
    RANK_STEPS: tl.constexpr, PLANES: tl.constexpr, ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y.dtype.element_ty
    pdl_release(PDL)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    exists = row < num_rows
    # Before the wait: nothing that runs beside this kernel writes slots, tables and factors.
    slot = slots_of_tile(row, exists, slots, table)
    pdl_wait(PDL)
    rows = rows_of_h(
        h, row, slot, 0, num_rows, stride_h, arena, WIDTH, BLOCK_RANK, RANK_STEPS, PLANES
    )
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    value = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, SIZE, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = exists[:, None] & (column < SIZE)[None, :]
        at = x + row[:, None] * stride_x + column[None, :]
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        at = residual + row[:, None] * stride_residual + column[None, :]
        other = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        value = add_of_tile(
            value, row, slot, rows, column, column < SIZE, 0, h, num_rows, stride_h, arena,
            table, num_slots, dtype, SIZE, WIDTH, BLOCK_RANK, RANK_STEPS, PLANES, ALIGNMENT,
            PRECISION,
        )  # fmt: skip
        value = add_residual(value, other, multiplier, SCALE, dtype)
        squares += tl.sum(value * value, 1)
        tl.store(total + row[:, None] * SIZE + column[None, :], value.to(dtype), mask=inside)
    factor = tl.rsqrt(squares / SIZE + eps)
    if COLUMNS >= SIZE:
        _store_normed(y, weight, value, factor, row, exists, tl.arange(0, COLUMNS), FORM, SIZE)
    else:
        tl.debug_barrier()  # others of this program's threads may have written it
        for first in range(0, SIZE, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = exists[:, None] & (column < SIZE)[None, :]
            at = total + row[:, None] * SIZE + column[None, :]
            value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            _store_normed(y, weight, value, factor, row, exists, column, FORM, SIZE)


def norm_tiles(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: Norm,
    multiplier: float,
    rest: DenseDelta,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(total, y), new, of x and residual; `rest`, still to add to x, has a tile and one site.

    References: `ops.reference.packed_linear` and `kernels.norms.reference_rms_norm`.
    """
    check_matrix("x", x)
    check_matrix("residual", residual)
    tile, (rows, width) = rest.tile, x.shape
    assert tile is not None
    assert rest.factors.sizes == (width,), (rest.factors.sizes, width)
    total = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    y = torch.empty_like(total)
    if rows == 0:
        return total, y
    *given, _, stride_h = tile_tensors(rest)
    _norm_tile_kernel[(ceil_div(rows, tile.rows),)](
        x,
        residual,
        x if norm.weight is None else norm.weight,
        total,
        y,
        x.stride(0),
        residual.stride(0),
        norm.eps,
        multiplier,
        *given,
        stride_h,
        SIZE=width,
        FORM=norm.form,
        SCALE=multiplier != 1.0,
        ROWS=tile.rows,
        COLUMNS=power_of_two(width, 16, tile.columns),
        **tile_options(rest),
        num_warps=tile.num_warps,
        **pdl_options(pdl),
    )
    return total, y
