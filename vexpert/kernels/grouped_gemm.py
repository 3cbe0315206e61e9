"""Base product of routed experts: y[p] = W[e] @ x[x_rows[p]] + bias[e].

Rows of sentinels are not written.

| array | shape | holds |
|---|---|---|
| x | [R, K] float | inputs; columns adjacent |
| x_rows | [P] int64 or None | row of x for each row p |
| weight | [E, N, K] in x's dtype | any strides: a transposed weight is a view |
| bias | [E, N] in x's dtype, or None | contiguous |
| key, order, block_start, num_blocks | | see `blocks`; here the key is the expert |
| y | [P, N] in x's dtype | the output |
"""

import torch
import triton
import triton.language as tl

from vexpert.kernels.blocks import Blocks
from vexpert.kernels.common import ceil_div, check_matrix, dot_precision, power_of_two
from vexpert.kernels.launch import direct_launch


@direct_launch
@triton.jit
def _gemm_kernel(
    x,
    x_rows,
    weight,
    bias,
    key,
    order,
    block_start,
    num_blocks,
    y,
    num_rows,
    width,
    depth,
    stride_x,
    stride_we,
    stride_wn,
    stride_wk,
    HAS_X_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(1)
    if block >= tl.load(num_blocks):
        return
    first = tl.load(block_start + block)
    expert = tl.load(key + first)
    place = first + tl.arange(0, BLOCK_M)
    mine = tl.load(key + place, mask=place < num_rows, other=-1) == expert
    row = tl.load(order + place, mask=mine, other=0)
    source = row
    if HAS_X_ROWS:
        source = tl.load(x_rows + row, mask=mine, other=0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < width
    x_line = x + source * stride_x
    w_line = weight + expert * stride_we + n.to(tl.int64) * stride_wn
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, depth, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)
        within = inner < depth
        x_tile = tl.load(
            x_line[:, None] + inner[None, :], mask=mine[:, None] & within[None, :], other=0.0
        )
        w_tile = tl.load(
            w_line[None, :] + inner[:, None].to(tl.int64) * stride_wk,
            mask=inside[None, :] & within[:, None],
            other=0.0,
        )
        total = tl.dot(x_tile, w_tile, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + expert * width + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    target = y + row[:, None] * width + n[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=mine[:, None] & inside[None, :])


def grouped_gemm(
    x: torch.Tensor,
    x_rows: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: Blocks,
) -> torch.Tensor:
    """y [P, N] in x's dtype; rows of sentinels are unspecified. No launch if P is 0.

    Reference: `ops.reference.grouped_gemm`.
    """
    check_matrix("x", x)
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    assert bias is None or bias.is_contiguous(), bias
    rows, width, depth = blocks.key.shape[0], weight.shape[1], weight.shape[2]
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    block_n = power_of_two(width, 16, 64 if blocks.block_m == 16 else 128)
    _gemm_kernel[(ceil_div(width, block_n), blocks.max_blocks)](
        x,
        x if x_rows is None else x_rows,
        weight,
        x if bias is None else bias,
        blocks.key,
        blocks.order,
        blocks.block_start,
        blocks.num_blocks,
        y,
        rows,
        width,
        depth,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        weight.stride(2),
        HAS_X_ROWS=x_rows is not None,
        HAS_BIAS=bias is not None,
        PRECISION=dot_precision(x.dtype),
        BLOCK_M=blocks.block_m,
        BLOCK_N=block_n,
        BLOCK_K=power_of_two(depth, 16, 32 if x.dtype == torch.float32 else 128),
    )
    return y
