"""Host memory for packed adapters: pinned slabs in front of a GPU, plain memory beside a CPU.

Pinning costs 0.1 s and more for an adapter of a few hundred MB, and PyTorch's allocator of pinned
memory rounds up to powers of two; so slabs are pinned once and divided by the byte.
"""

import threading
import weakref

import torch

from vexpert.lora.arena import Allocator
from vexpert.lora.site_extras import ALIGN_BYTES

SLAB_BYTES = 1 << 30  # at most; less for small adapters


def _pin(buffer: torch.Tensor) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if status != 0:
        raise MemoryError(f"{buffer.nbytes} bytes of host memory cannot be pinned: error {status}")


def _unpin(buffer: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())  # type: ignore[no-untyped-call]


class _Slab:
    """Pinned memory and who has which part of it."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.allocator = Allocator(nbytes, ALIGN_BYTES)
        _pin(self.buffer)
        # Memory that is freed while it is registered cannot be registered again.
        self.close = weakref.finalize(self, _unpin, self.buffer)


class HostMemory:
    """Buffers by the byte. Any thread. How much may be taken in all is the caller's to decide."""

    def __init__(self, pinned: bool, slab_bytes: int = SLAB_BYTES) -> None:
        self._pinned = pinned
        self._slab_bytes = max(1, -(-slab_bytes // ALIGN_BYTES)) * ALIGN_BYTES
        self._lock = threading.Lock()
        self._slabs: list[_Slab] = []
        self._owners: dict[int, tuple[_Slab, int]] = {}  # address -> slab and start

    def allocate(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer [elements], not initialised. MemoryError when there is none."""
        if not self._pinned:
            return torch.empty(elements, dtype=dtype)
        nbytes = elements * dtype.itemsize
        with self._lock:
            slab, start = self._place(max(nbytes, 1))
            buffer = slab.buffer[start : start + nbytes].view(dtype)
            self._owners[buffer.data_ptr()] = (slab, start)
            return buffer

    def free(self, buffer: torch.Tensor) -> None:
        """Give back what `allocate` gave; nobody may read it afterwards."""
        if not self._pinned:
            return  # Python's own counting frees it
        with self._lock:
            slab, start = self._owners.pop(buffer.data_ptr())
            slab.allocator.free(start)
            if not slab.allocator.blocks and len(self._slabs) > 1:
                self._slabs.remove(slab)
                slab.close()

    def reserve(self) -> None:
        """Pin the first slab now, so that no load has to."""
        if self._pinned:
            with self._lock:
                self._slabs = self._slabs or [_Slab(self._slab_bytes)]

    @property
    def slab_bytes(self) -> int:
        """Bytes pinned, in use or not."""
        return sum(slab.allocator.capacity for slab in self._slabs)

    def _place(self, nbytes: int) -> tuple[_Slab, int]:
        for slab in self._slabs:
            start = slab.allocator.allocate(nbytes)
            if start is not None:
                return slab, start
        slab = _Slab(max(self._slab_bytes, -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES))
        self._slabs.append(slab)
        start = slab.allocator.allocate(nbytes)
        assert start is not None
        return slab, start
