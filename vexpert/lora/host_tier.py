"""The middle tier: packed adapters in host memory, filled by loader threads.

Which copies leave when it is full is decided in `vexpert.lora.eviction`.
"""

import contextlib
import functools
import pickle
import time
from collections.abc import Callable, Iterator
from threading import Condition, RLock

import torch

from vexpert.config import first_line
from vexpert.errors import AdapterError
from vexpert.log import get_logger
from vexpert.lora.adapter_state import State
from vexpert.lora.adapter_version import Version
from vexpert.lora.chat_template import ChatTemplate
from vexpert.lora.eviction import HostPolicy, may_wait_for_host
from vexpert.lora.host_memory import HostMemory
from vexpert.lora.loading import THREADS, LoaderPool
from vexpert.lora.pack import Allocate
from vexpert.lora.readers import Readers
from vexpert.lora.source import AdapterLoader, BaseWeightNeeded, Fingerprint, HostCopy, changed
from vexpert.lora.weights_file import Book

logger = get_logger(__name__)

RECHECK = 1.0  # seconds between looks at whether a version that waits for memory is still wanted
LOOK = 0.02  # seconds between looks at whether reads go on, where nobody steps meanwhile


class UnwantedError(AdapterError):
    """Nobody wants any more what waits to be read."""


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
        self.policy = HostPolicy(budget, max_copies)
        self._check_size, self._settled = check_size, settled
        self._lock = lock
        self.changed = Condition(lock)  # a read ended, or memory may be free
        self._threads = LoaderPool(THREADS if self.readers is None else readers)
        # Reads that wait for room in memory, each with whether it would find some by now.
        self._waiting: dict[Version, Callable[[], bool]] = {}
        self.loads = self.errors = 0
        self.load_seconds = 0.0

    # ---- under the lock

    def ensure(self, version: Version) -> None:
        """Begin to read `version`, if it is in its files alone."""
        if version.life.state is State.REGISTERED:
            version.life.begin_read()
            self._threads.submit(
                functools.partial(self._read, version),
                functools.partial(self._finish, version),
                owner=version,
            )

    def drop(self, version: Version) -> None:
        """Give back the memory of `version`, if it has any and is not being read."""
        if version in self.policy and version.life.state is not State.LOADING:
            self._release(version)

    def trim(self) -> None:
        """Drop what may go while there are too many copies; wake whoever waits for memory."""
        for version in self.policy.surplus():
            self._release(version)
        self.changed.notify_all()

    def loading(self) -> int:
        """Versions that are read or wait for a thread."""
        waiting, busy, _ = self._threads.counts()
        return waiting + busy

    # ---- not under the lock

    def tend(self) -> None:
        """Replace loader threads that are stuck. Cheap."""
        self._threads.tend()

    def warm(self) -> None:
        """A load may come: have a process ready for it, if the system has room for one now."""
        if self.readers is not None:
            try:
                self.readers.warm()
            except OSError as error:  # of files or processes there are too many: a load says so
                logger.warning("no process to read adapters with can be started yet: %s", error)

    def wait(self, version: Version, steps_go_on: Callable[[], bool]) -> None:
        """Until the read of `version` has ended, one way or the other.

        Unless `steps_go_on` meanwhile, it fails where only they would make room for it. Asked at
        each look: another thread may begin to step.
        """
        with self._lock:  # a Condition's own steps to it are Python's: Ctrl-C there keeps it
            while not self.changed.wait_for(
                lambda: version.life.state is not State.LOADING, RECHECK if steps_go_on() else LOOK
            ):
                self._threads.tend()  # where no step does: nobody else may be served now
                if not steps_go_on() and self._needs_steps():
                    self._break_off(version)

    def _needs_steps(self) -> bool:
        """Whether reads wait for room, and nothing that goes on without steps will make any.

        A read that will be told of room, or that nobody wants any more, goes on. So does one that
        hangs in its files, as far as anybody can see.
        """
        return (
            bool(self._waiting)
            and self._threads.rests(but_for=len(self._waiting))
            and self.policy.is_settled()
            and all(may_wait_for_host(version) for version in self._waiting)
            and not any(finds_room() for finds_room in self._waiting.values())
        )

    def _break_off(self, version: Version) -> None:
        """Have the read of `version`, which waits for room or for a thread, end with an error.

        One that waits for a thread might fit: its bytes are not known before it is read.
        """
        if self._waiting.pop(version, None) is not None:
            self.changed.notify_all()
        elif self._threads.withdraw(version):
            self._finish(version, None, self._full())

    def _full(self) -> AdapterError:
        return AdapterError(
            f"host memory ({self.policy.budget} bytes) is full of adapters that wait for the "
            "device: step the engine, then load it again, or raise lora_host_memory "
            "(--lora-host-memory)"
        )

    # ---- loader threads

    def _read(self, version: Version) -> tuple[HostCopy, float]:
        began = time.perf_counter()
        allocate = functools.partial(self._allocate, version)
        return self._load(version, allocate), time.perf_counter() - began

    def read_template(self, version: Version) -> tuple[ChatTemplate, Fingerprint]:
        """The chat template of a version that nobody has read, and the state of its files."""
        return self._loader.read_template(version.source, version.life.files)

    def _load(self, version: Version, allocate: Allocate) -> HostCopy:
        files = version.life.files
        if self.readers is not None and version.source.folder is not None:
            try:
                with self._reading(version) as book:
                    return self.readers.load(version.source, allocate, self._memory, files, book)
            except BaseWeightNeeded as need:
                logger.info("adapter %s needs %s: read beside the model", version.ref.name, need)
        with self._reading(version) as book:
            return self._loader.load(version.source, allocate, files, book)

    @contextlib.contextmanager
    def _reading(self, version: Version) -> Iterator[Book]:
        """What a load is to call before it reads a file; its bytes are counted to the block's end.

        The first file waits for room. Others of the same load do not: two loads that have one file
        each would wait for one another.
        """
        held = 0

        def book(nbytes: int) -> None:
            nonlocal held
            with self.changed:
                self._check_budget(version, held + nbytes, " while its files are read")
                self._make_room(nbytes)
                while not held and not self.policy.may_read(nbytes):
                    self._wait_for_room(version, lambda: self.policy.could_read(nbytes))
                    self._make_room(nbytes)
                self.policy.files += nbytes
            held += nbytes

        try:
            yield book
        finally:
            with self.changed:
                self.policy.files -= held
                self.changed.notify_all()

    def _allocate(self, version: Version, elements: int) -> torch.Tensor:
        dtype = self._loader.dtype
        nbytes = elements * dtype.itemsize
        with self.changed:
            self._check_size(version, nbytes)
            self._check_budget(version, nbytes)
            while not self._make_room(nbytes):
                self._wait_for_room(version, lambda: self.policy.could_fit(nbytes))
            self.policy.book(nbytes)
        buffer = None
        try:
            buffer = self._memory.allocate(elements, dtype)
        finally:
            with self.changed:
                if buffer is None:
                    self.policy.unbook(nbytes)
                else:
                    version.life.buffer = buffer
                    self.policy.enter(version)
        return buffer

    def _wait_for_room(self, version: Version, finds_room: Callable[[], bool]) -> None:
        """For a moment. UnwantedError once nobody wants it; AdapterError if it was broken off."""
        if not may_wait_for_host(version):
            raise UnwantedError("host memory is full of adapters in use; load it again")
        self._waiting[version] = finds_room
        try:
            self.changed.wait(RECHECK)
        finally:
            is_broken_off = self._waiting.pop(version, None) is None
        if is_broken_off:
            raise self._full()

    def _check_budget(self, version: Version, nbytes: int, when: str = "") -> None:
        """Raise AdapterError if `nbytes` never fit beside what no file could give back.

        A load, which may come from who steps the engine, does not wait for others' requests either.
        """
        kept = self.policy.lasting_bytes(but_leaving=version.life.is_served)
        budget = self.policy.budget
        if nbytes + kept > budget:
            rest = f", {kept} of them under adapters loaded from tensors" if kept else ""
            raise AdapterError(
                f"it needs {nbytes} bytes of host memory{when}; all adapters together have "
                f"{budget}{rest}; raise lora_host_memory (--lora-host-memory)"
            )

    def _make_room(self, nbytes: int) -> bool:
        for version in self.policy.victims(nbytes):
            self._release(version)
        return self.policy.fits(nbytes)

    def _release(self, version: Version) -> None:
        self.policy.leave(version)
        self._memory.free(version.life.leave_host())

    def _finish(
        self,
        version: Version,
        result: tuple[HostCopy, float] | None,
        error: BaseException | None,
    ) -> None:
        with self._lock:  # on the caller's thread too, where a load is broken off
            if result is not None and version.life.files not in (None, result[0].files):
                result, error = None, changed(version.source)  # its template was read meanwhile
            if result is not None:
                self._take(version, *result)
            elif isinstance(error, UnwantedError) and version.life.is_served:
                version.life.give_up_read()  # its requests went away: the next one has it read
                if version.life.holds:
                    self.ensure(version)
            else:
                assert error is not None
                reason = f"adapter {version.ref.name!r}: {_reason(error)}"
                version.life.fail(reason)
                if version.life.is_served:  # else who loads it is told
                    logger.warning("%s", reason)
                self.errors += 1
                self.drop(version)
            self._settled(version)
            self.trim()

    def _take(self, version: Version, host: HostCopy, seconds: float) -> None:
        if not version.life.history.loads:  # not again when it is read again
            for warning in host.warnings:
                logger.warning("adapter %s: %s", version.ref.name, warning)
        version.life.end_read(host, seconds)
        version.source.forget_tensors()
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
        cause = first_line(error)
        return f"no host memory for it ({cause}); lower lora_host_memory (--lora-host-memory)"
    logger.error("an adapter met an unexpected error", exc_info=error)
    return f"{type(error).__name__}: {error}; this is a fault of vexpert"
