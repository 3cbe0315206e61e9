"""Copies a packed adapter to the device in slices, so that no step waits for a whole adapter.

On a GPU the slices run on a stream of their own beside the steps' kernels; on a CPU a slice is a
plain copy between two steps.
"""

import torch

# One copy: what a step's own small copies may have to wait for on the same copy engine (160 us at
# 50 GB/s), while each call takes some 6 us of the engine's thread.
SLICE_BYTES = 8 << 20


class Transfer:
    """One copy `source` [N] on the host -> `target` [N] on the device. The engine's thread only.

    `source` must live, and `target` must not move, until `is_done()`.
    """

    def __init__(
        self, source: torch.Tensor, target: torch.Tensor, stream: "torch.cuda.Stream | None"
    ) -> None:
        assert source.shape == target.shape, (source.shape, target.shape)
        self._source, self._target, self._stream = source, target, stream
        self._slice = max(1, SLICE_BYTES // source.element_size())
        self._copied = 0  # elements begun
        self._event: torch.cuda.Event | None = None
        if stream is not None:
            # Kernels of earlier steps may still read what lay here before.
            stream.wait_stream(torch.cuda.current_stream(target.device))

    def advance(self, limit: int) -> int:
        """Begin the next slices, at most `limit` bytes; bytes begun."""
        before, size = self._copied, self._source.numel()
        stop = min(size, before + max(limit // self._source.element_size(), 1))
        if before < size:
            with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(self._stream):
                while self._copied < stop:
                    end = min(self._copied + self._slice, stop)
                    place = self._target[self._copied : end]
                    place.copy_(self._source[self._copied : end], non_blocking=True)
                    self._copied = end
        if self._copied == size and self._stream is not None and self._event is None:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(self._stream)
        return (self._copied - before) * self._source.element_size()

    def is_done(self) -> bool:
        """Whether every byte has arrived."""
        if self._copied < self._source.numel():
            return False
        return self._event is None or self._event.query()  # type: ignore[no-untyped-call]


def copy_stream(device: torch.device) -> "torch.cuda.Stream | None":
    """The stream for transfers to `device`; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
