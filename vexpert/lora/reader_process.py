"""A process that reads, checks and packs adapters into shared memory, one after another.

The engine's process starts it (`vexpert.lora.readers`), so that the thousands of small calls of a
load never hold the interpreter's lock of the thread that decodes. It ends when its standard input
does, which is when that process is gone. It never touches a GPU.
"""

import ctypes
import gc
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from vexpert.lora.channel import Channel, Failed, Job, Packed
    from vexpert.lora.host_memory import Room
    from vexpert.lora.source import AdapterLoader

NICE = 5  # decoding comes first where cores are few
OOM_SCORE = "500"  # of 1000: who is ended first when memory runs out, before the engine
KEEP_SECONDS = 10.0  # without a job, after which memory for files is given back

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of <malloc.h>


def main() -> None:
    """Serve the jobs that come over the socket named by the first argument, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(NICE)
    _offer_to_oom_killer()
    memory = _FileMemory()
    import torch

    from vexpert.lora.channel import Channel

    torch.set_num_threads(1)  # work is divided by vexpert.lora.parallel
    connected = socket.socket(fileno=int(sys.argv[1]))
    channel = Channel(connected)
    try:
        server = _Server(channel.receive()[0], channel)
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection would be in the middle of a load
        while True:
            if not select.select([connected], [], [], KEEP_SECONDS)[0]:
                memory.give_back()
            server.serve(channel.receive()[0])
            gc.collect()
    except (EOFError, ConnectionError):
        return


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)


def _offer_to_oom_killer() -> None:
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(OOM_SCORE)
    except OSError:  # no such file outside Linux, or a sandbox forbids it: nothing depends on it
        return


class _FileMemory:
    """Has malloc keep what files were read to: 70,000 new pages cost as much as reading them."""

    def __init__(self) -> None:
        self._libc: Any = ctypes.CDLL(None)
        self._is_glibc = hasattr(self._libc, "mallopt") and hasattr(self._libc, "malloc_trim")
        if self._is_glibc:
            self._libc.mallopt(_M_MMAP_MAX, 0)
            self._libc.mallopt(_M_TRIM_THRESHOLD, -1)

    def give_back(self) -> None:
        """Everything that is free, to the system."""
        if self._is_glibc:
            self._libc.malloc_trim(0)


class _Refused(Exception):
    """The engine's process gave no room; it knows why."""


class _Server:
    """Does one job after another."""

    def __init__(self, loader: "AdapterLoader", channel: "Channel") -> None:
        self._loader, self._channel = loader, channel
        self._mapped: dict[int, mmap.mmap] = {}  # slabs by number

    def serve(self, job: "Job") -> None:
        """Do it and send the answer, unless the other side had no room."""
        for gone in self._mapped.keys() - job.slabs:
            del self._mapped[gone]
        try:
            self._channel.send(self._answer(job))
        except _Refused:
            return

    def _answer(self, job: "Job") -> "Packed | Failed":
        from vexpert.lora.channel import Failed, Packed

        try:
            host = self._loader.load(job.source, self._allocate, job.expected, self._book)
        except (_Refused, EOFError, ConnectionError):
            raise
        except Exception as error:  # noqa: BLE001  (the other process hears of it, whatever it is)
            return Failed(_portable(error))
        packed = host.packed
        parts = packed.entries, packed.cells, packed.rank, packed.extras
        return Packed(parts, host.files, host.warnings, host.template)

    def _book(self, nbytes: int) -> None:
        from vexpert.lora.channel import Size

        self._channel.send(Size(nbytes))
        if not self._channel.receive()[0]:
            raise _Refused

    def _allocate(self, elements: int) -> "torch.Tensor":
        from vexpert.lora.channel import Need

        self._channel.send(Need(elements))
        room, descriptor = self._channel.receive()
        if room is None:
            raise _Refused
        assert descriptor is not None
        try:
            return self._map(descriptor, room, elements)
        finally:
            os.close(descriptor)

    def _map(self, descriptor: int, room: "Room", elements: int) -> "torch.Tensor":
        import torch

        dtype = self._loader.dtype
        if room.slab is not None:
            if room.slab not in self._mapped:
                self._mapped[room.slab] = mmap.mmap(descriptor, room.nbytes)
            mapping, first = self._mapped[room.slab], 0
        else:
            first = room.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            end = room.start + elements * dtype.itemsize
            mapping = mmap.mmap(descriptor, end - first, offset=first)
        return torch.frombuffer(mapping, dtype=dtype, count=elements, offset=room.start - first)


def _portable(error: Exception) -> Exception:
    """The error as the other process can have it; what no file can cause, with its traceback."""
    from vexpert.errors import AdapterError

    if isinstance(error, AdapterError):
        return AdapterError(str(error))
    lines = "".join(traceback.format_tb(error.__traceback__))
    error.add_note(f"in the process that reads adapters:\n{lines}")
    try:
        copy: Any = pickle.loads(pickle.dumps(error))
    except (pickle.PicklingError, TypeError, AttributeError):
        return RuntimeError(f"{type(error).__name__}: {error}")
    return copy if isinstance(copy, type(error)) else error
