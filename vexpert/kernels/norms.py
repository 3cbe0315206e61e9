"""Forms of RMS norm that the kernels have; `rms_norm.py` computes them.

With n = x / sqrt(mean of x^2 + eps) in float32, and round() to x's dtype:

| form | y |
|---|---|
| rounded | weight * round(n): Llama, Qwen, Mixtral |
| wide | round(weight * n): gpt-oss |
| one_plus | round((1 + weight) * n): Gemma |
| plain | round(n): no weight |
"""

from dataclasses import dataclass

import torch

FORMS = ("rounded", "wide", "one_plus", "plain")
MAX_WIDTH = 16384  # a row lies in the registers of one program


@dataclass(frozen=True)
class Norm:
    """A norm as the table above has it."""

    weight: torch.Tensor | None  # [W] of any float dtype; None: "plain"
    width: int
    eps: float
    form: str


def reference_rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """The norm of rows x [..., W] in PyTorch, with the same roundings."""
    wide = x.float()
    n = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.weight is None:
        return n.to(x.dtype)
    if norm.form == "rounded":
        return norm.weight * n.to(x.dtype)
    weight = norm.weight.float() + (1.0 if norm.form == "one_plus" else 0.0)
    return (weight * n).to(x.dtype)
