"""Rotary embeddings as one launch a step."""

from typing import Any

import torch
from torch import nn

from vexpert.kernels.rope_angles import LAYOUTS, Angles, rope_angles
from vexpert.models.fused_record import Records

POSITIONS = (0, 1, 5, 63, 500, 4095)  # of the probe, as far as the model goes
TOLERANCE = 4e-6  # absolute, of float32: libraries differ in the last bits of a cosine


class FusedRotary:
    """The forward of one rotary embedding: positions [1, T] -> (cos, sin) [1, T, R] each.

    `ahead`: positions [T] and their (cos, sin) [T, R], where a launch before computed them; they
    are used once.
    """

    def __init__(self, module: Any, layout: str, dtype: torch.dtype) -> None:
        self.module = module
        self.layout = layout
        self.dtype = dtype
        self.ahead: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def angles(self) -> Angles:
        """What the kernels compute."""
        module = self.module
        scaling = float(module.attention_scaling)
        return Angles(module.inv_freq, scaling, self.layout, self.dtype)

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: not read."""
        ahead, self.ahead = self.ahead, None
        flat = position_ids.reshape(-1)
        if ahead is not None and _is_same(ahead[0], flat):
            found = ahead[1]
        else:
            found = rope_angles(flat, self.angles)
        cos, sin = (part.view(*position_ids.shape, -1) for part in found)
        return cos, sin


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two contiguous tensors are one piece of memory."""
    return first.data_ptr() == second.data_ptr() and first.shape == second.shape


@torch.inference_mode()
def recognise_rotary(module: nn.Module, records: Records, longest: int) -> FusedRotary | str:
    """`module` fused, or why it is not. `longest`: positions that the model is served with.

    Beyond them some modules change their frequencies, in place.
    """
    frequencies = getattr(module, "inv_freq", None)
    scaling = getattr(module, "attention_scaling", None)
    if not isinstance(frequencies, torch.Tensor) or not isinstance(scaling, int | float):
        return "it has no frequencies and scaling of its own"
    call = records.only(module)
    if call is None or len(call.args) + len(call.kwargs) != 2:
        return "it is not called once with states and positions"
    if frequencies.dtype != torch.float32 or frequencies.dim() != 1:
        return "its frequencies are not in float32"
    usable = [position for position in POSITIONS if position < longest]
    positions = torch.tensor([usable], device=frequencies.device)
    want = module.forward(call.hidden, position_ids=positions)
    if not (isinstance(want, tuple) and len(want) == 2):
        return "it does not give cosines and sines"
    for layout in LAYOUTS:
        fused = FusedRotary(module, layout, want[0].dtype)
        got = fused(call.hidden, positions)
        if all(_near(*pair) for pair in zip(got, want, strict=True)):
            return fused
    return "its angles are others"


def _near(got: torch.Tensor, want: torch.Tensor) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    limit = TOLERANCE if want.dtype == torch.float32 else torch.finfo(want.dtype).eps
    return torch.allclose(got, want, rtol=limit, atol=max(TOLERANCE, limit / 100))
