"""Activations between the two products; `activate` has them for Triton.

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
    if activation.name == "silu":
        return functional.silu(g) * u
    approximate = "tanh" if activation.name == "gelu_tanh" else "none"
    return functional.gelu(g, approximate=approximate) * u
