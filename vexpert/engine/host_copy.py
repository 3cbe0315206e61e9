"""Copies between host and device without a wait where they are asked for."""

from typing import NamedTuple

import torch


class Landing:
    """Tensors on the host that are complete once `event` is; None: they are."""

    def __init__(self, tensors: list[torch.Tensor], event: torch.cuda.Event | None) -> None:
        self._tensors = tensors
        self._event = event

    def wait(self) -> list[torch.Tensor]:
        """The tensors, complete."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


class HostCopy(Landing):
    """Copies of `tensors`, begun on the current stream; on a CPU the tensors themselves."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        event = None
        if tensors and tensors[0].is_cuda:
            # Pinned: PyTorch does that for a copy that does not block.
            tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
            event = torch.cuda.Event()
            event.record()
        super().__init__(tensors, event)


class Largest(NamedTuple):
    """The first likeliest token of each row of logits [n, V], or -1, int64."""

    tokens: torch.Tensor  # [n] int64, on the device
    landing: Landing  # of the same on the host


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` of the host on `device`, without a wait; on a CPU itself."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
