"""Routed experts' last step: out[t] = sum over k = 0, 1, ... of weights[t, k] * y[t * K + k].

Pairs with a sentinel expert are left out, whatever y holds there. Float32 inside.

| array | shape | holds |
|---|---|---|
| y | [T * K, H] float | outputs of the pairs, pair t * K + k at that row; contiguous |
| experts | [T * K] int64 | their experts; a sentinel is < 0 or >= num_experts |
| weights | [T, K] of any float dtype, or None | routing weights, contiguous; None: ones |
| out | [T, H] in y's dtype | contiguous |
"""

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import ceil_div, pdl_options, pdl_wait, power_of_two
from vexpert.kernels.launch import direct_launch


@direct_launch
@triton.jit
def _combine_kernel(
    y,
    experts,
    weights,
    out,
    width,
    num_experts,
    TOP_K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(experts + pair)
        # A branch, not a product with 0: a sentinel's row or weight may be infinite or NaN.
        if (expert >= 0) & (expert < num_experts):
            value = tl.load(y + pair * width + column, mask=inside, other=0.0).to(tl.float32)
            if HAS_WEIGHTS:
                value *= tl.load(weights + pair).to(tl.float32)
            total += value
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def combine(
    y: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor | None,
    num_experts: int,
    top_k: int,
    pdl: bool = False,
) -> torch.Tensor:
    """out [T, H] in y's dtype, of y [T * top_k, H]. Reference: `reference_combine`."""
    assert y.is_contiguous(), y.stride()
    assert weights is None or weights.is_contiguous(), weights
    tokens, width = y.shape[0] // top_k, y.shape[1]
    out = torch.empty(tokens, width, dtype=y.dtype, device=y.device)
    if tokens == 0:
        return out
    block = power_of_two(width, 16, 1024)
    _combine_kernel[(tokens, ceil_div(width, block))](
        y,
        experts,
        y if weights is None else weights,
        out,
        width,
        num_experts,
        TOP_K=top_k,
        HAS_WEIGHTS=weights is not None,
        BLOCK=block,
        **pdl_options(pdl),
    )
    return out


def reference_combine(
    y: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor | None,
    num_experts: int,
    top_k: int,
) -> torch.Tensor:
    """The same in float64, pair by pair."""
    out = torch.zeros(y.shape[0] // top_k, y.shape[1], dtype=torch.float64)
    for pair, expert in enumerate(experts.tolist()):
        if 0 <= expert < num_experts:
            weight = 1.0 if weights is None else float(weights.reshape(-1)[pair])
            out[pair // top_k] += weight * y[pair].double()
    return out
