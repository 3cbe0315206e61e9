"""Host arrays to device tensors, in one copy."""

import numpy as np
import torch


class Staging:
    """Packs int64 arrays into one pinned buffer; on the CPU the arrays become tensors as they are.

    The buffer is used again by the next call, which first waits for the copy of the last one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.int64)
        self._copied: torch.cuda.Event | None = None

    def to_device(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        """Tensors on the device with the shapes of `arrays`, all int64."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        total = sum(array.size for array in arrays)
        flat = self._reserve(total)
        at = 0
        for array in arrays:
            flat[at : at + array.size] = array.reshape(-1)
            at += array.size
        on_device = self._buffer[:total].to(self._device, non_blocking=True)
        self._mark_copied()
        parts = torch.split(on_device, [array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def _reserve(self, size: int) -> np.ndarray:
        if self._copied is not None:
            self._copied.synchronize()
        if size > self._buffer.numel():
            pin = self._device.type == "cuda"
            self._buffer = torch.empty(2 * size, dtype=torch.int64, pin_memory=pin)
        array: np.ndarray = self._buffer.numpy()
        return array

    def _mark_copied(self) -> None:
        if self._device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
