"""Copies between host and device without a wait where they are asked for."""

import torch


class HostCopy:
    """Copies of `tensors`, begun on the current stream; on a CPU the tensors themselves."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._copied: torch.cuda.Event | None = None
        self._tensors = tensors
        if tensors and tensors[0].is_cuda:
            # Pinned: PyTorch does that for a copy that does not block.
            self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait(self) -> list[torch.Tensor]:
        """The copies, complete."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` of the host on `device`, without a wait; on a CPU itself."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
