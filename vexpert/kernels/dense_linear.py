"""A packed dense layer for few rows, LoRA included: y[r] = W x[r] + bias + B[site, slot] h[r].

While the kernels before it still run, it loads the factors of a tile's first runs. Its first
programs may be the shrink: the others add once these have arrived.

| array | shape | holds |
|---|---|---|
| x | [R, K] float | columns adjacent |
| weight | [sum of sizes, K] in x's dtype | any strides |
| bias | [sum of sizes] in x's dtype, or None | |
| h | [PLANES, R, sites * WIDTH] float32 | see `dense_shrink` |
| row_at, run_at, row_run, run_slot, counts | | see `dense_order` |
| table | | see `dense_tiles` |
| arrivals | [1] int32 | see `arrivals` |
| y | [R, sum of sizes] in x's dtype, or float32 | contiguous |
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vexpert.kernels.arrivals import arrive, await_arrivals
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
from vexpert.kernels.dense_shrink import (
    DenseShrink,
    rows_of_a,
    shrink_part,
    shrink_rows,
)
from vexpert.kernels.dense_tiles import (
    DenseTile,
    add_lora,
    column_alignment,
    column_blocks,
    lora_options,
    rows_of_tile,
    site_of,
    stacked_b,
)
from vexpert.kernels.launch import direct_launch


@dataclass(frozen=True)
class DenseLora:
    """What the product adds: factors, and how rows are shrunk."""

    order: RowOrder
    factors: DenseFactors
    h: torch.Tensor  # [PLANES, R, sites * WIDTH] float32
    # None: h is complete. Else first programs of the launch shrink, of so many runs at most, and
    # the others wait for them before they add; all rows lie in one tile.
    shrink: DenseShrink | None = None
    runs: int = 0
    adds: bool = True  # False: h alone is wanted


@triton.jit
def _shrink_program(
    program, x, h, row_run, run_slot, arena, table, num_rows, num_slots, depth, site_step, stride_x,
    IDENTITY: tl.constexpr, SITES: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr,
    A_ALIGNMENT: tl.constexpr, A_EVEN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, A_K: tl.constexpr, PART: tl.constexpr, COLS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A run's rows, a block of columns of h, a part of the depth."""
    BLOCKS: tl.constexpr = (SITES * WIDTH + COLS - 1) // COLS
    run = program // (BLOCKS * PLANES)
    block = program // PLANES % BLOCKS
    left = program % PLANES * PART
    row = tl.arange(0, BLOCK_M)
    own = row < num_rows
    slot = tl.load(run_slot + run).to(tl.int32)
    if not IDENTITY:
        own = own & (tl.load(row_run + row, mask=own, other=-1) == run)
    used, a_at = rows_of_a(
        slot, block, table, num_slots, depth, site_step, SITES, WIDTH, A_ALIGNMENT, COLS
    )
    pdl_wait(PDL)
    if slot >= 0:
        plane = h + (program % PLANES).to(tl.int64) * num_rows * (SITES * WIDTH)
        shrink_rows(
            row, own, used, block, a_at, x, arena, plane, left, tl.minimum(left + PART, depth),
            stride_x, SITES, WIDTH, A_EVEN, A_ALIGNMENT, PRECISION, BLOCK_M, A_K, COLS,
        )  # fmt: skip


@triton.jit
def _linear_program(
    program, x, weight, bias, y, h, row_at, run_at, row_run, run_slot, counts, arrivals, arena,
    table, num_rows, shrinks, num_slots, depth, site_step, stride_x, stride_wn, stride_wk, stride_h,
    HAS_BIAS: tl.constexpr, HAS_LORA: tl.constexpr, INNER: tl.constexpr, IDENTITY: tl.constexpr,
    ONE_TILE: tl.constexpr, SIZES: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr, RANK_STEPS: tl.constexpr,
    ALIGNMENT: tl.constexpr, COLUMN_ALIGNMENT: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A tile of rows, a block of columns."""
    tiles = tl.cdiv(num_rows, BLOCK_M)
    start = program % tiles * BLOCK_M
    site, before, block, size = site_of(program // tiles, SIZES, BLOCK_N)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < size
    # Factors before the wait: nothing that runs beside this kernel writes them.
    if HAS_LORA:
        site_table = table + site.to(tl.int64) * site_step
        row, mine, run, first, last = rows_of_tile(
            start, row_at, run_at, row_run, counts, num_rows, IDENTITY, ONE_TILE, BLOCK_M
        )
        run0, b_tile0 = stacked_b(
            first, last, 0, run_slot, arena, site_table, num_slots, n, inside, size, GROUP,
            BLOCK_R, IDENTITY, ONE_TILE, ALIGNMENT,
        )  # fmt: skip
    else:
        row = start + tl.arange(0, BLOCK_M)
        mine = row < num_rows
    pdl_wait(PDL)
    column = tl.multiple_of(before + block * BLOCK_N, COLUMN_ALIGNMENT) + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + row.to(tl.int64)[:, None] * stride_x + k[None, :]
    w_at = weight + column.to(tl.int64)[None, :] * stride_wn + k[:, None] * stride_wk
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for at in range(0, depth, BLOCK_K):
        if EVEN:
            x_tile = tl.load(x_at, mask=mine[:, None], other=0.0)
            w_tile = tl.load(w_at)
        else:
            within = at + k < depth
            x_tile = tl.load(x_at, mask=mine[:, None] & within[None, :], other=0.0)
            w_tile = tl.load(w_at, mask=inside[None, :] & within[:, None], other=0.0)
        total = tl.dot(x_tile, w_tile, total, input_precision=PRECISION)
        x_at += BLOCK_K
        w_at += BLOCK_K * stride_wk
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if INNER and HAS_LORA:
        await_arrivals(arrivals, shrinks, tl.num_programs(0) - shrinks, program)
    if HAS_LORA:
        total = add_lora(
            total, run0, b_tile0, row, run, first, last, h, run_slot, arena, site_table, site, n,
            inside, size, num_rows, num_slots, stride_h, IDENTITY, ONE_TILE, PLANES, WIDTH, GROUP,
            BLOCK_R, RANK_STEPS, ALIGNMENT, PRECISION,
        )  # fmt: skip
    target = y + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=mine[:, None] & inside[None, :])


@direct_launch
@triton.jit(do_not_specialize=["num_rows", "shrinks"])
def _linear_kernel(
    x, weight, bias, y, h, row_at, run_at, row_run, run_slot, counts, arrivals, arena, table,
    num_rows, shrinks, num_slots, depth, site_step, stride_x, stride_wn, stride_wk, stride_h,
    HAS_BIAS: tl.constexpr, HAS_LORA: tl.constexpr, INNER: tl.constexpr, IDENTITY: tl.constexpr,
    ONE_TILE: tl.constexpr, SIZES: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr, RANK_STEPS: tl.constexpr,
    ALIGNMENT: tl.constexpr, COLUMN_ALIGNMENT: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    A_ALIGNMENT: tl.constexpr, A_EVEN: tl.constexpr, A_K: tl.constexpr, PART: tl.constexpr,
    COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_release(PDL)
    program = tl.program_id(0)
    if INNER and program < shrinks:
        _shrink_program(
            program, x, h, row_run, run_slot, arena, table, num_rows, num_slots, depth, site_step,
            stride_x, IDENTITY, len(SIZES), PLANES, WIDTH, A_ALIGNMENT, A_EVEN, PRECISION, BLOCK_M,
            A_K, PART, COLS, PDL,
        )  # fmt: skip
        if HAS_LORA:
            arrive(arrivals)
    else:
        _linear_program(
            program - shrinks, x, weight, bias, y, h, row_at, run_at, row_run, run_slot, counts,
            arrivals, arena, table, num_rows, shrinks, num_slots, depth, site_step, stride_x,
            stride_wn, stride_wk, stride_h, HAS_BIAS, HAS_LORA, INNER, IDENTITY, ONE_TILE, SIZES,
            COLUMNS, PLANES, WIDTH, GROUP, BLOCK_R, RANK_STEPS, ALIGNMENT, COLUMN_ALIGNMENT, EVEN,
            PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, PDL,
        )  # fmt: skip


NO_SHRINK = {
    "INNER": False, "A_ALIGNMENT": 1, "A_EVEN": True, "A_K": 16, "PART": 16, "COLS": 16,
}  # fmt: skip
NO_LORA = {
    "PLANES": 1, "WIDTH": 16, "GROUP": 1, "BLOCK_R": 16, "RANK_STEPS": 1, "ALIGNMENT": 1
}  # fmt: skip


def _shrink_options(lora: DenseLora | None, depth: int) -> dict[str, int | bool]:
    """Constants of the programs that shrink."""
    if lora is None or lora.shrink is None:
        return NO_SHRINK
    shape, factors = lora.shrink, lora.factors
    return {
        "INNER": True,
        "A_ALIGNMENT": factors.alignment_of(depth),
        "A_EVEN": depth % shape.block_k == 0,
        "A_K": shape.block_k,
        "PART": shrink_part(depth, shape),
        "COLS": shape.cols,
    }


def _count_shrinks(lora: DenseLora | None) -> int:
    """Programs that shrink."""
    if lora is None or lora.shrink is None:
        return 0
    return lora.runs * lora.h.shape[0] * ceil_div(lora.h.shape[2], lora.shrink.cols)


def dense_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sizes: tuple[int, ...],
    lora: DenseLora | None,
    tile: DenseTile,
    pdl: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y [R, sum of sizes] in `out_dtype` (None: x's), of sites with `sizes` columns each.

    With `lora.shrink`, h is written too, and R is at most a tile's rows; the layer's `arrivals` are
    zero before and after. Reference: `ops.reference.packed_linear`.
    """
    check_matrix("x", x)
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    assert sum(sizes) == weight.shape[0], (sizes, weight.shape)
    rows, depth = x.shape
    y = torch.empty(rows, weight.shape[0], dtype=out_dtype or x.dtype, device=x.device)
    given, options, shrinks = (x,) * 9, NO_LORA, _count_shrinks(lora)
    if lora is not None:
        order, factors = lora.order, lora.factors
        assert not shrinks or rows <= tile.block_m, (rows, tile)
        pdl = pdl and order.is_settled()
        given = (
            lora.h, order.row, order.run, order.row_run, order.run_slot, order.counts,
            factors.arrivals, factors.arena, factors.table,
        )  # fmt: skip
        options = lora_options(factors, lora.h.shape[0], tile)
    even = depth % tile.block_k == 0 and all(size % tile.block_n == 0 for size in sizes)
    blocks = ceil_div(rows, tile.block_m) * column_blocks(sizes, tile.block_n)
    _linear_kernel[(shrinks + blocks,)](
        x, weight, x if bias is None else bias, y, *given, rows, shrinks,
        0 if lora is None else lora.factors.num_slots, depth,
        0 if lora is None else lora.factors.site_step, x.stride(0), *weight.stride(),
        0 if lora is None else lora.h.shape[2],
        HAS_BIAS=bias is not None, HAS_LORA=lora is not None and lora.adds,
        IDENTITY=lora is not None and lora.order.is_identity, ONE_TILE=rows <= tile.block_m,
        SIZES=sizes, COLUMNS=weight.shape[0], **options, **_shrink_options(lora, depth),
        COLUMN_ALIGNMENT=column_alignment(sizes, tile.block_n), EVEN=even,
        PRECISION=dot_precision(x.dtype), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **pdl_options(pdl),
    )  # fmt: skip
    return y
