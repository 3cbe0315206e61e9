"""Checks of whole tensors at memory speed: finite, zero, equal."""

import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from vexpert.errors import AdapterError
from vexpert.lora.parallel import run_all

_CHUNK = 1 << 19  # elements; a chunk stays in the cache
_PART = 1 << 22  # elements that one thread takes at a time

# Of a change of a weight: a few such layers one after another leave float32. Weights are below 100.
LARGEST_CHANGE = 1e9
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
    signed = x.contiguous().view(-1).view(integer).numpy()
    sign, largest = 1 << (8 * x.element_size() - 1), 0
    for start in range(0, signed.size, _CHUNK):
        # max() of integers is vectorised; isfinite on bfloat16 is not. The largest of the positive
        # numbers as signed, of the negative ones as unsigned with the sign in front.
        chunk = signed[start : start + _CHUNK]
        negative = int(chunk.view(unsigned).max()) - sign
        largest = max(largest, int(chunk.max()), negative)
    return largest


def largest_in(tensors: Iterable[torch.Tensor]) -> float:
    """A bound on the magnitudes in all tensors; Inf: look closer, there may be NaN or Inf.

    Storages are checked as a whole: thousands of small tensors of one file are one check of its
    bytes, on several threads.
    """
    spans: dict[tuple[int, torch.dtype], list[int]] = {}  # storage, dtype -> first, end element
    owners: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    for x in tensors:
        if not x.is_contiguous() or x.dtype not in _BITS:
            return math.inf
        key = (x.untyped_storage().data_ptr(), x.dtype)
        owners[key] = x
        start = int(x.storage_offset())
        span = spans.setdefault(key, [start, start])
        span[0], span[1] = min(span[0], start), max(span[1], start + x.numel())
    found: list[float] = []

    def check(part: torch.Tensor) -> None:
        found.append(_magnitude(largest_bits(part), part.dtype))

    tasks = []
    for key, (start, end) in spans.items():
        whole = owners[key].as_strided((end - start,), (1,), start)
        starts = range(0, end - start, _PART)
        tasks += [functools.partial(check, whole[at : at + _PART]) for at in starts]
    run_all(tasks)
    return max(found, default=0.0)


def largest_of(x: torch.Tensor) -> float:
    """The largest magnitude in x; Inf where it holds NaN or Inf."""
    return _magnitude(largest_bits(x), x.dtype) if x.numel() else 0.0


def require_finite(name: str, x: torch.Tensor, scale: float = 1.0) -> None:
    """AdapterError for NaN, Inf, or more than bfloat16 can hold once `scale` is applied.

    float16's own range is smaller: packing checks it.
    """
    largest = largest_of(x)
    dtype = str(x.dtype).removeprefix("torch.")
    if largest == math.inf:
        kind = "NaN" if bool(torch.isnan(x).any()) else "Inf"
        raise AdapterError(
            f"{name} holds {kind}: the training diverged, or the values overflowed {dtype}; use an "
            "earlier checkpoint"
        )
    if largest * abs(scale) > LARGEST:
        times = f" times the scale {scale:g}" if scale != 1.0 else ""
        raise AdapterError(
            f"{name} holds {largest:g}{times}: beyond the range of float32 and bfloat16; check "
            "lora_alpha and the training"
        )


def _magnitude(bits: int, dtype: torch.dtype) -> float:
    """The value with these bits; Inf for NaN too."""
    integer, _, infinite = _BITS[dtype]
    if bits >= infinite:
        return math.inf
    return float(torch.tensor([bits], dtype=integer).view(dtype))


def is_zero(x: torch.Tensor) -> bool:
    """True when every element is +0 or -0."""
    first = x[(0,) * (x.ndim - 1)]  # of nearly every tensor, enough to tell that it is not
    return not bool(first.any()) and largest_bits(x) == 0


def same_values(x: torch.Tensor, y: torch.Tensor) -> bool:
    """True when x equals y after rounding both to the narrower of their dtypes."""
    if x.shape != y.shape:
        return False
    dtype = min((x.dtype, y.dtype), key=lambda d: torch.finfo(d).bits)
    return torch.equal(x.cpu().to(dtype), y.cpu().to(dtype))
