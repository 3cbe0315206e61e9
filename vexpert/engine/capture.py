"""Capturing a run of GPU work, so that it can be replayed by one call."""

from collections.abc import Callable
from typing import Protocol

import torch


class Capturer(Protocol):
    """Makes what runs a function's device work again, on the same tensors."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """`run` is called once or more, with its effects. RuntimeError: it cannot be captured."""


class CudaCapturer:
    """CUDA graphs that share one memory pool: what they allocate lives only during a replay.

    So no two may run at the same time, and results go to tensors from outside.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels and makes workspaces, which a capture cannot
            graph = torch.cuda.CUDAGraph()
            # Loader threads allocate and copy meanwhile: that is no part of this thread's capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay
