"""Host memory for packed adapters: pinned slabs in front of a GPU, plain memory beside a CPU.

Pinning costs 0.1 s and more for an adapter of a few hundred MB, and PyTorch's allocator of pinned
memory rounds up to powers of two; so slabs are pinned once and divided by the byte.

Shared memory is what reader processes can write to: an anonymous file in memory, which has no name
in /dev/shm, does not count against its size, and is gone with the last process that has it open.
"""

import itertools
import mmap
import os
import threading
import weakref
from typing import NamedTuple

import torch

from vexpert.log import get_logger
from vexpert.lora.arena import Allocator
from vexpert.lora.site_extras import ALIGN_BYTES

logger = get_logger(__name__)

SLAB_BYTES = 1 << 30  # at most; less for small adapters
PIN_BYTES = 16 << 20  # registered at once; no single copy may cross the edge of a piece


def _pin(buffer: torch.Tensor) -> None:
    """Make the pages of `buffer` exist, and lock them, a piece at a time.

    The steps of other requests wait for a registration: 485 ms for 1 GiB of new pages on an H200's
    host, 2.6 ms for 64 MiB of pages that exist, 1.2 ms for 16 MiB.
    """
    cudart = torch.cuda.cudart()
    done = 0
    for piece in torch.split(buffer, PIN_BYTES):
        piece.zero_()
        status = int(cudart.cudaHostRegister(piece.data_ptr(), piece.nbytes, 0))
        if status != 0:
            _unpin(buffer[:done])
            raise MemoryError(
                f"{buffer.nbytes} bytes of host memory cannot be pinned: error {status}"
            )
        done += piece.nbytes


def _unpin(buffer: torch.Tensor) -> None:
    cudart = torch.cuda.cudart()
    for piece in torch.split(buffer, PIN_BYTES):
        cudart.cudaHostUnregister(piece.data_ptr())


def _anonymous_file(nbytes: int) -> int:
    """Descriptor of a new file of `nbytes` zeros in memory; MemoryError where there is none."""
    if not hasattr(os, "memfd_create"):
        raise MemoryError("this system has no anonymous files in memory")
    try:
        descriptor = os.memfd_create("vexpert-adapters", os.MFD_CLOEXEC)
    except OSError as error:
        raise MemoryError(f"no anonymous file in memory: {error.strerror}") from None
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError as error:
        os.close(descriptor)
        raise MemoryError(f"{nbytes} bytes of shared memory: {error.strerror}") from None
    return descriptor


def _map(descriptor: int, nbytes: int) -> torch.Tensor:
    try:
        return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes of shared memory: {error.strerror}") from None


class Room(NamedTuple):
    """Where a buffer lies in shared memory."""

    slab: int | None  # its number if it lives long, so that to keep it mapped is worth while
    nbytes: int  # of the whole slab
    start: int  # first byte of the buffer


_numbers = itertools.count()


class _Slab:
    """Memory and who has which part of it."""

    def __init__(self, nbytes: int, pinned: bool, shared: bool) -> None:
        self.number = next(_numbers)
        self.allocator = Allocator(nbytes, ALIGN_BYTES)
        self.descriptor = -1
        self._closing: list[weakref.finalize[..., _Slab]] = []
        if shared:
            self.descriptor = _anonymous_file(nbytes)
            self._closing.append(weakref.finalize(self, os.close, self.descriptor))
            self.buffer = _map(self.descriptor, nbytes)
        else:
            self.buffer = torch.empty(nbytes, dtype=torch.uint8)
        if pinned:
            _pin(self.buffer)
            # Memory that is freed while it is registered cannot be registered again.
            self._closing.append(weakref.finalize(self, _unpin, self.buffer))

    def close(self) -> None:
        for closing in self._closing:
            closing()


class HostMemory:
    """Buffers by the byte. Any thread. How much may be taken in all is the caller's to decide.

    `shared`: in memory that `locate` can name to another process.
    """

    def __init__(self, pinned: bool, slab_bytes: int = SLAB_BYTES, shared: bool = False) -> None:
        self._pinned, self._shared = pinned, shared
        # What is not pinned costs little to make: a slab for each buffer, gone when it is freed.
        self._slab_bytes = _aligned(slab_bytes) if pinned else ALIGN_BYTES
        self._lock, self._growing = threading.Lock(), threading.Lock()
        self._slabs: list[_Slab] = []
        self._owners: dict[int, tuple[_Slab, int]] = {}  # address -> slab and start
        _memories.add(self)

    def allocate(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer [elements], not initialised. MemoryError when there is none."""
        if not (self._pinned or self._shared):
            return torch.empty(elements, dtype=dtype)
        nbytes = elements * dtype.itemsize
        buffer = self._place(nbytes)
        if buffer is None:
            with self._growing:  # `free` must not wait while memory is pinned
                while (buffer := self._place(nbytes)) is None:
                    self._grow(nbytes)
        return buffer.view(dtype)

    def locate(self, buffer: torch.Tensor) -> tuple[int, Room]:
        """Descriptor of the shared memory that `allocate` gave, and the place there."""
        assert self._shared
        with self._lock:
            slab, start = self._owners[buffer.data_ptr()]
            number = slab.number if self._pinned else None
            return slab.descriptor, Room(number, slab.allocator.capacity, start)

    def lasting(self) -> frozenset[int]:
        """Numbers of the slabs that exist and live long."""
        with self._lock:
            return frozenset(slab.number for slab in self._slabs if self._pinned)

    def free(self, buffer: torch.Tensor) -> None:
        """Give back what `allocate` gave; nobody may read it afterwards."""
        if not (self._pinned or self._shared):
            return  # Python's own counting frees it
        with self._lock:
            slab, start = self._owners.pop(buffer.data_ptr())
            slab.allocator.free(start)
            # A pinned slab stays, for the next load: pinning and unpinning hold up the steps.
            if not self._pinned and slab in self._slabs:  # else it is of before a fork
                self._slabs.remove(slab)
                slab.close()

    def reserve(self) -> None:
        """Pin the first slab now, so that no load has to; finds out whether memory can be shared.

        Where it cannot, that is logged, and `is_shared` is False from then on.
        """
        with self._lock:
            if self._shared:
                self._try_shared()
            if self._pinned:
                self._slabs = self._slabs or [self._new(self._slab_bytes)]

    def _try_shared(self) -> None:
        try:
            self._new(ALIGN_BYTES).close()
        except MemoryError as error:
            logger.warning("adapters are read on threads of this process: %s", error)
            self._shared = False

    @property
    def is_shared(self) -> bool:
        return self._shared

    @property
    def slab_bytes(self) -> int:
        """Bytes in slabs, in use or not."""
        return sum(slab.allocator.capacity for slab in self._slabs)

    def _new(self, nbytes: int) -> _Slab:
        return _Slab(nbytes, self._pinned, self._shared)

    def _place(self, nbytes: int) -> torch.Tensor | None:
        """Bytes of a slab that has room for them."""
        with self._lock:
            for slab in self._slabs:
                start = slab.allocator.allocate(nbytes)
                if start is not None:
                    buffer = slab.buffer[start : start + nbytes]
                    self._owners[buffer.data_ptr()] = (slab, start)
                    return buffer
            return None

    def _grow(self, nbytes: int) -> None:
        """Another slab, and no empty one that was too small."""
        with self._lock:
            small = [slab for slab in self._slabs if not slab.allocator.blocks]
            self._slabs = [slab for slab in self._slabs if slab.allocator.blocks]
        for slab in small:
            slab.close()
        slab = self._new(max(self._slab_bytes, _aligned(nbytes)))
        with self._lock:
            self._slabs.append(slab)

    def forget(self) -> None:
        """In a copy of the process, whose writes the first one would see: take new memory."""
        self._lock, self._growing = threading.Lock(), threading.Lock()
        if self._shared:
            self._slabs = []


def _aligned(nbytes: int) -> int:
    return max(1, -(-nbytes // ALIGN_BYTES)) * ALIGN_BYTES


_memories: "weakref.WeakSet[HostMemory]" = weakref.WeakSet()


def _forget_all() -> None:
    for memory in list(_memories):
        memory.forget()


os.register_at_fork(after_in_child=_forget_all)
