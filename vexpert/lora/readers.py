"""Processes that read adapters for this one, and what is done when one of them ends.

| what happens | what comes of it |
|---|---|
| a load | an idle reader, or a new one, reads, checks and packs into `HostMemory`'s shared memory |
| an adapter is refused | the same error, raised here |
| a reader ends in the middle, by the system or a person | that adapter is errored with the reason |
| an idle reader ends | the next load starts another |
| this process ends, in whatever way | so do its readers: their standard input is closed |
| this process forks | the copy forgets them, and starts its own |
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref

import torch

from vexpert.errors import AdapterError
from vexpert.lora.channel import Channel, Failed, Job, Need, Packed
from vexpert.lora.host_memory import HostMemory
from vexpert.lora.pack import Allocate, PackedAdapter
from vexpert.lora.source import AdapterLoader, Fingerprint, HostCopy, Source

CODE = "import sys; sys.path[:] = {path!r}; from vexpert.lora.reader_process import main; main()"
END_SECONDS = 10.0  # that a killed reader has to end; one in a dead file system may not


class Reader:
    """One process, for one load at a time."""

    def __init__(self, loader: bytes) -> None:
        """`loader`: an AdapterLoader, pickled. Returns before the process is ready."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", CODE.format(path=_search_path()), str(theirs.fileno())],
                stdin=subprocess.PIPE,  # never written to: closed when this process ends
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                process_group=0,
            )
        self._channel = Channel(ours)
        self._loader: bytes | None = loader
        self.is_free = True  # between two loads; False for ever if one was broken off

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def load(
        self, source: Source, allocate: Allocate, memory: HostMemory, expected: Fingerprint | None
    ) -> HostCopy:
        """As `AdapterLoader.load`; `allocate` must take from `memory`, which is shared."""
        assert self.is_free
        self.is_free = False
        try:
            return self._load(Job(source, expected, memory.lasting()), allocate, memory)
        except (EOFError, ConnectionError):
            raise AdapterError(f"the process that read it {self._end()}; load it again") from None

    def _load(self, job: Job, allocate: Allocate, memory: HostMemory) -> HostCopy:
        if self._loader is not None:
            self._channel.send_pickled(self._loader)
            self._loader = None
        self._channel.send(job)
        answer = self._channel.receive()[0]
        buffer = None
        if isinstance(answer, Need):
            buffer = self._place(answer.elements, allocate, memory)
            answer = self._channel.receive()[0]
        self.is_free = True
        if isinstance(answer, Failed):
            raise answer.error
        assert isinstance(answer, Packed)
        assert buffer is not None
        packed = PackedAdapter(buffer, *answer.packed)
        return HostCopy(packed, answer.files, answer.warnings, answer.template)

    def _place(self, elements: int, allocate: Allocate, memory: HostMemory) -> torch.Tensor:
        try:
            buffer = allocate(elements)
            descriptor, room = memory.locate(buffer)
        except BaseException:
            self._channel.send(None)
            self.is_free = True
            raise
        self._channel.send(room, descriptor)
        return buffer

    def _end(self) -> str:
        """How the process ended, as a clause."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        status = self._process.returncode
        self.close()
        if status is None:
            return "does not answer"
        if status < 0:
            return f"was ended by signal {-status} ({signal.strsignal(-status)})"
        return f"ended with status {status}"

    def kill(self) -> None:
        """Have the process end, and do not wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._channel.close()
        self._process.kill()

    def close(self) -> None:
        """End the process."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)

    def abandon(self) -> None:
        """Forget a process that belongs to the parent of this one, and leave it alone."""
        assert self._process.stdin is not None
        self._process.returncode = 0
        self._process.stdin.close()
        self._channel.close()


def _search_path() -> list[str]:
    return [os.getcwd() if place == "" else place for place in sys.path]


class Readers:
    """As many readers as there are loads at once; at most `keep` of them stay when idle."""

    def __init__(self, loader: AdapterLoader, keep: int) -> None:
        """Raises pickle.PicklingError, TypeError or AttributeError for a loader of this process."""
        self._loader = pickle.dumps(loader.portable())
        self._keep = keep
        self._lock = threading.Lock()
        self._idle: list[Reader] = []
        self._all: set[Reader] = set()
        self._close = weakref.finalize(self, _close_all, self._all)
        _pools.add(self)

    def load(
        self,
        source: Source,
        allocate: Allocate,
        memory: HostMemory,
        expected: Fingerprint | None = None,
    ) -> HostCopy:
        """As `AdapterLoader.load`, in another process.

        BaseWeightNeeded: only a process that has the model can read this one.
        """
        reader = self._take()
        try:
            return reader.load(source, allocate, memory, expected)
        finally:
            self._give_back(reader)

    def warm(self) -> None:
        """Start a reader, if there is none, for a load that will come."""
        with self._lock:
            if not self._all:
                self._idle.append(self._start())

    def close(self) -> None:
        """End all processes, as happens by itself when nobody needs this any more."""
        self._close()

    def pids(self) -> list[int]:
        """Of the processes that live now."""
        with self._lock:
            return [reader.pid for reader in self._all if reader.is_alive()]

    def _start(self) -> Reader:
        reader = Reader(self._loader)
        self._all.add(reader)
        return reader

    def _take(self) -> Reader:
        with self._lock:
            while self._idle:
                reader = self._idle.pop()
                if reader.is_alive():
                    return reader
                self._all.discard(reader)
                reader.close()
            return self._start()

    def _give_back(self, reader: Reader) -> None:
        with self._lock:
            if reader.is_free and len(self._idle) < self._keep and reader in self._all:
                self._idle.append(reader)
                return
            self._all.discard(reader)
        reader.close()  # before anybody uses the memory that it may be writing to

    def forget(self) -> None:
        """In a copy of the process that started them."""
        self._lock = threading.Lock()
        for reader in self._all:
            reader.abandon()
        self._all.clear()
        self._idle.clear()


def _close_all(readers: set[Reader]) -> None:
    closing = list(readers)
    for reader in closing:
        reader.kill()
    for reader in closing:
        reader.close()


_pools: "weakref.WeakSet[Readers]" = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_pools):
        pool.forget()


os.register_at_fork(after_in_child=_forget_all)
