"""Daemon threads that are waited for, briefly, before the interpreter ends.

A thread that comes back from C++ to an interpreter that is ending is ended there by pthread_exit,
which unwinds its stack (until Python 3.14). PyTorch takes the interpreter's lock where it runs an
operator and where it frees a tensor, in frames that must not be unwound: std::terminate, and the
process aborts after all its work is done. So what a thread has begun, it ends before.

But not for long: a thread that hangs in a dead file system does not come back at all.
"""

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

SECONDS = 1.0  # for all threads together


class Owner(Protocol):
    """Who has threads."""

    def end_threads(self) -> None:
        """Tell those that are there to end after what they do. Waits for none."""


class _Daemon(threading.Thread):
    """Does not keep its owner alive."""

    def __init__(self, target: Callable[[], None], name: str, owner: Owner | None) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.owner = (lambda: None) if owner is None else weakref.ref(owner)


def start_daemon(target: Callable[[], None], name: str, owner: Owner | None) -> threading.Thread:
    """A daemon thread that runs `target`, and that the end of the process waits for.

    `owner`: None for one that ends by itself soon. RuntimeError where the system has no room.
    """
    thread = _Daemon(target, name, owner)
    thread.start()
    return thread


@atexit.register
def end_all() -> None:
    """Tell all threads to end, and wait for them; Ctrl-C ends the wait."""
    until = time.monotonic() + SECONDS
    with contextlib.suppress(KeyboardInterrupt):
        # A forked process has none of those that ran before.
        threads = [thread for thread in threading.enumerate() if isinstance(thread, _Daemon)]
        for owner in {owner for thread in threads if (owner := thread.owner()) is not None}:
            owner.end_threads()
        for thread in threads:
            if thread.is_alive():  # one that could not be started cannot be joined
                thread.join(max(0.0, until - time.monotonic()))
