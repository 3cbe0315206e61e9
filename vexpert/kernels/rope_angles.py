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
| cos, sin | [T, R] | contiguous |
"""

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import power_of_two
from vexpert.kernels.launch import direct_launch

LAYOUTS = ("halves", "once", "pairs")


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


def rope_angles(
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    scaling: float,
    layout: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [T, R] in `dtype` of positions [T] and frequencies [F] float32."""
    assert layout in LAYOUTS, layout
    assert positions.is_contiguous(), positions.stride()
    assert frequencies.is_contiguous(), frequencies.stride()
    assert frequencies.dtype == torch.float32, frequencies.dtype
    tokens, count = positions.shape[0], frequencies.shape[0]
    width = count if layout == "once" else 2 * count
    cos = torch.empty(tokens, width, dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    if tokens:
        _rope_angles_kernel[(tokens,)](
            positions,
            frequencies,
            cos,
            sin,
            scaling,
            F=count,
            R=width,
            BLOCK=power_of_two(width, 16, 4096),
            LAYOUT=layout,
            num_warps=power_of_two(width // 32, 1, 4),
        )
    return cos, sin


def reference_rope_angles(
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    scaling: float,
    layout: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in PyTorch."""
    angle = positions[:, None].float() * frequencies
    if layout == "halves":
        angle = torch.cat((angle, angle), -1)
    elif layout == "pairs":
        angle = angle.repeat_interleave(2, -1)
    return (angle.cos() * scaling).to(dtype), (angle.sin() * scaling).to(dtype)
