"""The server's end of the socket to its engine: calls with their replies, and what else comes."""

import asyncio
import itertools
import socket
from collections.abc import Callable
from typing import Any, cast

from vexpert.server.progress import EngineFailedError
from vexpert.server.wire import Message, new_unpacker, pack, read_error


class Link(asyncio.Protocol):
    """One connection, for coroutines of one event loop."""

    def __init__(self, on_step: Callable[[list[Any]], None], on_failed: Callable[[], None]) -> None:
        """`on_step` gets the entries of each step; `on_failed`: the engine says that it ends."""
        self.lost = asyncio.Event()  # nothing more will come
        self.last_words: str | None = None  # the reason that the engine gave for its end
        self.beats = 0  # answers to "beat"
        self.last_beat = (0, True)  # turns of the engine's thread, whether it has nothing to do
        self._on_step, self._on_failed = on_step, on_failed
        self._loop = asyncio.get_running_loop()
        self._unpacker = new_unpacker()
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._unsent: list[bytes] = []
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def open(cls, sock: socket.socket, *callbacks: Callable[..., None]) -> "Link":
        """A link over a connected socket, which it owns from now on."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(lambda: cls(*callbacks), sock=sock)
        return link

    def post(self, *message: Any) -> None:
        """Send a message; those of one turn of the event loop go together."""
        self._unsent.append(pack(*message))
        if len(self._unsent) == 1:
            self._loop.call_soon(self._flush)

    def call(self, kind: str, *rest: Any) -> "asyncio.Future[Any]":
        """Send a message that has a reply. The future raises what the engine raised."""
        number, future = next(self._numbers), self._loop.create_future()
        self._calls[number] = future
        future.add_done_callback(lambda _: self._calls.pop(number, None))  # also if cancelled
        self.post(kind, number, *rest)
        return future

    def fail(self, failure: EngineFailedError) -> None:
        """Tell `failure` to all who wait for a reply."""
        for future in self._calls.values():
            if not future.done():
                future.set_exception(failure)
        self._calls.clear()

    def close(self) -> None:
        """Send what is left and close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        if self._unsent and self._transport is not None:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's: what they are is told, not looked at.
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.lost.set()

    def data_received(self, data: bytes) -> None:
        self._unpacker.feed(data)
        for message in self._unpacker:
            self._take(message)

    def _take(self, message: Message) -> None:
        match message:
            case ["step", entries]:
                self._on_step(entries)
            case ["reply", number, error, value]:
                future = self._calls.pop(number, None)
                if future is None or future.done():
                    return
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(read_error(error))
            case ["beat", turns, is_idle]:
                self.beats += 1
                self.last_beat = turns, is_idle
            case ["failed", reason]:
                self.last_words = reason
                self._on_failed()
            case _:
                raise AssertionError(f"an unknown message of the engine: {message[0]!r}")
