"""The time before a server is ready: a signal ends it well, and so does the end of its engine.

Imports and a model take minutes on the thread that waits for neither; there an exception is raised
in the midst of them. Both are no `Exception`: a library that tries an import must not take them.
"""

import _thread
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal asks for the end."""


class EngineEnded(BaseException):
    """The engine has ended before the server was ready."""


class Waitable(Protocol):
    """The part of an EngineProcess that is watched."""

    def wait(self) -> str:
        """Wait until it has ended."""


class Boot:
    """Raises Stopped or EngineEnded on the main thread from `with` to `end`, or to the block's end.

    A library may swallow either; `end` raises it again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_over = False
        self._why: type[BaseException] | None = None
        self._before: dict[int, Callable[..., Any] | int | None] = {}

    def __enter__(self) -> "Boot":
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._is_over = True
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def watch(self, engine: Waitable) -> None:
        """From here on the end of `engine` counts too."""
        threading.Thread(
            target=self._watch, args=(engine,), name="vexpert-boot", daemon=True
        ).start()

    def end(self) -> None:
        """The server is ready to run and takes the signals."""
        with self._lock:
            self._is_over = True
        if self._why is not None:
            raise self._why

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._why = self._why or Stopped
        raise self._why

    def _watch(self, engine: Waitable) -> None:
        engine.wait()
        with self._lock:
            if not self._is_over:
                self._why = self._why or EngineEnded
                _thread.interrupt_main(signal.SIGTERM)
