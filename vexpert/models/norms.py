"""RMS norms of a model on a CPU: one compiled call instead of eight small operations.

A tenth of a small model's decode step goes into the dispatch of those operations. Classes differ in
detail (1 + weight, where eps goes), so a norm is replaced only if it agrees on a probe.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from vexpert.kernels.cpu_norm import rms_norm

MOST_ELEMENTS = 1 << 18  # beyond it torch's operations, spread over the threads, are as good
TOLERANCE = 2e-6  # of the probe, relative: float32 sums in another order


class CompiledRmsNorm(nn.Module):
    """Stands for another norm, whose weight and attributes it takes over; build it with `wrap`.

    Large inputs, and those of other dtypes, still go to that norm's own forward.
    """

    own_forward: Callable[[torch.Tensor], torch.Tensor]
    own_eps: np.float32
    own_weight: np.ndarray  # [n], the memory of `weight`

    @classmethod
    def wrap(cls, norm: nn.Module) -> "CompiledRmsNorm":
        module = cls.__new__(cls)
        module.__dict__.update(norm.__dict__)
        module.own_forward = norm.forward
        module.own_eps = np.float32(_eps(norm))
        module.own_weight = norm.get_parameter("weight").detach().numpy()
        return module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., n] -> [..., n]."""
        if x.dtype is not torch.float32 or x.numel() > MOST_ELEMENTS:
            return self.own_forward(x)
        width = len(self.own_weight)
        given = x.contiguous()
        y = torch.empty_like(given)
        out = y.numpy().reshape(-1, width)
        rms_norm(given.numpy().reshape(-1, width), self.own_weight, self.own_eps, out)
        return y


def compile_norms(model: nn.Module) -> int:
    """Replace, in place, every RMS norm in float32 on the CPU that agrees; how many they are."""
    found = [(path, norm) for path, norm in model.named_modules() if _is_candidate(norm)]
    count = 0
    for path, norm in found:
        compiled = CompiledRmsNorm.wrap(norm)
        if _agrees(norm, compiled):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, compiled)
            count += 1
    return count


def _eps(module: nn.Module) -> float:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else -1.0


def _is_candidate(module: nn.Module) -> bool:
    own = dict(module.named_parameters())
    weight = own.get("weight")
    return (
        type(module).__name__.endswith("RMSNorm")
        and list(own) == ["weight"]
        and not dict(module.named_buffers())
        and weight is not None
        and weight.dim() == 1
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and _eps(module) > 0
    )


@torch.inference_mode()
def _agrees(norm: nn.Module, compiled: CompiledRmsNorm) -> bool:
    """Whether both give the same for rows of usual size, and of a size at which eps matters."""
    generator = torch.Generator().manual_seed(0)
    size = torch.tensor([1.0, 100.0, float(compiled.own_eps) ** 0.5, 0.0])[:, None]
    x = torch.randn(4, len(compiled.own_weight), generator=generator) * size
    expected = norm(x)
    error = (compiled(x) - expected).abs().amax(-1)
    return bool((error <= TOLERANCE * expected.abs().amax(-1)).all())
