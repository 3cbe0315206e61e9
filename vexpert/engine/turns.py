"""Threads that take turns at what only one of them may do at a time."""

import threading
from collections.abc import Callable
from typing import TypeVar

from vexpert.errors import UnsupportedError

T = TypeVar("T")


class Turns:
    """One call at a time, in the order in which the threads came.

    A plain lock keeps no order: a thread that calls in a loop would hold up all others for long.
    """

    def __init__(self, what: str) -> None:
        """`what` is called; for the message of a call within a call."""
        self._what = what
        self._changed = threading.Condition()
        self._queue: list[int] = []  # threads by ident; the first one has its turn

    def run(self, call: Callable[[], T]) -> T:
        """`call()` once it is this thread's turn.

        UnsupportedError for a thread that waits or runs already, as where a signal handler calls:
        it would wait for itself. Ctrl-C ends the wait, or the call, and the turn with it.
        """
        me = threading.get_ident()
        if me in self._queue:
            raise UnsupportedError(
                f"{self._what} was called within {self._what}, on the same thread (from a signal"
                " handler, a log handler or a destructor?): call it once the first has returned"
            )
        try:
            with self._changed:
                self._queue.append(me)
                self._changed.wait_for(lambda: self._queue[0] == me)
            return call()
        finally:
            with self._changed:
                if me in self._queue:  # else Ctrl-C came first
                    self._queue.remove(me)
                self._changed.notify_all()
