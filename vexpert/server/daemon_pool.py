"""A few threads for calls that may never return."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from vexpert.at_exit import start_daemon
from vexpert.server.progress import OverloadedError

T = TypeVar("T")
Work = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class DaemonPool:
    """Runs calls on at most `size` threads, started when they are needed; the rest waits in order.

    The threads are daemons: one that hangs in a dead file system must not keep the process alive,
    as those of the standard library's pool would.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._waiting: deque[Work] = deque()
        self._lock = threading.Condition()
        self._threads = self._idle = 0
        self._is_closed = False

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Run `function(*arguments)` soon; its outcome. Cancelled at once after `close`.

        Raises OverloadedError where the system has no room for a first thread.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                future.cancel()
                return future
            self._waiting.append((future, function, arguments))
            if len(self._waiting) > self._idle and self._threads < self._size:
                name = f"{self._name}-{self._threads}"
                self._start(name)
            self._lock.notify()
        return future

    def _start(self, name: str) -> None:
        try:
            start_daemon(self._run, name, self)
            self._threads += 1
        except RuntimeError as error:
            if not self._threads:  # else one of those that are there does it
                self._waiting.pop()
                message = f"there is no thread for this: {error}; try again later"
                raise OverloadedError(message) from error

    def close(self) -> None:
        """Cancel what waits; threads end after what they do now, and are not waited for."""
        with self._lock:
            self._is_closed = True
            for future, _, _ in self._waiting:
                future.cancel()
            self._waiting.clear()
            self._lock.notify_all()

    def end_threads(self) -> None:
        """The process ends."""
        self.close()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            future, function, arguments = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
                future.set_exception(error)

    def _next(self) -> Work | None:
        with self._lock:
            self._idle += 1
            try:
                while not (self._waiting or self._is_closed):
                    self._lock.wait()
            finally:
                self._idle -= 1
            return self._waiting.popleft() if self._waiting else None
