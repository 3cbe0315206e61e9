"""The first moments of the command, and its last: a signal ends it at once, without a traceback.

Until a command handles signals itself, its modules are imported; a KeyboardInterrupt there may come
out of any line of any library. Nothing has been done yet that would have to be undone.
"""

import functools
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_before: dict[int, Callable[..., Any] | int | None] = {}


def guard(code: int | None = None) -> None:
    """From here on SIGINT and SIGTERM end the process with `code`, or 130 and 143.

    Not where it was told to ignore them, or handles them already.
    """
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            leave = functools.partial(_leave, code)
            _before[number] = signal.signal(number, leave)


def release() -> None:
    """Undo `guard`: a command handles signals from here on. Without one before, nothing."""
    while _before:
        signal.signal(*_before.popitem())


def _leave(code: int | None, number: int, frame: FrameType | None) -> None:
    # Not by the signal itself, which the first process of a container would ignore.
    os._exit(128 + number if code is None else code)
