"""A packed dense layer for a handful of rows, without a dot: y[r] = W x[r] + bias.

A program has a block of W's rows in its registers before the kernel in front of this one has ended,
so that little but sums is left when x is there. With LoRA, the first programs do the same to rows
of A: h[r, c] = A[site, slot of r] [c] @ x[r]. What reads y adds B h (`DenseDelta`).

| array | shape | holds |
|---|---|---|
| x | [R, K] float | rows any stride apart |
| weight | [N, K] in x's dtype | rows any stride apart |
| bias | [N] in x's dtype, or None | |
| slots | [R] int64 | < 0: base |
| table | | see `dense_tiles` |
| y | [R, N] in x's dtype, or float32 | contiguous |
| h | [1, R, sites * WIDTH] float32 | zero from a site's rank on; base unwritten |
"""

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import ceil_div, pdl_options, pdl_release, pdl_wait, power_of_two
from vexpert.kernels.dense_factors import DenseDelta, DenseFactors
from vexpert.kernels.dense_shrink import rows_of_a
from vexpert.kernels.launch import direct_launch

TILE = 16384  # elements of W in the registers of a program
MOST_DEPTH = 8192


@triton.jit
def _sums(tile, x, k, inside):
    """tile [N, K] times x [K], in float32."""
    row = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    return tl.sum(tile.to(tl.float32) * row[None, :], 1)


@direct_launch
@triton.jit
def _few_kernel(
    x, weight, bias, slots, arena, table, y, h, shrinks, depth, columns, num_slots, site_step,
    stride_x, stride_w,
    HAS_BIAS: tl.constexpr, SHRINK: tl.constexpr, ROWS: tl.constexpr, SITES: tl.constexpr,
    WIDTH: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_release(PDL)
    program = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    inside = k < depth
    if SHRINK and program < shrinks:
        BLOCKS: tl.constexpr = (SITES * WIDTH + BLOCK_N - 1) // BLOCK_N
        row = program // BLOCKS
        slot = tl.load(slots + row).to(tl.int32)
        used, a_at = rows_of_a(
            slot, program % BLOCKS, table, num_slots, depth, site_step, SITES, WIDTH, ALIGNMENT,
            BLOCK_N,
        )  # fmt: skip
        a_at = tl.multiple_of(a_at, [ALIGNMENT])
        mask = used[:, None] & inside[None, :]
        tile = tl.load(arena + a_at[:, None] + k[None, :], mask=mask, other=0.0)
        pdl_wait(PDL)
        if slot >= 0:
            c = program % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
            total = _sums(tile, x + row * stride_x, k, inside)
            tl.store(h + row * (SITES * WIDTH) + c, total, mask=c < SITES * WIDTH)
    else:
        n = (program - shrinks) * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = n < columns
        at = weight + n.to(tl.int64)[:, None] * stride_w + k[None, :]
        tile = tl.load(at, mask=exists[:, None] & inside[None, :], other=0.0)
        if HAS_BIAS:
            added = tl.load(bias + n, mask=exists, other=0.0).to(tl.float32)
        pdl_wait(PDL)
        for row in tl.static_range(ROWS):
            total = _sums(tile, x + row * stride_x, k, inside)
            if HAS_BIAS:
                total += added
            tl.store(y + row * columns + n, total.to(y.dtype.element_ty), mask=exists)


def can_few(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `dense_few` takes these."""
    return x.shape[1] <= MOST_DEPTH and weight.stride(1) == 1 and x.stride(1) == 1


def dense_few(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora: tuple[torch.Tensor, DenseFactors] | None,
    pdl: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, DenseDelta | None]:
    """(y [R, N] in `out_dtype`, what is still to add to it); `lora`: (slots, factors) of the rows.

    out_dtype None: x's.

    R is small, for it is part of the kernel; `can_few` holds. Reference:
    `ops.reference.packed_linear`.
    """
    assert can_few(x, weight), (x.shape, x.stride(), weight.stride())
    (rows, depth), columns = x.shape, weight.shape[0]
    y = torch.empty(rows, columns, dtype=out_dtype or x.dtype, device=x.device)
    block_k = power_of_two(depth, 16, MOST_DEPTH)
    block_n = max(1, TILE // block_k)
    given, options, rest, shrinks = (x, x, x), {}, None, 0
    h, numbers = y, (0, 0)
    if lora is not None:
        slots, factors = lora
        sites = len(factors.sizes)
        width = sites * factors.width
        h = torch.empty(1, rows, width, dtype=torch.float32, device=x.device)
        rest = DenseDelta(h, slots, factors)
        shrinks = rows * ceil_div(width, block_n)
        given = slots, factors.arena, factors.table
        numbers = factors.num_slots, factors.site_step
        options = {
            "SITES": sites, "WIDTH": factors.width, "ALIGNMENT": factors.alignment_of(depth)
        }  # fmt: skip
    options = {"SITES": 1, "WIDTH": 1, "ALIGNMENT": 1} | options
    _few_kernel[(shrinks + ceil_div(columns, block_n),)](
        x, weight, x if bias is None else bias, *given, y, h, shrinks, depth, columns, *numbers,
        x.stride(0), weight.stride(0),
        HAS_BIAS=bias is not None, SHRINK=lora is not None, ROWS=rows, **options,
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=8, **pdl_options(pdl),
    )  # fmt: skip
    return y, rest
