"""Host arrays to device tensors, in one copy."""

import numpy as np
import torch

RING = 3  # pinned buffers in turn: a copy has long been made when its buffer's turn comes again


class _Pinned:
    """One pinned buffer of int64, and when the copy from it was made."""

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.int64)
        self._copied: torch.cuda.Event | None = None

    def reserve(self, size: int, pin: bool) -> np.ndarray:
        """Its first `size` elements, free to be written."""
        if self._copied is not None:
            self._copied.synchronize()
        if size > self.tensor.numel():
            self.tensor = torch.empty(2 * size, dtype=torch.int64, pin_memory=pin)
        array: np.ndarray = self.tensor.numpy()
        return array[:size]

    def mark_copied(self) -> None:
        """The copy from it has been begun on the current stream."""
        self._copied = self._copied or torch.cuda.Event()
        self._copied.record()


class Staging:
    """Brings int64 arrays to one device through pinned buffers.

    On the CPU `to_device` makes tensors of the arrays as they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = [_Pinned() for _ in range(RING)]

    def to_device(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        """Tensors on the device with the shapes of `arrays`, all int64."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        total = sum(array.size for array in arrays)
        pinned, flat = self._next(total)
        at = 0
        for array in arrays:
            flat[at : at + array.size] = array.reshape(-1)
            at += array.size
        on_device = pinned.tensor[:total].to(self._device, non_blocking=True)
        self._mark(pinned)
        parts = torch.split(on_device, [array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def fill(self, target: torch.Tensor, array: np.ndarray) -> None:
        """Copy `array` [n] int64 to `target` [n] on the device, in place."""
        pinned, flat = self._next(array.size)
        flat[:] = array
        target.copy_(pinned.tensor[: array.size], non_blocking=True)
        self._mark(pinned)

    def _next(self, size: int) -> tuple[_Pinned, np.ndarray]:
        pinned = self._ring.pop(0)
        self._ring.append(pinned)
        return pinned, pinned.reserve(size, self._device.type == "cuda")

    def _mark(self, pinned: _Pinned) -> None:
        if self._device.type == "cuda":
            pinned.mark_copied()
