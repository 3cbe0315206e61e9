"""Threads that take turns at what only one of them may do at a time."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from vexpert.errors import UnsupportedError

T = TypeVar("T")


class Turns:
    """One call at a time, in the order in which the threads came.

    A plain lock keeps no order: a thread that calls in a loop would hold up all others for long.
    No lock guards the queue, whose changes are single steps of the interpreter: Ctrl-C between a
    lock's taking and the block that gives it back would keep it for ever.
    """

    def __init__(self, what: str) -> None:
        """`what` is called; for the message of a call within a call."""
        self._what = what
        # Threads by ident, each with what tells it to look again; the first one has its turn.
        self._queue: dict[int, SimpleQueue[None]] = {}

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
        told = SimpleQueue[None]()
        try:
            try:
                self._queue[me] = told
                while next(iter(list(self._queue))) != me:
                    told.get()
                return call()
            finally:
                self._leave(me)
        finally:  # Ctrl-C may have come amid the first time
            self._leave(me)

    def _leave(self, me: int) -> None:
        """Give up a turn, or the wait for it, and tell the thread that is the first one now."""
        self._queue.pop(me, None)
        for first in list(self._queue.values())[:1]:
            first.put(None)
