"""Activations between the two products, on float32 tiles of gate and up.

| name | formula |
|---|---|
| silu | g * sigmoid(g) * u |
| gelu | g * Phi(g) * u, exact |
| gelu_tanh | the same by tanh |
| clamped_swiglu | c * sigmoid(ALPHA * c) * (clamp(u, -LIMIT, LIMIT) + 1), c = min(g, LIMIT) |
| relu2 | max(g, 0)^2, without up |
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional


@dataclass(frozen=True)
class Activation:
    """A row of the table above with its constants."""

    name: str
    alpha: float = 1.0
    limit: float = 0.0

    @property
    def has_gate(self) -> bool:
        return self.name != "relu2"


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def activate(g, u, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The activation NAME of tiles g and u in float32."""
    if NAME == "silu":
        out = g * tl.sigmoid(g) * u
    elif NAME == "gelu":
        out = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476)) * u
    elif NAME == "gelu_tanh":
        out = 0.5 * g * (1.0 + _tanh(0.7978845608028654 * (g + 0.044715 * g * g * g))) * u
    elif NAME == "clamped_swiglu":
        c = tl.minimum(g, LIMIT)
        out = c * tl.sigmoid(ALPHA * c) * (tl.clamp(u, -LIMIT, LIMIT) + 1.0)
    else:
        tl.static_assert(NAME == "relu2")
        out = tl.maximum(g, 0.0) * tl.maximum(g, 0.0)
    return out


def reference_activation(
    activation: Activation, g: torch.Tensor, u: torch.Tensor | None
) -> torch.Tensor:
    """The same in PyTorch; u is None without a gate."""
    if u is None:
        assert activation.name == "relu2", activation
        return functional.relu(g) ** 2
    if activation.name == "clamped_swiglu":
        c, limit = g.clamp(max=activation.limit), activation.limit
        return c * torch.sigmoid(activation.alpha * c) * (u.clamp(-limit, limit) + 1)
    gated = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda t: functional.gelu(t, approximate="tanh"),
    }
    result: torch.Tensor = gated[activation.name](g) * u
    return result
