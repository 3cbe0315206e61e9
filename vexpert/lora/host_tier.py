"""The middle tier: packed adapters in host memory, under a byte budget, filled by loader threads.

A copy may go, least recently used first, unless somebody waits for it: one that is being copied to
the device, one whose requests wait for the device, and one that no file could give back.
"""

import functools
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Condition, RLock

import torch

from vexpert.errors import AdapterError
from vexpert.log import get_logger
from vexpert.lora.adapter_version import Version
from vexpert.lora.chat_template import ChatTemplate, shared
from vexpert.lora.host_memory import HostMemory
from vexpert.lora.loading import THREADS, LoaderPool
from vexpert.lora.pack import Allocate
from vexpert.lora.readers import Readers
from vexpert.lora.source import AdapterLoader, BaseWeightNeeded, Fingerprint, HostCopy, changed

logger = get_logger(__name__)

RECHECK = 1.0  # seconds between looks at whether a version that waits for memory is still wanted


class HostTier:
    """Reads versions into host memory. `lock` guards every Version and this object's fields.

    `readers`: processes that read, if `memory` is shared; else the loader threads read themselves.
    """

    def __init__(
        self,
        loader: AdapterLoader,
        memory: HostMemory,
        budget: int,
        max_copies: int | None,
        lock: RLock,
        check_size: Callable[[Version, int], None],
        settled: Callable[[Version], None],
        readers: int = 0,
    ) -> None:
        self._loader, self._memory = loader, memory
        self.readers = _readers(loader, readers) if readers and memory.is_shared else None
        self.budget, self._max_copies = budget, max_copies
        self._check_size, self._settled = check_size, settled
        self.changed = Condition(lock)  # a read ended, or memory may be free
        self._threads = LoaderPool(THREADS if self.readers is None else readers)
        self._copies: OrderedDict[Version, None] = OrderedDict()  # with memory; oldest use first
        self.used = 0  # bytes
        self._booked = 0  # of them, those that are about to be allocated
        self.loads = self.errors = 0
        self.load_seconds = 0.0

    # ---- under the lock

    def ensure(self, version: Version) -> None:
        """Begin to read `version`, unless it is on the host, under way or errored."""
        if version.host is None and not version.is_loading and version.error is None:
            version.is_loading = True
            self._threads.submit(
                functools.partial(self._read, version), functools.partial(self._finish, version)
            )

    def touch(self, version: Version) -> None:
        """`version` is used now."""
        if version in self._copies:
            self._copies.move_to_end(version)

    def drop(self, version: Version) -> None:
        """Give back the memory of `version`, if it has any and is not being read."""
        if version in self._copies and not version.is_loading:
            self._release(version)

    def trim(self) -> None:
        """Drop what may go while there are too many copies; wake whoever waits for memory."""
        if self._max_copies is not None:
            for version in list(self._copies):
                if len(self._copies) <= self._max_copies:
                    break
                if self._may_go(version):
                    self._release(version)
        self.changed.notify_all()

    def count(self) -> int:
        """Versions that take memory."""
        return len(self._copies)

    def loading(self) -> int:
        """Versions that are read or wait for a thread."""
        waiting, busy, _ = self._threads.counts()
        return waiting + busy

    def check_integrity(self) -> None:
        """Assert that the bytes booked are those of the copies, within the budget."""
        assert self.used == self._booked + sum(version.nbytes for version in self._copies)
        assert self.used <= self.budget, f"{self.used} of {self.budget} bytes"
        for version in self._copies:
            assert version.is_loading or version.host is not None, f"{version.ref} is empty"

    # ---- not under the lock

    def tend(self) -> None:
        """Replace loader threads that are stuck. Cheap."""
        self._threads.tend()

    def warm(self) -> None:
        """A load may come: have a process ready for it."""
        if self.readers is not None:
            self.readers.warm()

    def wait(self, version: Version) -> None:
        """Until the read of `version` has ended, one way or the other."""
        with self.changed:
            self.changed.wait_for(lambda: not version.is_loading)

    # ---- loader threads

    def _read(self, version: Version) -> tuple[HostCopy, float]:
        began = time.perf_counter()
        allocate = functools.partial(self._allocate, version)
        host = self._load(version, allocate)
        with self.changed:
            if version.files not in (None, host.files):  # its template was read meanwhile
                raise changed(version.source)
        return host, time.perf_counter() - began

    def read_template(self, version: Version) -> tuple[ChatTemplate, Fingerprint]:
        """The chat template of a version that nobody has read, and the state of its files."""
        return self._loader.read_template(version.source, version.files)

    def _load(self, version: Version, allocate: Allocate) -> HostCopy:
        if self.readers is not None and version.source.folder is not None:
            try:
                return self.readers.load(version.source, allocate, self._memory, version.files)
            except BaseWeightNeeded as need:
                logger.info("adapter %s needs %s: read beside the model", version.ref.name, need)
        return self._loader.load(version.source, allocate, version.files)

    def _allocate(self, version: Version, elements: int) -> torch.Tensor:
        dtype = self._loader.dtype
        nbytes = elements * dtype.itemsize
        with self.changed:
            self._check_size(version, nbytes)
            self._check_budget(nbytes)
            while not self._make_room(nbytes):
                if not version.holds and not version.is_pinned:
                    raise AdapterError("host memory is full of adapters in use; load it again")
                self.changed.wait(RECHECK)
            # Booked before it exists: two threads must not both find the same room.
            self.used += nbytes
            self._booked += nbytes
        buffer = None
        try:
            buffer = self._memory.allocate(elements, dtype)
        finally:
            with self.changed:
                self._booked -= nbytes
                if buffer is None:
                    self.used -= nbytes
                else:
                    version.buffer = buffer
                    self._copies[version] = None
        return buffer

    def _check_budget(self, nbytes: int) -> None:
        """Raise AdapterError if `nbytes` never fit beside what no file could give back."""
        kept = sum(v.nbytes for v in self._copies if v.source.folder is None)
        if nbytes + kept > self.budget:
            rest = f", {kept} of them under adapters loaded from tensors" if kept else ""
            raise AdapterError(
                f"it needs {nbytes} bytes of host memory; all adapters together have "
                f"{self.budget}{rest}; raise lora_host_memory (--lora-host-memory)"
            )

    def _make_room(self, nbytes: int) -> bool:
        for version in list(self._copies):
            if self.used + nbytes <= self.budget:
                break
            if self._may_go(version):
                self._release(version)
        return self.used + nbytes <= self.budget

    def _may_go(self, version: Version) -> bool:
        if version.is_loading or version.is_copying or version.source.folder is None:
            return False
        return version.slot is not None or not version.holds

    def _release(self, version: Version) -> None:
        assert version.buffer is not None
        self.used -= version.nbytes
        del self._copies[version]
        self._memory.free(version.buffer)
        version.buffer = version.host = None

    def _finish(
        self,
        version: Version,
        result: tuple[HostCopy, float] | None,
        error: BaseException | None,
    ) -> None:
        with self.changed:
            version.is_loading = False
            if result is not None:
                self._take(version, *result)
            else:
                assert error is not None
                version.error = f"adapter {version.ref.name!r}: {_reason(error)}"
                self.errors += 1
                self.drop(version)
            self._settled(version)
            self.trim()

    def _take(self, version: Version, host: HostCopy, seconds: float) -> None:
        version.host, version.files = host, host.files
        version.template = version.template or shared(host.template)
        version.rank, version.warnings = host.packed.rank, host.warnings
        if not version.loads:  # not again when it is read again
            for warning in host.warnings:
                logger.warning("adapter %s: %s", version.ref.name, warning)
        version.loads += 1
        version.load_seconds = seconds
        self.loads += 1
        self.load_seconds += seconds


def _readers(loader: AdapterLoader, count: int) -> Readers | None:
    try:
        return Readers(loader, count)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        logger.warning("adapters are read on threads: their reader is of this process: %s", error)
        return None


def _reason(error: BaseException) -> str:
    """What is told of a failed read; what no file can cause is logged whole."""
    if isinstance(error, AdapterError):
        return str(error)
    if isinstance(error, OSError):
        return f"its files cannot be read: {error.strerror or error}; load it again"
    if not isinstance(error, Exception):
        return "the thread that read it was ended; load it again"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # PyTorch's
        cause = (str(error) or "MemoryError").splitlines()[0]
        return f"no host memory for it ({cause}); lower lora_host_memory (--lora-host-memory)"
    logger.error("an adapter met an unexpected error", exc_info=error)
    return f"{type(error).__name__}: {error}; this is a fault of vexpert"
