"""Threads that read adapters, so that the engine's thread never waits for a file.

Daemon threads: one that hangs in a dead file system must not keep the process alive. One that is
stuck is replaced, up to a limit, so that it does not hold up the other adapters either.
"""

import contextlib
import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from vexpert.at_exit import start_daemon
from vexpert.log import get_logger

logger = get_logger(__name__)

THREADS = 2  # that read at once; each packs with threads of its own
MOST_THREADS = 16  # together with those that are stuck
STUCK_AFTER = 5.0  # seconds at one job
IDLE_END = 1.0  # seconds without a job after which a thread ends


class Job(NamedTuple):
    """`work` is done on a thread; `done` always hears of it: of the result or of the error."""

    work: Callable[[], Any]
    done: Callable[[Any, BaseException | None], None]
    owner: object  # whom it is for


class LoaderPool:
    """Jobs in order of arrival. Threads exist while there is work."""

    def __init__(
        self, threads: int = THREADS, most: int = MOST_THREADS, stuck_after: float = STUCK_AFTER
    ) -> None:
        self._threads, self._most, self._stuck_after = threads, most, stuck_after
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Job] = deque()
        self._idle = 0
        self._busy: dict[int, float] = {}  # thread ident -> when it began its job, monotonic
        self._started = 0
        self._is_told = False  # that a thread cannot be started
        self._ended = 0  # times that threads were told to end; each heeds those after its start

    def submit(
        self,
        work: Callable[[], Any],
        done: Callable[[Any, BaseException | None], None],
        owner: object = None,
    ) -> None:
        """Run `work` on a thread, then `done(result, error)` on the same thread."""
        with self._lock:  # on the caller's thread; Ctrl-C in a Condition's own steps would keep it
            self._queue.append(Job(work, done, owner))
            self._changed.notify()
            self._start_missing()

    def withdraw(self, owner: object) -> bool:
        """Forget the job of `owner`, which hears of nothing; False: no such job waits."""
        with self._lock:
            jobs = [job for job in self._queue if job.owner is owner]
            for job in jobs:
                self._queue.remove(job)
            return bool(jobs)

    def tend(self) -> None:
        """Replace threads that are stuck while others wait. Cheap: called at each step."""
        if self._queue:
            with self._lock:
                self._start_missing()

    def rests(self, but_for: int) -> bool:
        """Whether `but_for` jobs are begun, and no other is or is about to be."""
        with self._lock:
            unemployed = 0 if self._queue else self._idle
            return self._started - unemployed == len(self._busy) == but_for

    def end_threads(self) -> None:
        """Have the threads that are there end after their job. What comes later gets new ones."""
        with self._lock:
            self._ended += 1
            self._changed.notify_all()

    def counts(self) -> tuple[int, int, int]:
        """(jobs that wait, threads at a job, those of them that are stuck)."""
        with self._changed:
            return len(self._queue), len(self._busy), self._stuck()

    def _stuck(self) -> int:
        limit = time.monotonic() - self._stuck_after
        return sum(began < limit for began in self._busy.values())

    def _start_missing(self) -> None:
        alive = self._started
        wanted = min(len(self._queue) - self._idle, self._threads - (alive - self._stuck()))
        try:
            for _ in range(min(wanted, self._most - alive)):
                run = functools.partial(self._run, self._ended)
                start_daemon(run, "vexpert-loader", self)
                self._started += 1
        except RuntimeError as error:  # the system has no room for one; `tend` tries again
            if not self._is_told:
                logger.warning("adapters wait for a thread that reads them: %s", error)
            self._is_told = True
        else:
            self._is_told = False

    def _run(self, ended: int) -> None:
        try:
            while (job := self._next(ended)) is not None:
                self._do(job)
                # What a job holds, such as a whole file, must not live on in an idle thread.
                del job
        finally:
            with self._changed:
                self._started -= 1
                if ended == self._ended:
                    self._start_missing()

    def _next(self, ended: int) -> Job | None:
        with self._changed:
            if not self._queue:
                self._idle += 1
                self._changed.wait_for(lambda: self._queue or ended != self._ended, IDLE_END)
                self._idle -= 1
            if not self._queue or ended != self._ended:
                return None
            self._busy[threading.get_ident()] = time.monotonic()
            return self._queue.popleft()

    def _do(self, job: Job) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            with contextlib.suppress(Exception):  # `done` hears of it
                try:
                    result = job.work()
                finally:
                    error = sys.exception()
        finally:  # also where the thread is ended: SystemExit is no Exception
            with self._changed:
                del self._busy[threading.get_ident()]
            try:
                job.done(result, error)
            finally:
                # Its traceback holds this frame, and the frames that read: a cycle with all of
                # their memory, until Python's collector comes by, minutes later.
                del error
