"""The first moments of the command, and its last: a signal ends it at once, without a traceback.

Until a command handles signals itself, its modules are imported; a KeyboardInterrupt there may come
out of any line of any library. Nothing has been done yet that would have to be undone. Imports as
little as can be, for what comes before it is not guarded.
"""

import os
import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_guarded: "dict[signal.Signals, signal._HANDLER]" = {}  # with their handlers before


def guard(code: int | None = None) -> None:
    """From here on SIGINT and SIGTERM end the process with `code`, or 130 and 143.

    Not where it was told to ignore them, or handles them already.
    """

    def leave(number: int, frame: object) -> None:
        # Not by the signal itself, which the first process of a container would ignore.
        os._exit(128 + number if code is None else code)

    for number in SIGNALS:
        before = signal.getsignal(number)
        if before in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, leave)
            _guarded[number] = before


def release() -> None:
    """Undo `guard`: a command handles signals from here on. Without one before, nothing."""
    while _guarded:
        signal.signal(*_guarded.popitem())
