"""RMS norms as one launch each, for the classes that agree with a form that the kernel has."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vexpert.kernels.norms import FORMS, MAX_WIDTH, Norm
from vexpert.kernels.rms_norm import rms_norm

WIDTH_WITHOUT_WEIGHT = 64  # such a norm takes any width; it is probed with this one
# Of the elements that one unit in the last place may move: float32 sums in another order.
MOST_DIFFERENT = 0.05


class FusedNorm:
    """The forward of one norm module: x [..., W] -> [..., W].

    `ahead`: an input and its result, where the launch before computed both; it is used once.
    """

    def __init__(self, norm: Norm, dtype: torch.dtype, own: Callable[..., Any], pdl: bool) -> None:
        self.norm = norm
        self.dtype = dtype
        self.own = own
        self.pdl = pdl
        self.ahead: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        ahead, self.ahead = self.ahead, None
        if ahead is not None and ahead[0] is hidden_states:
            return ahead[1]
        if hidden_states.dtype is not self.dtype:
            result: torch.Tensor = self.own(hidden_states)
            return result
        return rms_norm(hidden_states, self.norm, self.pdl)


def eps_of(module: nn.Module) -> float:
    """The module's eps; 0 if it has none."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else 0.0


def _is_candidate(module: nn.Module) -> bool:
    own = dict(module.named_parameters())
    weight = own.get("weight")
    return (
        type(module).__name__.endswith("Norm")
        and list(own) == ["weight"]
        and not dict(module.named_buffers())
        and weight is not None
        and weight.dim() == 1
        and weight.shape[0] <= MAX_WIDTH
        and eps_of(module) > 0
    )


@torch.inference_mode()
def recognise_norm(module: nn.Module, likely: str = FORMS[0]) -> Norm | None:
    """`module` as the kernel has it, or None. `likely`: the form that is tried first.

    The weight is random for the time of the probe: checkpoints with all ones would not tell forms
    apart.
    """
    if not _is_candidate(module):
        return None
    weight = module.get_parameter("weight")
    saved, width = weight.data, weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    size = torch.tensor([1.0, 100.0, eps_of(module) ** 0.5, 0.0])[:, None]
    x = (torch.randn(4, width, generator=generator) * size).to(saved.device, saved.dtype)
    try:
        weight.data = torch.randn(width, generator=generator).to(saved.device, saved.dtype)
        expected = module(x)
        for form in sorted(FORMS[:3], key=lambda name: name != likely):
            norm = Norm(weight, width, eps_of(module), form)
            if _same(rms_norm(x, norm), expected):
                return norm
    finally:
        weight.data = saved
    return None


def _same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether nearly all elements are equal, and the others are neighbours."""
    if got.dtype != want.dtype:
        return False
    near = torch.finfo(want.dtype).eps * 2
    if want.dtype == torch.float32:
        return torch.allclose(got, want, rtol=4 * near, atol=0.0)
    share = (got != want).double().mean()
    return bool(share <= MOST_DIFFERENT) and torch.allclose(got, want, rtol=near, atol=0.0)
