"""Versions whose requests cannot go on, and why. Called under the manager's lock."""

import time
from collections.abc import Callable

from vexpert.config import shown
from vexpert.errors import AdapterError
from vexpert.log import get_logger
from vexpert.lora.adapter_state import State
from vexpert.lora.adapter_version import Version
from vexpert.lora.key_lists import counted
from vexpert.lora.types import AdapterRef

logger = get_logger(__name__)

FOREVER = float("inf")


def check_seconds(drain_seconds: object) -> None:
    """AdapterError for what is neither None nor a time that ends."""
    match drain_seconds:
        case None:
            return
        case bool():
            pass
        case int() | float() if 0 <= drain_seconds < FOREVER:
            return
    raise AdapterError(f"drain_seconds={shown(drain_seconds)}: give seconds, 0 or more")


class Endings:
    """Collected in a step and beside it, told once at the next one's begin.

    `shut_out` says why a version can have no room, whoever else leaves; None: it can.
    """

    def __init__(self, shut_out: Callable[[Version], str | None]) -> None:
        self._shut_out = shut_out
        self._reasons: dict[AdapterRef, str] = {}
        self._overdue: dict[Version, float] = {}  # time.monotonic() at which each ends
        self._without_room: set[Version] = set()  # asked for a slot in this step

    def end(self, version: Version, reason: str) -> None:
        """At the next step."""
        self._reasons[version.ref] = reason

    def begin_unload(self, version: Version, drain_seconds: float | None) -> None:
        """`version` is unloaded: what still runs of it then ends at a step. None: it finishes."""
        if drain_seconds is not None and version.life.holds:
            self._overdue[version] = time.monotonic() + drain_seconds
        _log_unload(version, drain_seconds)

    def end_if_shut_out(self, version: Version) -> None:
        """At the next step, if pinned adapters still leave it no room then."""
        self._without_room.add(version)

    def forget(self, version: Version) -> None:
        """`version` is gone: nobody uses it."""
        self._overdue.pop(version, None)
        self._without_room.discard(version)

    def take(self) -> dict[AdapterRef, str]:
        """What ends now, with the reasons; it is not told again."""
        self._end_overdue()
        for version in self._without_room:
            if version.life.state is State.HOST and (why := self._shut_out(version)):
                self.end(version, f"adapter {version.ref.name!r}: {why}")  # itself, it stays loaded
        self._without_room.clear()
        reasons, self._reasons = self._reasons, {}
        return reasons

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for version in [version for version, end in self._overdue.items() if end <= now]:
            del self._overdue[version]
            self.end(
                version,
                f"adapter {version.ref.name!r} was unloaded, and its requests had time to "
                "finish until now",
            )


def _log_unload(version: Version, drain_seconds: float | None) -> None:
    drains = ""
    if version.life.holds:
        within = "" if drain_seconds is None else f" within {drain_seconds:g} s"
        drains = f", drains: {counted(version.life.holds, 'request')} to finish{within}"
    logger.info("adapter %s: version %d unloaded%s", version.ref.name, version.ref.version, drains)
