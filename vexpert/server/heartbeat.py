"""Whether an engine goes on: its process answers, and its thread gets from one step to the next.

Time is counted in looks, not by the clock: a machine that slept, or a server that was stopped
together with its engine, finds no hang when it wakes.
"""

import asyncio

from vexpert.log import get_logger
from vexpert.server.engine_link import Link

logger = get_logger(__name__)
INTERVAL = 2.0  # seconds between two looks, at most
LOOKS = 8  # within the shortest limit, at least
SILENCE = 60.0  # seconds without an answer of the process after which it hangs, at most
DOUBT = 10.0  # seconds without one after which the server is not ready, at most


class Heartbeat:
    """Asks over one link again and again."""

    def __init__(self, link: Link, step_timeout: float) -> None:
        """`step_timeout`: seconds that one step may take; a first one may compile."""
        self._link = link
        self._step_timeout = step_timeout
        self._silence = min(SILENCE, step_timeout)
        self._doubt = min(DOUBT, self._silence / 2)
        self._interval = min(INTERVAL, self._doubt / LOOKS)
        self._silent = 0.0  # seconds without an answer
        self._still = 0.0  # seconds with answers that told the same step
        self._answers, self._turns = link.beats, -1

    @property
    def doubt(self) -> str | None:
        """Why the engine may hang; None while it answers."""
        if self._silent < self._doubt:
            return None
        return f"the engine's process has not answered for {self._silent:.0f} seconds"

    async def until_hung(self) -> str:
        """Ask until the engine hangs; how it does."""
        while True:
            was_doubted = self.doubt is not None
            self._link.post("beat")
            await asyncio.sleep(self._interval)
            self._look()
            if self._silent >= self._silence:
                return f"the engine hangs: its process did not answer for {self._silence:g} seconds"
            if self._still >= self._step_timeout:
                return f"the engine hangs: a step took more than {self._step_timeout:g} seconds"
            if self.doubt is not None and not was_doubted:
                logger.warning("%s", self.doubt)

    def _look(self) -> None:
        if self._link.beats == self._answers:
            self._silent += self._interval
            return
        self._answers, self._silent = self._link.beats, 0.0
        turns, is_idle = self._link.last_beat
        self._still = 0.0 if is_idle or turns != self._turns else self._still + self._interval
        self._turns = turns
