"""Connections that nobody uses: clients that read nothing, or never finish what they send."""

import asyncio
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from vexpert.log import get_logger
from vexpert.lora.info import ListedNames
from vexpert.server.deadlines import UNANSWERED, Unanswered
from vexpert.server.errors import ApiError
from vexpert.server.http_protocol import CountingProtocol

logger = get_logger(__name__)
HEAD_SECONDS = 30.0  # from the first look at a connection, or the last answer, to a request's head
BODY_SECONDS = 4.0  # for each BODY_BYTES of a body, where connections run out
BODY_BYTES = 2**14
LATE = (
    "the body comes too slowly while the server has as many connections as it may have; try again "
    "later"
)
SHOWN = 5
NO_LINGERING = struct.pack("ii", 1, 0)


@dataclass
class _Look:
    """What was found at a connection, and for how many seconds it has been so."""

    unread: int = 0  # bytes that the client should read, while no more are written
    unread_seconds: float = 0.0
    cycle: Any = "not seen"  # uvicorn's object of one request and its answer, or None
    headless_seconds: float = 0.0
    received: int = 0  # bytes, when `body_seconds` were none
    body_seconds: float = 0.0


class Connections:
    """Looks at all connections of a uvicorn server again and again, and aborts those."""

    def __init__(self, protocols: Collection[Any], write_timeout: float) -> None:
        """`protocols`: uvicorn's set, which it keeps up to date."""
        self._protocols = protocols
        self._write_timeout = write_timeout
        self._interval = min(1.0, write_timeout / 4)
        self._looks: dict[CountingProtocol, _Look] = {}

    async def watch(self) -> None:
        """Until it is cancelled. Time is counted in looks: a stop of the process is no time."""
        while True:
            await asyncio.sleep(self._interval)
            present = [each for each in self._protocols if isinstance(each, CountingProtocol)]
            self._looks = {each: self._looks.get(each) or _Look() for each in present}
            _abort([p for p, look in self._looks.items() if self._has_stalled(p, look)])
            for protocol, look in self._looks.items():
                self._look_at_body(protocol, look)  # before the head: it compares the cycle, too
                if self._has_no_head(protocol, look):
                    _reset(protocol)

    def close_idle(self, most: int) -> bool:
        """Close the connections that wait for a request longest, `most` of them; whether any do.

        One that came since the look before the last one does not count: its request is on its way.
        One whose body comes slowly does, and gets 408.
        """
        found = [
            (waited, protocol)
            for protocol, look in self._looks.items()
            if (waited := self._waited(protocol, look)) and not protocol.transport.is_closing()
        ]
        found.sort(key=lambda pair: -pair[0])
        for _, protocol in found[:most]:
            if self._looks[protocol].headless_seconds:
                _reset(protocol)
            else:
                self._looks[protocol].body_seconds = 0.0  # it ends: no room for another
                _end_request(protocol, ApiError(LATE, 408, code="too_many_connections"))
        return bool(found)

    def end_slow_bodies(self, error: Exception) -> None:
        """Answer `error` to each request whose body comes slowly."""
        for protocol, look in self._looks.items():
            if self._waited(protocol, look) and not look.headless_seconds:
                _end_request(protocol, error)

    def _waited(self, protocol: CountingProtocol, look: _Look) -> float:
        """Seconds that its client has sent nothing of use; 0: it may be about to."""
        cycle = protocol.cycle
        if cycle is not look.cycle:
            return 0.0
        if cycle is None or cycle.response_complete:
            # One look may be at the very start.
            return look.headless_seconds if look.headless_seconds > self._interval * 1.5 else 0.0
        is_in_body = cycle.more_body and not cycle.response_started
        return look.body_seconds if is_in_body and look.body_seconds >= BODY_SECONDS else 0.0

    def abort_all(self) -> None:
        """Close every connection now, whatever its client has not read."""
        for protocol in list(self._protocols):
            _reset(protocol)

    def _has_stalled(self, protocol: H11Protocol, look: _Look) -> bool:
        transport = protocol.transport
        # Only then the buffer cannot have been filled again since the last look.
        is_full = protocol.flow.write_paused or transport.is_closing()
        unread = transport.get_write_buffer_size() if is_full else 0
        same = 0 < look.unread <= unread
        look.unread, look.unread_seconds = unread, look.unread_seconds + self._interval * same
        if not same:
            look.unread_seconds = 0.0
        return look.unread_seconds >= self._write_timeout

    def _look_at_body(self, protocol: CountingProtocol, look: _Look) -> None:
        cycle = protocol.cycle
        is_same = cycle is not None and cycle is look.cycle and not protocol.flow.read_paused
        is_waited_for = is_same and cycle.more_body and not cycle.response_started
        if is_waited_for and protocol.received - look.received < BODY_BYTES:
            look.body_seconds += self._interval
        else:
            look.received, look.body_seconds = protocol.received, 0.0

    def _has_no_head(self, protocol: H11Protocol, look: _Look) -> bool:
        cycle = protocol.cycle
        waits = cycle is None or cycle.response_complete
        is_same = waits and cycle is look.cycle and not protocol.transport.is_closing()
        look.cycle = cycle
        look.headless_seconds = look.headless_seconds + self._interval if is_same else 0.0
        return look.headless_seconds >= HEAD_SECONDS


def _reset(protocol: Any) -> None:
    """Close a connection; the system, too, forgets at once what the client has not read."""
    sock = protocol.transport.get_extra_info("socket")
    if sock is not None and not protocol.transport.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGERING)
    protocol.transport.abort()


def _end_request(protocol: CountingProtocol, error: Exception) -> None:
    """Answer `error` in place of what waits for the rest of a request."""
    request = protocol.scope.get(UNANSWERED)
    if isinstance(request, Unanswered):
        request.end(error)


def _abort(stalled: list[H11Protocol]) -> None:
    for protocol in stalled:
        _reset(protocol)
    if stalled:
        told = ListedNames([_name(each) for each in stalled[:SHOWN]], len(stalled) - SHOWN)
        logger.warning("clients that read nothing of their answers are cut off: %s", told)


def _name(protocol: H11Protocol) -> str:
    return "-" if protocol.client is None else f"{protocol.client[0]}:{protocol.client[1]}"
