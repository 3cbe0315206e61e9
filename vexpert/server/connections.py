"""Connections that nobody uses: clients that read nothing, or never finish a request's head."""

import asyncio
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from vexpert.log import get_logger
from vexpert.lora.info import ListedNames

logger = get_logger(__name__)
HEAD_SECONDS = 30.0  # from the first look at a connection, or the last answer, to a request's head
SHOWN = 5
NO_LINGERING = struct.pack("ii", 1, 0)


@dataclass
class _Look:
    """What was found at a connection, and for how many seconds it has been so."""

    unread: int = 0  # bytes that the client should read, while no more are written
    unread_seconds: float = 0.0
    cycle: Any = "not seen"  # uvicorn's object of one request and its answer, or None
    headless_seconds: float = 0.0


class Connections:
    """Looks at all connections of a uvicorn server again and again, and aborts those."""

    def __init__(self, protocols: Collection[Any], write_timeout: float) -> None:
        """`protocols`: uvicorn's set, which it keeps up to date."""
        self._protocols = protocols
        self._write_timeout = write_timeout
        self._interval = min(1.0, write_timeout / 4)
        self._looks: dict[H11Protocol, _Look] = {}

    async def watch(self) -> None:
        """Until it is cancelled. Time is counted in looks: a stop of the process is no time."""
        while True:
            await asyncio.sleep(self._interval)
            present = [each for each in self._protocols if isinstance(each, H11Protocol)]
            self._looks = {each: self._looks.get(each) or _Look() for each in present}
            _abort([p for p, look in self._looks.items() if self._has_stalled(p, look)])
            for protocol, look in self._looks.items():
                if self._has_no_head(protocol, look):
                    _reset(protocol)

    def close_idle(self, most: int) -> bool:
        """Close the connections that wait for a request longest, `most` of them; whether any do.

        One that came since the look before the last one does not count: its request is on its way.
        """
        waited = self._interval * 1.5  # one look may be at the very start
        found = [
            (look.headless_seconds, protocol)
            for protocol, look in self._looks.items()
            if look.headless_seconds > waited and not protocol.transport.is_closing()
            if protocol.cycle is look.cycle and (look.cycle is None or look.cycle.response_complete)
        ]
        found.sort(key=lambda pair: -pair[0])
        for _, protocol in found[:most]:
            _reset(protocol)
        return bool(found)

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


def _abort(stalled: list[H11Protocol]) -> None:
    for protocol in stalled:
        _reset(protocol)
    if stalled:
        told = ListedNames([_name(each) for each in stalled[:SHOWN]], len(stalled) - SHOWN)
        logger.warning("clients that read nothing of their answers are cut off: %s", told)


def _name(protocol: H11Protocol) -> str:
    return "-" if protocol.client is None else f"{protocol.client[0]}:{protocol.client[1]}"
