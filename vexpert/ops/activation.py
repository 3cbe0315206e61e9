"""Which known activation a model's own function is, by what it computes."""

from collections.abc import Callable

import torch

from vexpert.kernels.activations import Activation, reference_activation

NAMES = ("silu", "gelu", "gelu_tanh", "relu2")
CLAMPED = Activation("clamped_swiglu", alpha=1.702, limit=7.0)  # gpt-oss


def recognise(
    activate: Callable[[torch.Tensor], torch.Tensor],
    has_gate: bool,
    is_interleaved: bool,
    size: int,
    device: torch.device,
) -> Activation | None:
    """The activation that equals `activate` ([P, n * size] -> [P, size]) on 64 rows; None: another.

    Probes span -12 ... 12, so that limits show. Its limit and alpha are read off the module that a
    bound method belongs to.
    """
    generator = torch.Generator().manual_seed(0)
    y = torch.rand(64, size * (2 if has_gate else 1), generator=generator) * 24 - 12
    given = activate(y.to(device)).cpu()
    gate, up = _parts(y, has_gate, is_interleaved)
    for candidate in _candidates(activate):
        if candidate.has_gate is not has_gate:
            continue
        expected = reference_activation(candidate, gate, up)
        if given.shape == expected.shape and torch.allclose(given, expected, rtol=1e-4, atol=1e-5):
            return candidate
    return None


def _parts(
    y: torch.Tensor, has_gate: bool, is_interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not has_gate:
        return y, None
    if is_interleaved:
        return y[:, ::2], y[:, 1::2]
    gate, up = y.chunk(2, -1)
    return gate, up


def _candidates(activate: Callable[[torch.Tensor], torch.Tensor]) -> list[Activation]:
    module = getattr(activate, "__self__", None)
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    known = [Activation(name) for name in NAMES]
    if isinstance(alpha, float) and isinstance(limit, int | float):
        known.append(Activation("clamped_swiglu", alpha, float(limit)))
    return [*known, CLAMPED]
