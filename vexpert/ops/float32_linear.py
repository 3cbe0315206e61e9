"""A Linear of half dtypes whose outputs are float32: its sums as they are, never rounded.

For lm_head: between 4 and 8 two bfloat16 are 2^-5 apart, so that logits of that dtype tie, and lose
what the layers knew.
"""

import torch
from torch.nn import functional

HALF = (torch.bfloat16, torch.float16)


def has_float32_sums(weight: torch.Tensor) -> bool:
    """Whether products with `weight` can give their float32 sums: PyTorch's library on a GPU can.

    On a CPU it would need the weight in float32, twice as large, at every step.
    """
    return weight.is_cuda and weight.dtype in HALF


def head_dtype(weight: torch.Tensor) -> torch.dtype:
    """Dtype of lm_head's outputs, by its weight [out, in]: float32 where it costs no copy of it."""
    return torch.float32 if has_float32_sums(weight) else weight.dtype


def float32_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T [R, out] float32; x [R, in] and weight [out, in] of one half dtype, on a GPU."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def float32_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x W^T + b [..., out] float32, contiguous; x [..., in], weight [out, in], bias [out] half."""
    y = float32_sums(x.reshape(-1, x.shape[-1]), weight)
    if bias is not None:
        y.add_(bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`F.linear(x, weight, bias)` in `out_dtype`: x's (None), or float32."""
    if out_dtype is None or out_dtype == x.dtype:
        return functional.linear(x, weight, bias)
    assert out_dtype == torch.float32, out_dtype
    return float32_linear(x, weight, bias)
