"""Checks of whole tensors at memory speed: finite, zero, equal."""

from typing import Any

import numpy as np
import torch

from vexpert.errors import AdapterError

_CHUNK = 1 << 18  # elements; a chunk and its copy stay in the cache

# dtype -> (torch integer of the same width, numpy unsigned, bits of +Inf)
_BITS: dict[torch.dtype, tuple[torch.dtype, Any, int]] = {
    torch.bfloat16: (torch.int16, np.uint16, 0x7F80),
    torch.float16: (torch.int16, np.uint16, 0x7C00),
    torch.float32: (torch.int32, np.uint32, 0x7F800000),
    torch.float64: (torch.int64, np.uint64, 0x7FF0000000000000),
}


def largest_bits(x: torch.Tensor) -> int:
    """Bits of the largest magnitude in x: they order like the magnitudes, NaN above Inf."""
    integer, unsigned, _ = _BITS[x.dtype]
    flat = x.contiguous().view(-1).view(integer).numpy().view(unsigned)
    largest = 0
    for start in range(0, flat.size, _CHUNK):
        # The shift drops the sign. max() of integers is vectorised; isfinite on bfloat16 is not.
        largest = max(largest, int((flat[start : start + _CHUNK] << unsigned(1)).max()))
    return largest >> 1


def require_finite(name: str, x: torch.Tensor) -> None:
    """AdapterError when x holds NaN or Inf."""
    if x.numel() and largest_bits(x) >= _BITS[x.dtype][2]:
        kind = "NaN" if bool(torch.isnan(x).any()) else "Inf"
        raise AdapterError(
            f"{name} holds {kind}: the training diverged, or the values overflowed "
            f"{str(x.dtype).removeprefix('torch.')}; use an earlier checkpoint"
        )


def is_zero(x: torch.Tensor) -> bool:
    """True when every element is +0 or -0."""
    return largest_bits(x) == 0


def same_values(x: torch.Tensor, y: torch.Tensor) -> bool:
    """True when x equals y after rounding both to the narrower of their dtypes."""
    if x.shape != y.shape:
        return False
    dtype = min((x.dtype, y.dtype), key=lambda d: torch.finfo(d).bits)
    return torch.equal(x.cpu().to(dtype), y.cpu().to(dtype))
