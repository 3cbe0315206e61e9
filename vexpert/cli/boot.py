"""The time before a server is ready: a signal ends it well, and so does the end of its engine.

Imports and a model take minutes on the thread that waits for neither; there an exception is raised
in the midst of them. Both are no `Exception`: a library that tries an import must not take them.
"""

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Protocol

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN_SECONDS = 0.5  # between the signals to a thread that goes on


class Stopped(BaseException):
    """A signal asks for the end."""


class EngineEnded(BaseException):
    """The engine has ended before the server was ready."""


class Waitable(Protocol):
    """The part of an EngineProcess that is watched."""

    def wait(self) -> str:
        """Wait until it has ended."""


class Boot:
    """Raises Stopped on the main thread, once a signal has come, until the end of the block.

    A library may swallow it, then it is raised again, by `check` or while an engine is watched; or
    make another error of it, which the end of the block turns back.
    """

    def __init__(self) -> None:
        self._is_stopped = False
        self._has_ended = False  # the engine
        self._is_watching = False
        self._telling = threading.Lock()  # of `_is_watching`: no signal comes once it is False
        self._before: dict[int, Callable[..., Any] | int | None] = {}

    def __enter__(self) -> "Boot":
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error is not None and self._is_stopped:
            raise Stopped from error

    def check(self) -> None:
        """Raise Stopped if a signal has come."""
        if self._is_stopped:
            raise Stopped

    @contextmanager
    def watching(self, engine: Waitable) -> Iterator[None]:
        """Raises EngineEnded on the main thread, inside the block, once `engine` has ended."""
        self.check()
        self._is_watching = True
        try:
            with _signals_told(self._insist):
                watch = partial(self._watch, engine)
                threading.Thread(target=watch, name="vexpert-boot", daemon=True).start()
                yield
                self._look_away()
        except BaseException as error:
            self._look_away()
            if self._has_ended and not self._is_stopped:
                raise EngineEnded from error
            raise
        if self._has_ended:
            raise EngineEnded

    def _look_away(self) -> None:
        try:
            with self._telling:
                self._is_watching = False
        finally:  # a signal may have come before it
            self._is_watching = False

    def _watch(self, engine: Waitable) -> None:
        engine.wait()
        self._has_ended = True
        self._interrupt()

    def _interrupt(self) -> None:
        with self._telling:
            if self._is_watching:
                # A real one: it ends what the thread waits for in the system.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _insist(self, told: socket.socket) -> None:
        """Interrupt until nobody watches, once there was a signal, which each of these tells.

        One that comes just as the thread begins to wait does not end that wait, of minutes; and
        what it raises in a callback of the import system goes no further.
        """
        with told:
            while told.recv(16):
                time.sleep(AGAIN_SECONDS)
                self._interrupt()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # On the main thread, as all of `watching`.
        if self._has_ended:
            if self._is_watching:
                raise EngineEnded
            return
        self._is_stopped = True
        raise Stopped


@contextmanager
def _signals_told(listen: Callable[[socket.socket], None]) -> Iterator[None]:
    """On a thread, `listen` gets a socket that has a byte for each signal, and ends at the end."""
    told, telling = socket.socketpair()
    telling.setblocking(False)
    threading.Thread(target=listen, args=(told,), name="vexpert-signals", daemon=True).start()
    before = signal.set_wakeup_fd(telling.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        telling.close()
