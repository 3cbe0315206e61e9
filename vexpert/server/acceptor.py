"""Accepts connections while there is room for them: the limit of open files is not met.

When every place is taken, connections that wait for a request are closed, the longest wait first.
Where all others have a request that runs, a few more are let in, on which probes are answered and
all else gets 503; the rest waits in the system's queue.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Collection

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from vexpert.log import get_logger
from vexpert.server.connections import Connections
from vexpert.server.errors import ApiError, error_response
from vexpert.server.middleware import OPEN_PATHS

logger = get_logger(__name__)
QUEUE = 2048  # connections that wait in the system's queue; it may grant fewer
SPARE = 16  # connections beyond the most, for probes and for saying no
MOST_CLOSED = 32  # at once
RETRY_SECONDS = 0.1
QUIET_SECONDS = 60.0  # between two lines of the log that say the same


class Acceptor:
    """Accepts from one bound socket until it is cancelled."""

    def __init__(
        self,
        bound: socket.socket,
        make: Callable[[], H11Protocol],
        open_now: Collection[object],
        connections: Connections,
        most: int,
    ) -> None:
        """`make`: the protocol of a new connection. `open_now`: uvicorn's set of them."""
        self._bound, self._make = bound, make
        self._open, self._connections, self._most = open_now, connections, most
        self._told: dict[str, float] = {}  # what the log says, and when it was said last

    async def run(self) -> None:
        """Listen, and accept one connection after the other."""
        self._bound.setblocking(False)
        self._bound.listen(QUEUE)
        while True:
            while len(self._open) >= self._most + SPARE and not self._make_room():
                await asyncio.sleep(RETRY_SECONDS)
            try:
                sock = await self._accept()
            except OSError as error:  # other parts of this process have taken the files, or memory
                self._tell(f"a connection cannot be accepted: {error.strerror or error}")
                await asyncio.sleep(RETRY_SECONDS)
                continue
            await self._connect(sock)

    async def _accept(self) -> socket.socket:
        sock, _ = await asyncio.get_running_loop().sock_accept(self._bound)
        return sock

    async def _connect(self, sock: socket.socket) -> None:
        protocol = self._make()
        if len(self._open) >= self._most and not self._make_room():
            protocol.app = _Refusing(protocol.app)
        with contextlib.suppress(OSError):  # the client is gone
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, sock)

    def _make_room(self) -> bool:
        """Close some connections that wait for a request; whether there were any."""
        self._tell(
            f"{self._most} connections are open, as many as may be (max_connections): those that "
            "wait for a request are closed, and where none does, new ones get 503"
        )
        return self._connections.close_idle(min(MOST_CLOSED, max(1, self._most // 8)))

    def _tell(self, text: str) -> None:
        now = time.monotonic()
        if now - self._told.get(text, -QUIET_SECONDS) >= QUIET_SECONDS:
            logger.warning("%s", text)
            self._told = {each: told for each, told in self._told.items() if now - told < 3600}
            self._told[text] = now


class _Refusing:
    """The app of a connection beyond the most: it is closed after one answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, closing)
            return
        message = "the server has as many connections as it may have; try again later"
        error = ApiError(message, 503, code="too_many_connections", retry_after=1)
        await error_response(error)(scope, receive, closing)
