"""Checks of whole tensors at memory speed: finite, zero, equal."""

from typing import Any

import numpy as np
import torch

from vexpert.errors import AdapterError

_CHUNK = 1 << 18  # elements; a chunk and its copy stay in the cache

LARGEST = torch.finfo(torch.bfloat16).max  # float32's is 0.4 % more

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


def require_finite(name: str, x: torch.Tensor, scale: float = 1.0) -> float:
    """The largest magnitude in x; AdapterError for NaN, Inf, or more than half dtypes can hold
    once `scale` is applied. float16's own range is smaller: packing checks it.
    """
    bits = largest_bits(x) if x.numel() else 0
    dtype = str(x.dtype).removeprefix("torch.")
    if bits >= _BITS[x.dtype][2]:
        kind = "NaN" if bool(torch.isnan(x).any()) else "Inf"
        raise AdapterError(
            f"{name} holds {kind}: the training diverged, or the values overflowed {dtype}; use an "
            "earlier checkpoint"
        )
    largest = _magnitude(bits, x.dtype)
    if largest * abs(scale) > LARGEST:
        times = f" times the scale {scale:g}" if scale != 1.0 else ""
        raise AdapterError(
            f"{name} holds {largest:g}{times}: beyond the range of float32 and bfloat16; check "
            "lora_alpha and the training"
        )
    return largest


def _magnitude(bits: int, dtype: torch.dtype) -> float:
    integer, _, _ = _BITS[dtype]
    return float(torch.tensor([bits], dtype=integer).view(dtype))


def same_values(x: torch.Tensor, y: torch.Tensor) -> bool:
    """True when x equals y after rounding both to the narrower of their dtypes."""
    if x.shape != y.shape:
        return False
    dtype = min((x.dtype, y.dtype), key=lambda d: torch.finfo(d).bits)
    return torch.equal(x.cpu().to(dtype), y.cpu().to(dtype))
