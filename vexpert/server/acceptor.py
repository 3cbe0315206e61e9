"""Accepts connections while there is room for them: the limit of open files is not met.

When every place is taken, connections that wait for a request are closed, the longest wait first.
Where all others have a request that runs, a few more are let in. Probes are answered there, and a
few who read the metrics; some of the others wait a moment for a place, and the rest gets 503. What
waits beyond them is in the system's queue.

Places are for whole requests first: one whose body is not there waits behind those, and not for
long. So who sends halves of bodies again and again gets no place that another waits for.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Collection

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vexpert.log import get_logger
from vexpert.server.connections import Connections
from vexpert.server.errors import ApiError, error_response
from vexpert.server.http_protocol import CountingProtocol
from vexpert.server.keys import METRICS
from vexpert.server.middleware import OPEN_PATHS

logger = get_logger(__name__)
QUEUE = 2048  # connections that wait in the system's queue; it may grant fewer
SPARE = 32  # connections beyond the most, for probes, for a short wait and for saying no
MOST_WAITING = 16  # of them
MOST_SCRAPING = 4  # of them: such an answer may be held up, by the engine or by its client
WAIT_SECONDS = 6.0  # for a place; longer than a slow body may keep it, connections.BODY_SECONDS
WHOLE_SECONDS = 1.5  # for the rest of a request, before; curl waits a second for 100 Continue
CROWDED_SECONDS = 0.1  # the same where many are there, lest probes wait in the system's queue
LOOK_SECONDS = 0.02
ROOM_SECONDS = 0.5
MOST_CLOSED = 32  # at once
RETRY_SECONDS = 0.1
QUIET_SECONDS = 60.0  # between two lines of the log that say the same


class Acceptor:
    """Accepts from one bound socket until it is cancelled."""

    def __init__(
        self,
        bound: socket.socket,
        make: Callable[[], CountingProtocol],
        open_now: Collection[object],
        connections: Connections,
        most: int,
    ) -> None:
        """`make`: the protocol of a new connection. `open_now`: uvicorn's set of them."""
        self._bound, self._make = bound, make
        self._open, self._connections, self._most = open_now, connections, most
        self._extra: set[object] = set()  # of those open: beyond the most
        self._scraping: set[object] = set()  # of `_extra`
        self._waiting = 0
        self._next_room = 0.0  # when those that wait may make room
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
        protocol.app = _Placed(protocol.app, self, protocol)
        self._extra.intersection_update(self._open)
        # While others wait, none comes before them.
        if len(self._open) >= self._most and (self._waiting or not self._make_room()):
            self._extra.add(protocol)
        with contextlib.suppress(OSError):  # the client is gone
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, sock)

    def is_extra(self, protocol: object) -> bool:
        """Whether a connection is one beyond the most."""
        return protocol in self._extra

    def is_awaited(self) -> bool:
        """Whether somebody waits for the place of a connection that is answered."""
        return self._waiting > 0

    def may_scrape(self, protocol: object) -> bool:
        """Whether a connection beyond the most may read the metrics."""
        self._scraping.intersection_update(self._open)
        if len(self._scraping) >= MOST_SCRAPING:
            return False
        self._scraping.add(protocol)
        return True

    async def wait_for_place(self, protocol: CountingProtocol) -> bool:
        """Until a connection is none beyond the most any more; False: nobody leaves.

        Or its request does not come.
        """
        if await self._takes_free_place(protocol):
            return True
        if self._waiting >= MOST_WAITING or not protocol.has_whole_request:
            return False
        self._waiting += 1
        try:
            for _ in range(round(WAIT_SECONDS / LOOK_SECONDS)):
                self._make_room_now_and_then()
                await asyncio.sleep(LOOK_SECONDS)
                if protocol not in self._open or self._take_place(protocol):
                    break
        finally:
            self._waiting -= 1
        return protocol in self._open and protocol not in self._extra

    async def _takes_free_place(self, protocol: CountingProtocol) -> bool:
        """Whether there is one that nobody waits for, until the request is whole, or late."""
        for look in range(round(WHOLE_SECONDS / LOOK_SECONDS)):
            if not self._waiting and self._take_place(protocol):
                return True
            is_crowded = len(self._extra) > SPARE / 2
            is_late = is_crowded and look * LOOK_SECONDS >= CROWDED_SECONDS
            if is_late or protocol.has_whole_request or protocol not in self._open:
                break
            await asyncio.sleep(LOOK_SECONDS)
        return False

    def _take_place(self, protocol: object) -> bool:
        # One that is just accepted is not open yet: none is forgotten here.
        extra = sum(each in self._open for each in self._extra)
        if len(self._open) - extra >= self._most:
            return False
        self._extra.discard(protocol)
        return True

    def _make_room_now_and_then(self) -> None:
        """For those that wait: a look at every connection is not for each of them."""
        now = time.monotonic()
        if now >= self._next_room:
            self._next_room = now + ROOM_SECONDS
            self._make_room()

    def _make_room(self) -> bool:
        """Close some connections that wait for a request; whether there were any."""
        self._tell(
            f"{self._most} connections are open, as many as may be (max_connections): those that "
            "wait for a request are closed, and where none does, new ones wait, or get 503"
        )
        most = max(1, self._most // 8, self._waiting)
        return self._connections.close_idle(min(MOST_CLOSED, most))

    def _tell(self, text: str) -> None:
        now = time.monotonic()
        if now - self._told.get(text, -QUIET_SECONDS) >= QUIET_SECONDS:
            logger.warning("%s", text)
            self._told = {each: told for each, told in self._told.items() if now - told < 3600}
            self._told[text] = now


class _Placed:
    """The app of one connection: one beyond the most is closed after an answer without a place.

    While others wait, so is every one that is answered: they would wait for its next request.
    """

    def __init__(self, app: ASGIApp, acceptor: Acceptor, protocol: CountingProtocol) -> None:
        self.app, self.acceptor, self.protocol = app, acceptor, protocol

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def closing(message: Message) -> None:
            is_extra = self.acceptor.is_extra(self.protocol)
            if message["type"] == "http.response.start" and (
                is_extra or self.acceptor.is_awaited()
            ):
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        app = self.app if await self._is_admitted(scope["path"]) else _refuse
        await app(scope, receive, closing)

    async def _is_admitted(self, path: str) -> bool:
        if path in OPEN_PATHS or not self.acceptor.is_extra(self.protocol):
            return True
        if path == METRICS and self.acceptor.may_scrape(self.protocol):
            return True
        return await self.acceptor.wait_for_place(self.protocol)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    message = "the server has as many connections as it may have; try again later"
    error = ApiError(message, 503, code="too_many_connections", retry_after=1)
    await error_response(error)(scope, receive, send)
