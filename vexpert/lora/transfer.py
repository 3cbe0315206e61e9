"""Copies a packed adapter to the device beside the steps, so that no step waits for it.

A copy engine works off all that one stream has queued before it turns to another stream, so the
small copies of a step would wait for whatever an adapter has queued: on an H200 5.3 ms for 256 MiB,
in slices or not, where the step alone took 0.6. So a thread queues a slice when the one before has
arrived: at 1 MiB the steps' 99th percentile stays within 3%. A kernel that copies costs 30%
(`bench/copy_beside_steps.py`). On a CPU a slice is a plain copy between two steps.
"""

import functools
import queue
import threading
import weakref
from typing import Protocol

import torch

from vexpert.at_exit import start_daemon
from vexpert.lora.host_memory import PIN_BYTES

SLICE_BYTES = 8 << 20  # most bytes of one copy; 160 us at 50 GB/s


class Transfer(Protocol):
    """One copy `source` [N] on the host -> `target` [N] on the device.

    `source` must live, and `target` must not move, until `is_done()` or `cancel()`.
    """

    def advance(self, limit: int) -> int:
        """Go on; bytes copied by this call. RuntimeError: the copy failed, now or before.

        `limit`: bytes that this step may copy, or, on a GPU, that may be under way at once.
        """
        ...

    def is_done(self) -> bool:
        """Whether every byte has arrived."""
        ...

    def cancel(self) -> None:
        """Return when nothing is written to `target` any more."""
        ...


class PlainTransfer:
    """Copies in `advance`, on the thread that calls it."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert source.shape == target.shape, (source.shape, target.shape)
        self._source, self._target = source, target
        self._copied = 0  # elements

    def advance(self, limit: int) -> int:
        before, size = self._copied, self._source.numel()
        itemsize = self._source.element_size()
        stop = min(size, before + max(limit // itemsize, 1))
        step = max(1, SLICE_BYTES // itemsize)
        with torch.inference_mode(False), torch.no_grad():
            for start in range(before, stop, step):
                end = min(start + step, stop)
                self._target[start:end].copy_(self._source[start:end])
                self._copied = end
        return (self._copied - before) * itemsize

    def is_done(self) -> bool:
        return self._copied == self._source.numel()

    def cancel(self) -> None:
        return


class Copier:
    """A thread that copies from pinned memory on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: queue.SimpleQueue[ThreadTransfer | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.put, None)

    def start(self) -> None:
        """Have the thread. RuntimeError where the system has no room for one."""
        if self._thread is None:
            serve = functools.partial(_serve, self._jobs, self._device)
            self._thread = start_daemon(serve, "vexpert-copier", self)

    def end_threads(self) -> None:
        """Have the thread end after the copies it has; those that come later get a new one."""
        self._thread = None
        self._jobs.put(None)

    def put(self, transfer: "ThreadTransfer") -> None:
        """Copy `transfer` when those before it are done; `start` comes first."""
        self._jobs.put(transfer)


def _serve(jobs: "queue.SimpleQueue[ThreadTransfer | None]", device: torch.device) -> None:
    stream = torch.cuda.Stream(device)
    while (transfer := jobs.get()) is not None:
        transfer.run(stream)
        del transfer


class ThreadTransfer:
    """Copies on `copier`'s thread, one slice under way at a time."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, copier: Copier) -> None:
        assert source.shape == target.shape, (source.shape, target.shape)
        self._source, self._target, self._copier = source, target, copier
        self._limit = 0  # bytes under way at once
        self._ready: torch.cuda.Event | None = None  # the target is free
        self._is_cancelled = False
        self._error: RuntimeError | None = None
        self._ended = threading.Event()

    def advance(self, limit: int) -> int:
        self._limit = limit
        if self._ready is None:
            self._copier.start()
            # Kernels of earlier steps may still read what lay here before.
            self._ready = torch.cuda.current_stream(self._target.device).record_event()
            self._copier.put(self)
        if self._error is not None:
            raise self._error
        return 0

    def is_done(self) -> bool:
        return self._ended.is_set() and self._error is None

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._ready is not None:
            self._ended.wait()

    def run(self, stream: torch.cuda.Stream) -> None:
        """The whole copy; on the copier's thread."""
        try:
            assert self._ready is not None
            with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(stream):
                stream.wait_event(self._ready)
                self._copy(stream)
        except RuntimeError as error:  # the device's own; `advance` tells it
            self._error = error
        finally:
            self._ended.set()

    def _copy(self, stream: torch.cuda.Stream) -> None:
        source, target = self._source, self._target
        arrived = torch.cuda.Event()
        start = 0
        while start < source.numel() and not self._is_cancelled:
            end = self._slice_end(start)
            target[start:end].copy_(source[start:end], non_blocking=True)
            arrived.record(stream)
            arrived.synchronize()
            start = end

    def _slice_end(self, start: int) -> int:
        """No slice crosses the edge of a piece of memory that was pinned at once."""
        itemsize, first = self._source.element_size(), int(self._source.storage_offset())
        edge = PIN_BYTES // itemsize
        to_edge = edge - (first + start) % edge
        count = max(1, min(self._limit, SLICE_BYTES) // itemsize)
        return min(start + min(count, to_edge), self._source.numel())


def make_transfer(source: torch.Tensor, target: torch.Tensor, copier: Copier | None) -> Transfer:
    """The copy, which `advance` begins. `copier`: of the target's device; None: a CPU."""
    if copier is None:
        return PlainTransfer(source, target)
    return ThreadTransfer(source, target, copier)
