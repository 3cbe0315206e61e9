"""Cosines and sines of a step's rotary angles, in one launch.

  angle[t, f] = position[t] * frequency[f]
  cos[t, j]   = scaling * cos(angle[t, F(j)]), sin alike; float32, then rounded to their dtype

| layout | R | F(j) |
|---|---|---|
| halves | 2 F | j mod F |
| once | F | j |
| pairs | 2 F | j / 2 |

| array | shape | holds |
|---|---|---|
| positions | [T] int64 | |
| frequencies | [F] float32 | |
| cos, sin | [T, R] in the angles' dtype | contiguous |
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import power_of_two
from vexpert.kernels.launch import direct_launch

LAYOUTS = ("halves", "once", "pairs")


@triton.jit
def store_angles(
    token,
    positions,
    frequencies,
    cos,
    sin,
    scaling,
    F: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Cosines and sines of one token, int64."""
    j = tl.arange(0, BLOCK)
    inside = j < R
    source = j % F
    if LAYOUT == "pairs":
        source = j // 2
    frequency = tl.load(frequencies + source, mask=inside, other=0.0)
    angle = tl.load(positions + token).to(tl.float32) * frequency
    dtype: tl.constexpr = cos.dtype.element_ty
    tl.store(cos + token * R + j, (tl.cos(angle) * scaling).to(dtype), mask=inside)
    tl.store(sin + token * R + j, (tl.sin(angle) * scaling).to(dtype), mask=inside)


@direct_launch
@triton.jit
def _rope_angles_kernel(
    positions,
    frequencies,
    cos,
    sin,
    scaling,
    F: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    store_angles(token, positions, frequencies, cos, sin, scaling, F, R, BLOCK, LAYOUT)


@dataclass(frozen=True)
class Angles:
    """The angles of one rotary embedding."""

    frequencies: torch.Tensor  # [F] float32, contiguous
    scaling: float
    layout: str
    dtype: torch.dtype  # of cos and sin

    @property
    def width(self) -> int:
        """R."""
        count = self.frequencies.shape[0]
        return count if self.layout == "once" else 2 * count

    def options(self) -> dict[str, int | str]:
        """Constants of the kernels."""
        assert self.layout in LAYOUTS, self.layout
        assert self.frequencies.is_contiguous(), self.frequencies.stride()
        assert self.frequencies.dtype == torch.float32, self.frequencies.dtype
        return {
            "F": self.frequencies.shape[0],
            "R": self.width,
            "BLOCK": power_of_two(self.width, 16, 4096),
            "LAYOUT": self.layout,
        }


def rope_angles(positions: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), new, of positions [T] int64, contiguous. Reference: `reference_rope_angles`."""
    assert positions.is_contiguous(), positions.stride()
    tokens, width = positions.shape[0], angles.width
    cos = torch.empty(tokens, width, dtype=angles.dtype, device=positions.device)
    sin = torch.empty_like(cos)
    if tokens:
        _rope_angles_kernel[(tokens,)](
            positions,
            angles.frequencies,
            cos,
            sin,
            angles.scaling,
            **angles.options(),
            num_warps=power_of_two(width // 32, 1, 4),
        )
    return cos, sin


def reference_rope_angles(
    positions: torch.Tensor, angles: Angles
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in PyTorch."""
    angle = positions[:, None].float() * angles.frequencies
    if angles.layout == "halves":
        angle = torch.cat((angle, angle), -1)
    elif angles.layout == "pairs":
        angle = angle.repeat_interleave(2, -1)
    cos, sin = (part * angles.scaling for part in (angle.cos(), angle.sin()))
    return cos.to(angles.dtype), sin.to(angles.dtype)
