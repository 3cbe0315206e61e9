"""Messages between the engine's process and a process that reads adapters."""

import os
import pickle
import socket
import struct
from typing import Any, NamedTuple

from vexpert.lora.cells import Cells
from vexpert.lora.chat_template import ChatTemplate
from vexpert.lora.pack import SiteEntry
from vexpert.lora.site_extras import ExtraEntry
from vexpert.lora.source import Fingerprint, Source

_HEAD = struct.Struct("<Q")  # bytes of the pickle that follows


class Job(NamedTuple):
    """To the reader: read this."""

    source: Source
    expected: Fingerprint | None
    slabs: frozenset[int]  # that still exist, of those that may be kept mapped


class Need(NamedTuple):
    """From the reader: where to pack so many elements?

    The answer is a Room with the descriptor of its slab, or None: there is none, stop.
    """

    elements: int


class Size(NamedTuple):
    """From the reader: may a file take so many bytes of memory? The answer is True, or stop."""

    nbytes: int


class Packed(NamedTuple):
    """From the reader: the room holds the adapter."""

    packed: tuple[tuple[SiteEntry, ...], Cells, int, tuple[ExtraEntry, ...]]  # but for the buffer
    files: Fingerprint
    warnings: tuple[str, ...]
    template: ChatTemplate


class Failed(NamedTuple):
    """From the reader: this is why there is no adapter."""

    error: BaseException


class Channel:
    """Pickled messages over a stream socket, each with at most one file descriptor.

    OSError or EOFError when the other end is gone. Both ends are vexpert's own: nothing that comes
    from an adapter's files is unpickled.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, message: Any, descriptor: int | None = None) -> None:
        """Send `message`, and a copy of `descriptor`."""
        self.send_pickled(pickle.dumps(message), descriptor)

    def send_pickled(self, data: bytes, descriptor: int | None = None) -> None:
        """Send a message that is pickled already."""
        head = _HEAD.pack(len(data))
        if descriptor is not None:
            assert socket.send_fds(self._socket, [head], [descriptor]) == len(head)
            head = b""
        self._socket.sendall(head + data)

    def receive(self) -> tuple[Any, int | None]:
        """The next message, and the descriptor that came with it, which the caller closes."""
        head, descriptors, _, _ = socket.recv_fds(
            self._socket, _HEAD.size, 1, socket.MSG_CMSG_CLOEXEC
        )
        descriptor = descriptors[0] if descriptors else None
        try:
            if not head:
                raise EOFError("the other end is gone")
            head += self._exactly(_HEAD.size - len(head))
            return pickle.loads(self._exactly(_HEAD.unpack(head)[0])), descriptor
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            raise

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            done = self._socket.recv_into(view)
            if done == 0:
                raise EOFError("the other end is gone")
            view = view[done:]
        return bytes(data)

    def close(self) -> None:
        self._socket.close()
