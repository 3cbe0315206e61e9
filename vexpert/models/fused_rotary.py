"""Rotary embeddings as one launch a step."""

from typing import Any

import torch
from torch import nn

from vexpert.kernels.rope_angles import LAYOUTS, rope_angles
from vexpert.models.fused_record import Records

POSITIONS = (0, 1, 5, 63, 500, 4095)  # of the probe, as far as the model goes
TOLERANCE = 4e-6  # absolute, of float32: libraries differ in the last bits of a cosine


class FusedRotary:
    """The forward of one rotary embedding: positions [1, T] -> (cos, sin) [1, T, R] each."""

    def __init__(self, module: Any, layout: str, dtype: torch.dtype) -> None:
        self.module = module
        self.layout = layout
        self.dtype = dtype

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: not read."""
        module = self.module
        angles = rope_angles(
            position_ids.reshape(-1),
            module.inv_freq,
            float(module.attention_scaling),
            self.layout,
            self.dtype,
        )
        cos, sin = (part.view(*position_ids.shape, -1) for part in angles)
        return cos, sin


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
