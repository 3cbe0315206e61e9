"""Routed experts' last step with what follows it: combine, residual add and norm in one launch.

  c[t]     = sum over k = 0, 1, ... of weights[t, k] * y[t * K + k]     pairs of sentinels left out
  total[t] = residual[t] + multiplier * c[t]
  normed   = norm of total, see norms.py
The sum over k is float32; c, its multiple, total and normed are each rounded to y's dtype, as in
separate launches.

| array | shape | holds |
|---|---|---|
| y | [T * K, H] float | outputs of the pairs, pair t * K + k at that row; contiguous |
| experts | [T * K] int64 | their experts; a sentinel is < 0 or >= num_experts |
| weights | [T, K] of any float dtype, or None | routing weights, contiguous; None: ones |
| residual | [T, H] in y's dtype | rows any stride apart |
| total, normed | [T, H] in y's dtype | contiguous |
"""

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import check_matrix, pdl_options, pdl_release, pdl_wait, power_of_two
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.norms import MAX_WIDTH, Norm
from vexpert.kernels.rms_norm import add_residual, scale_rows


@direct_launch
@triton.jit
def _combine_norm_kernel(
    y,
    experts,
    weights,
    residual,
    norm_weight,
    total,
    normed,
    num_experts,
    stride_residual,
    eps,
    multiplier,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    SCALE: tl.constexpr,
    NORM: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = y.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    w = column  # not read without a norm's weight
    if NORM and FORM != "plain":
        w = tl.load(norm_weight + column, mask=inside, other=0.0)
    pdl_release(PDL)
    pdl_wait(PDL)
    other = tl.load(residual + token * stride_residual + column, mask=inside, other=0.0)
    value = tl.zeros((BLOCK,), dtype=tl.float32)
    # Unrolled, and masks in place of branches: the loads of all pairs are under way at once.
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(experts + pair)
        exists = (expert >= 0) & (expert < num_experts)
        owner = tl.full((BLOCK,), 0, tl.int64) + expert
        loaded = inside & (owner >= 0) & (owner < num_experts)
        own = tl.load(y + pair * WIDTH + column, mask=loaded, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            own *= tl.load(weights + pair, mask=exists, other=0.0).to(tl.float32)
        value += own
    value = value.to(dtype).to(tl.float32)
    value = add_residual(value, other.to(tl.float32), multiplier, SCALE, dtype)
    tl.store(total + token * WIDTH + column, value.to(dtype), mask=inside)
    if NORM:
        factor = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
        tl.store(
            normed + token * WIDTH + column,
            scale_rows(value * factor, w, FORM, dtype),
            mask=inside,
        )


def combine_norm(
    y: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor | None,
    num_experts: int,
    residual: torch.Tensor,
    multiplier: float,
    norm: Norm | None,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(total, normed), both [T, H] in y's dtype; normed is None without a norm.

    K is the rows of y over those of residual; H at most MAX_WIDTH. References:
    `kernels.combine.reference_combine` and `kernels.norms.reference_rms_norm`.
    """
    check_matrix("residual", residual)
    tokens, width = residual.shape
    assert y.is_contiguous(), y.stride()
    assert y.shape[1] == width <= MAX_WIDTH, (tuple(y.shape), width)
    assert weights is None or weights.is_contiguous(), weights
    assert residual.dtype == y.dtype, (residual.dtype, y.dtype)
    total = torch.empty(tokens, width, dtype=y.dtype, device=y.device)
    normed = None if norm is None else torch.empty_like(total)
    if tokens == 0:
        return total, normed
    block = power_of_two(width, 16, MAX_WIDTH)
    _combine_norm_kernel[(tokens,)](
        y, experts, y if weights is None else weights, residual,
        y if norm is None or norm.weight is None else norm.weight, total,
        total if normed is None else normed, num_experts, residual.stride(0),
        0.0 if norm is None else norm.eps, multiplier,
        WIDTH=width, TOP_K=y.shape[0] // tokens, HAS_WEIGHTS=weights is not None,
        SCALE=multiplier != 1.0, NORM=norm is not None, FORM="plain" if norm is None else norm.form,
        BLOCK=block, num_warps=power_of_two(block // 256, 1, 8), **pdl_options(pdl),
    )  # fmt: skip
    return total, normed
