"""Constraints compiled beside the steps: those that may take long one after the other.

What is known, or simple, waits behind none of them; what nobody waits for any more is dropped.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from vexpert.engine.sampling_params import SamplingParams
from vexpert.engine.structured_outputs import StructuredOutputs
from vexpert.server.daemon_pool import DaemonPool
from vexpert.server.interface import EngineProtocol
from vexpert.server.progress import OverloadedError
from vexpert.server.wire import read_params

MAX_WAITING = 32  # different constraints that may take long, 10 seconds each at most
QUICK_THREADS = 2

Reply = Callable[[int, str, Callable[[], Any]], None]


class Constraints:
    """Runs `prepare` of an engine. A job has a key, by which it may be dropped."""

    def __init__(self, reply: Reply) -> None:
        """`reply`: called with a call's number, its method, and the work; on a thread of ours."""
        self._reply = reply
        self._quick = DaemonPool(QUICK_THREADS, "vexpert-constraint")
        self._slow = DaemonPool(1, "vexpert-grammar")
        self._lock = threading.Lock()
        self._wanted: dict[int, StructuredOutputs | None] = {}  # by key; None: not looked at yet
        self._waiting: dict[int, StructuredOutputs] = {}  # of those, for the slow thread

    def submit(self, engine: EngineProtocol, call: int, fields: dict[str, Any], key: int) -> None:
        """Prepare the sampling options of `fields` soon, and reply to `call`."""
        with self._lock:
            self._wanted[key] = None
        try:
            self._quick.submit(self._sort, engine, call, fields, key)
        except OverloadedError as error:
            self._refuse(call, key, error)

    def drop(self, key: int) -> None:
        """Nobody waits for this job any more; harmless if it has ended."""
        with self._lock:
            self._wanted.pop(key, None)
            self._waiting.pop(key, None)

    def close(self) -> None:
        self._quick.close()
        self._slow.close()
        with self._lock:
            self._wanted.clear()

    def _sort(self, engine: EngineProtocol, call: int, fields: dict[str, Any], key: int) -> None:
        """Run what is quick; let the rest wait for the one thread that may take long."""
        try:
            params = read_params(fields)
            is_quick = not self._note(key, params.constraint) or engine.is_quick(params)
            if is_quick:
                self._run(engine, call, params, key)
            elif self._may_wait(key, params.constraint):
                self._slow.submit(self._run, engine, call, params, key)
            else:
                message = f"{MAX_WAITING} constraints wait to be compiled; try again later"
                raise OverloadedError(message)
        except Exception as error:  # noqa: BLE001 - told to the caller, who waits
            self._refuse(call, key, error)

    def _refuse(self, call: int, key: int, error: Exception) -> None:
        self.drop(key)
        self._reply(call, "prepare", partial(_raise, error))

    def _note(self, key: int, constraint: StructuredOutputs | None) -> bool:
        """Whether somebody waits for the job, whose constraint is known now."""
        with self._lock:
            if key in self._wanted:
                self._wanted[key] = constraint
            return key in self._wanted

    def _may_wait(self, key: int, constraint: StructuredOutputs | None) -> bool:
        """Whether there is room; takes it."""
        with self._lock:
            if constraint is None or key not in self._wanted:
                return True  # `_run` drops it
            texts = {(each.kind, each.text) for each in self._waiting.values()}
            is_new = (constraint.kind, constraint.text) not in texts
            if is_new and len(texts) >= MAX_WAITING:
                return False
            self._waiting[key] = constraint
            return True

    def _run(self, engine: EngineProtocol, call: int, params: SamplingParams, key: int) -> None:
        if key not in self._wanted:
            return
        constraint = params.constraint

        def is_wanted() -> bool:
            with self._lock:
                return any(each == constraint for each in self._wanted.values())

        self._reply(call, "prepare", lambda: engine.prepare(params, is_wanted))
        self.drop(key)


def _raise(error: Exception) -> None:
    raise error
