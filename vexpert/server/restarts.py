"""How often a failed engine is started again."""

import time
from collections import deque

WINDOW = 600.0  # seconds in which restarts are counted


class Restarts:
    """At most `most` within WINDOW."""

    def __init__(self, most: int) -> None:
        self.count = 0  # since the server started
        self._most = most
        self._times: deque[float] = deque(maxlen=most)  # monotonic

    def may_begin(self) -> bool:
        """Whether one more is within the limit; counts it."""
        times, now = self._times, time.monotonic()
        if len(times) == self._most and not (times and now - times[0] > WINDOW):
            return False
        times.append(now)
        self.count += 1
        return True
