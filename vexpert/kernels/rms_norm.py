"""RMS norm of rows, alone or after a residual add, in one launch; rounds as model classes do.

  total[t] = residual[t] + multiplier * x[t]        x[t] alone without a residual
  y[t]     = norm of total[t], by the forms of norms.py; float32 inside

| array | shape | holds |
|---|---|---|
| x, residual | [T, W] float | rows any stride apart |
| weight | [W] of any float dtype | |
| total, y | [T, W] in x's dtype | contiguous; the multiple of x and the sum are each rounded |
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
from vexpert.kernels.dense_reader import add_of_row, factors_of_row, row_rest
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.norms import MAX_WIDTH, Norm


@triton.jit
def scale_rows(n, weight, FORM: tl.constexpr, dtype: tl.constexpr):
    """y of rows n (float32, normed) in `dtype`; weight broadcasts with n, any dtype."""
    if FORM == "rounded":
        y = (n.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)
    elif FORM == "wide":
        y = (n * weight.to(tl.float32)).to(dtype)
    elif FORM == "one_plus":
        y = (n * (1.0 + weight.to(tl.float32))).to(dtype)
    else:
        y = n.to(dtype)
    return y


@triton.jit
def add_residual(x, residual, multiplier, SCALE: tl.constexpr, dtype: tl.constexpr):
    """round(residual + round(multiplier * x)) in float32, of x and residual in float32."""
    if SCALE:
        x = (x * multiplier).to(dtype).to(tl.float32)
    return (x + residual).to(dtype).to(tl.float32)


@direct_launch
@triton.jit(do_not_specialize=["num_rows"])  # one compilation for every number of tokens
def _rms_norm_kernel(
    x,
    residual,
    weight,
    total,
    y,
    num_rows,
    stride_x,
    stride_residual,
    eps,
    multiplier,
    h,
    slots,
    arena,
    table,
    num_slots,
    stride_h,
    plane,
    WIDTH: tl.constexpr,
    FORM: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LORA: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    RANK_STEPS: tl.constexpr,
    PLANES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = y.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    w = column  # not read without a weight
    if FORM != "plain":
        w = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    pdl_release(PDL)
    if LORA:  # a row a program
        n = tl.arange(0, BLOCK)
        rank, b_at, b = factors_of_row(
            tl.program_id(0), n, n < WIDTH, slots, arena, table, num_slots, WIDTH, BLOCK_RANK,
            ALIGNMENT,
        )  # fmt: skip
    pdl_wait(PDL)
    value = tl.load(x + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    if LORA:
        one = add_of_row(
            tl.reshape(value, (BLOCK,)), tl.program_id(0), rank, b_at, b, n, n < WIDTH, h, plane,
            stride_h, arena, dtype, WIDTH, BLOCK_RANK, RANK_STEPS, PLANES, ALIGNMENT,
        )  # fmt: skip
        value = tl.reshape(one, (1, BLOCK))
    if ADD:
        at = residual + row * stride_residual + column
        other = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        value = add_residual(value, other, multiplier, SCALE, dtype)
        tl.store(total + row * WIDTH + column, value.to(dtype), mask=inside)
    factor = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
    tl.store(
        y + row * WIDTH + column, scale_rows(value * factor[:, None], w, FORM, dtype), mask=inside
    )


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    multiplier: float,
    pdl: bool,
    rest: DenseDelta | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(total or x, y) of rows x [T, W]."""
    check_matrix("x", x)
    rows, width = x.shape
    assert width == norm.width <= MAX_WIDTH, (tuple(x.shape), norm.width)
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(y)
    if rows == 0:
        return total, y
    block = power_of_two(width, 16, MAX_WIDTH)
    # Narrow rows, such as heads, share a program: 1024 elements keep a warp busy. However few the
    # rows are: the order of a row's sum follows from how many share.
    together = 1 if rest else max(1, min(64, 1024 // block))
    given, options = row_rest(rest, x, width)
    _rms_norm_kernel[(ceil_div(rows, together),)](
        x,
        x if residual is None else residual,
        x if norm.weight is None else norm.weight,
        total,
        y,
        rows,
        x.stride(0),
        x.stride(0) if residual is None else residual.stride(0),
        norm.eps,
        multiplier,
        *given,
        WIDTH=width,
        FORM=norm.form,
        ADD=residual is not None,
        SCALE=multiplier != 1.0,
        ROWS=together,
        BLOCK=block,
        **options,
        num_warps=power_of_two(block * together // 256, 1, 8),
        **pdl_options(pdl),
    )
    return total, y


def rms_norm(x: torch.Tensor, norm: Norm, pdl: bool = False) -> torch.Tensor:
    """y [..., W] in x's dtype, contiguous, of x [..., W]; W is at most MAX_WIDTH.

    Reference: `kernels.norms.reference_rms_norm`.
    """
    rows = x.reshape(-1, norm.width)
    return _launch(rows, None, norm, 1.0, pdl)[1].view(x.shape)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: Norm,
    multiplier: float = 1.0,
    pdl: bool = False,
    rest: DenseDelta | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(total, y), both [..., W] in x's dtype, contiguous, of x and residual [..., W].

    `rest`: what is still to add to the rows of x. Reference:
    `kernels.norms.reference_rms_norm`.
    """
    assert x.shape == residual.shape, (x.shape, residual.shape)
    assert x.dtype == residual.dtype, (x.dtype, residual.dtype)
    rows = (x.reshape(-1, norm.width), residual.reshape(-1, norm.width))
    total, y = _launch(*rows, norm, multiplier, pdl, rest)
    return total.view(x.shape), y.view(x.shape)
