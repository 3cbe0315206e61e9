"""Waiting for news, at most so long, at the cost of one future a wait.

`asyncio.timeout` sets and cancels a timer each time. Here one timer per waiter looks, when it is
due, how long the wait of that moment has lasted.
"""

import asyncio


class Pause:
    """Waits of one task, ended by `end`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[bool] | None = None  # of the wait under way
        self._since = 0.0  # when that began, by the event loop's clock
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, seconds: float | None) -> bool:
        """Wait until `end`: True. False if it does not come for `seconds`."""
        self._waiter, self._since = self._loop.create_future(), self._loop.time()
        if self._timer is None and seconds is not None:
            self._timer = self._loop.call_later(seconds, self._look, seconds)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def end(self) -> None:
        """End the wait, if there is one."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def _look(self, seconds: float) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return  # the next wait sets a timer
        due = self._since + seconds
        if due <= self._loop.time():
            self._waiter.set_result(False)
        else:
            self._timer = self._loop.call_at(due, self._look, seconds)

    def close(self) -> None:
        """Leave no timer behind."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
