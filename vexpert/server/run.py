"""Running the app on a socket: say when it answers, end cleanly on a signal."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from vexpert.log import get_logger
from vexpert.server.acceptor import Acceptor
from vexpert.server.connections import Connections
from vexpert.server.http_protocol import CountingProtocol
from vexpert.server.listen import most_connections
from vexpert.server.progress import ShuttingDownError
from vexpert.server.service import Service

CLOSE_SECONDS = 5  # for connections to close once their requests have ended
HURRIED_SECONDS = 0.5  # the same after a second signal
LAST_RESORT_SECONDS = 3.0  # after a second signal; then the process ends as it is
POLL_SECONDS = 0.02
LATE_SECONDS = 0.2  # for requests on their way at the signal: 503, and no reset connection
LATE_TURNS = 10  # of the event loop, at least, in that time: it may have been held up
KEEP_ALIVE_SECONDS = 25  # for a next request; longer than the 5 of clients, which must close first
logger = get_logger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """uvicorn's server, which calls `on_ready` once it answers, and which a signal ends with 0.

    After the signal new requests get 503 while accepted ones go on, up to the deadline; what then
    still runs gets an error. A second signal ends everything at once.
    """

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None], service: Service
    ) -> None:
        super().__init__(config)
        self._service = service
        self._drain: asyncio.Task[None] | None = None
        self._is_hurried = False
        self._connections = Connections(
            self.server_state.connections, service.options.write_timeout
        )
        self._most_connections = most_connections(service.options.max_connections)
        self._watching: asyncio.Task[None] | None = None
        self._accepting: asyncio.Task[None] | None = None
        self.last_resort = threading.Timer(LAST_RESORT_SECONDS, self._end_now)
        self.last_resort.daemon = True
        self._on_ready = on_ready
        self._announcing: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then ask the server's own health page in a task beside it."""
        self._loop = asyncio.get_running_loop()
        self._watching = asyncio.ensure_future(self._connections.watch())
        await super().startup([])  # all but listening
        if self.started and sockets:
            self._accepting = asyncio.ensure_future(self._acceptor(sockets[0]).run())
            self._announcing = asyncio.ensure_future(self._announce(sockets[0]))

    def _acceptor(self, bound: socket.socket) -> Acceptor:
        def make() -> CountingProtocol:
            return CountingProtocol(self.config, self.server_state, self.lifespan.state)

        present = self.server_state.connections
        return Acceptor(bound, make, present, self._connections, self._most_connections)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, then end what is there."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    async def _announce(self, bound: socket.socket) -> None:
        while not await _answers(bound):
            await asyncio.sleep(0.05)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; called by Python's signal handling."""
        if self._service.is_draining:
            self._hurry()
            return
        self._service.is_draining = True
        if not self.started:
            self.should_exit = True
            return
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _hurry(self) -> None:
        if self._is_hurried:
            return
        self._is_hurried = True
        self.last_resort.start()
        self._service.engine.hurry()
        if not self.started:
            return
        abort = self._connections.abort_all
        self._loop.call_soon_threadsafe(self._loop.call_later, HURRIED_SECONDS, abort)

    def _end_now(self) -> None:
        logger.error("the server did not end within %g seconds: killed", LAST_RESORT_SECONDS)
        self._service.engine.kill()
        os._exit(1)

    def _begin_drain(self) -> None:
        self._drain = asyncio.ensure_future(self._drain_requests())

    async def _drain_requests(self) -> None:
        try:
            await self._drain_all()
        finally:  # whatever goes wrong in it, one signal ends the server
            self.should_exit = True

    async def _drain_all(self) -> None:
        service, seconds = self._service, self._service.options.shutdown_timeout
        if service.active:
            logger.info(
                "shutting down: %d requests have %.0f seconds to end", service.active, seconds
            )
        for _ in range(LATE_TURNS):
            await asyncio.sleep(LATE_SECONDS / LATE_TURNS)
        if not await self._is_idle(seconds):
            logger.warning("shutting down: %d requests are cut off", service.active)
        service.cut("the server is shutting down and cannot complete this answer")
        if not await self._is_idle(CLOSE_SECONDS, HURRIED_SECONDS):
            self._connections.abort_all()

    async def _is_idle(self, seconds: float, hurried_seconds: float = 0.0) -> bool:
        """Wait until no request runs, at most `seconds`; whether none does.

        Those whose body comes slowly, or never, are not waited for.
        """
        begun = time.monotonic()
        late = ShuttingDownError("the server is shutting down, and the body comes too slowly")
        while self._service.active:
            self._connections.end_slow_bodies(late)
            waited = time.monotonic() - begun
            if waited > (min(hurried_seconds, seconds) if self._is_hurried else seconds):
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End on a signal without raising it again afterwards, as uvicorn would."""
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


async def _answers(bound: socket.socket) -> bool:
    host, port = bound.getsockname()[:2]
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        reader, writer = await asyncio.open_connection(local, port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        status = await reader.readline()
        writer.close()
    except OSError:
        return False
    return b" 200 " in status


def run(app: FastAPI, bound: socket.socket, on_ready: Callable[[], None]) -> int:
    """Serve until a signal or until the engine fails; the exit code. Logging is left alone."""
    service = app.state.service
    assert isinstance(service, Service)
    config = uvicorn.Config(
        app,
        http=H11Protocol,  # bounds the size of headers, as the faster one does not
        ws="none",
        # Not what happens to be installed: connections are accepted, counted and closed by what
        # asyncio's own loop does, and its transports are what all of this is tested with.
        loop="asyncio",
        log_config=None,
        access_log=False,  # requests_log.py writes it
        lifespan="on",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    server = Server(config, on_ready, service)
    failed = False

    def end() -> None:
        nonlocal failed
        failed = True
        server.should_exit = True

    service.engine.on_failure = end
    try:
        server.run(sockets=[bound])
    finally:
        server.last_resort.cancel()
    return 1 if failed else 0
