"""The engine behind asyncio: one thread owns the engine and runs its step loop.

Coroutines hand the thread commands (add, abort, look at the statistics); it runs them between two
steps and hands updates back to the event loop. Adapters load in a worker thread beside the steps.
"""

import asyncio
import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from vexpert.engine.outputs import EngineStats, RequestOutput
from vexpert.errors import RequestError, VexpertError
from vexpert.log import get_logger
from vexpert.server.interface import EngineProtocol
from vexpert.server.progress import (
    EngineFailedError,
    Failure,
    OverloadedError,
    ShuttingDownError,
    Sink,
    Tracker,
    Update,
)
from vexpert.server.recorder import Recorder

if TYPE_CHECKING:
    from vexpert.engine.sampling_params import SamplingParams
    from vexpert.lora.types import AdapterInfo

logger = get_logger(__name__)
T = TypeVar("T")
COMPILE_SECONDS = 90  # with the start of the process that tries constraints

IDLE_CHECK = 5.0  # seconds without work after which the engine's integrity is checked, once


class AsyncEngine:
    """Runs an engine for coroutines of one event loop."""

    def __init__(
        self,
        engine: EngineProtocol,
        recorder: Recorder,
        max_queue_len: int | None = None,
        keep_alive: float = 15.0,
    ) -> None:
        """`max_queue_len`: sequences accepted beyond those of one step; None: any number."""
        self.engine = engine
        self.keep_alive = keep_alive  # seconds
        self._most = None if max_queue_len is None else engine.config.max_num_seqs + max_queue_len
        self.num_sequences = 0  # accepted and not ended; written by the engine thread alone
        self._compiling = ThreadPoolExecutor(2, thread_name_prefix="vexpert-grammar")
        self.recorder = recorder
        self.failure: EngineFailedError | None = None
        self.on_failure: Callable[[], None] | None = None  # called in the event loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        self._commands: deque[tuple[Callable[[], Any], asyncio.Future[Any] | None]] = deque()
        self._stopping = False
        self._trackers: dict[str, Tracker] = {}  # touched by the engine thread alone
        self._unchecked = True  # steps have run since the last look at the engine's integrity

    def start(self) -> None:
        """Start the engine thread; updates go to the running event loop."""
        assert self._thread is None, "started twice"
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="vexpert-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Abort what runs, end the thread, and wait for it."""
        assert self._thread is not None, "not started"
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        self._compiling.shutdown(wait=False, cancel_futures=True)

    def check_room(self, count: int = 1) -> None:
        """Raise OverloadedError if `count` more sequences would be too many."""
        if self._most is not None and self.num_sequences + count > self._most:
            message = (
                f"{self.num_sequences} sequences run or wait, and {self._most} may; try again later"
            )
            raise OverloadedError(message)

    async def prepare(self, params: "SamplingParams") -> None:
        """Compile the constraint of `params` beside the steps. Raises RequestError."""
        if params.constraint is None:
            return
        work = asyncio.get_running_loop().run_in_executor(
            self._compiling, self.engine.prepare, params
        )
        try:
            await asyncio.wait_for(work, COMPILE_SECONDS)
        except TimeoutError:
            rule = f"compiling takes more than {COMPILE_SECONDS} seconds; simplify it"
            raise params.constraint.refusal(rule) from None

    async def cut(self, message: str) -> None:
        """Abort every request; each gets a ShuttingDownError that says `message`."""
        failure = ShuttingDownError(message)

        def command() -> list[Sink]:
            sinks = [tracker.sink for tracker in self._trackers.values()]
            for request_id in list(self._trackers):
                self._abort(request_id)
            return sinks

        with contextlib.suppress(EngineFailedError):
            for sink in await self._call(command):
                sink(failure)

    async def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: "SamplingParams",
        *,
        adapter: str | None,
        every_step: bool,
        sink: Sink,
    ) -> None:
        """Queue a request; `sink` gets its updates in the event loop, the last one finished.

        Raises what the engine raises. If the caller is cancelled meanwhile, the request is aborted.
        """
        tracker = Tracker(
            *(request_id, adapter, len(prompt_token_ids), every_step, sink),
            num_sequences=params.n,
            arrival=time.perf_counter(),
        )

        def command() -> None:
            self.check_room(params.n)
            self.engine.add_request(request_id, prompt, prompt_token_ids, params, adapter)
            self._trackers[request_id] = tracker
            self.num_sequences += params.n
            self.recorder.added(tracker)

        try:
            await self._call(command)
        except asyncio.CancelledError:
            self.abort(request_id)
            raise

    def abort(self, request_id: str) -> None:
        """Drop a request before the next step; harmless when it is finished or unknown."""
        with contextlib.suppress(EngineFailedError):
            self._post(functools.partial(self._abort, request_id), None)

    async def load_adapter(
        self, name: str, path: str, *, lazy: bool = False, **options: Any
    ) -> "AdapterInfo":
        """Load an adapter in a thread of its own; steps go on. Raises AdapterError.

        `lazy`: it is only registered. Options: lora_B_layout, load_inplace, pinned.
        """
        call = self.engine.register_adapter if lazy else self.engine.load_adapter
        return await _beside(functools.partial(call, name, path, **options))

    async def unload_adapter(self, name: str, *, drain_seconds: float | None = None) -> None:
        """Unload an adapter. Raises AdapterNotFoundError."""
        call = functools.partial(self.engine.unload_adapter, name, drain_seconds=drain_seconds)
        await _beside(call)
        with self._wake:
            self._wake.notify()  # a deadline may have come

    def adapters(self) -> "list[AdapterInfo]":
        """Adapters that requests may name, one per name, sorted."""
        usable = (info for info in self.engine.adapters() if info.state not in _UNUSABLE)
        return sorted({info.name: info for info in usable}.values(), key=lambda info: info.name)

    async def forget_counts(self, known: set[str]) -> None:
        """Drop the counts of adapters that are not `known` any more."""
        await self._call(functools.partial(self.recorder.forget, known))

    async def stats(self) -> EngineStats:
        """The engine's statistics, taken between two steps."""
        return await self._call(self.engine.stats)

    # The event loop's side.

    async def _call(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine thread, between two steps."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._post(function, future)
        return await future

    def _post(self, function: Callable[[], Any], future: "asyncio.Future[Any] | None") -> None:
        with self._wake:
            if self.failure is not None:
                raise self.failure
            self._commands.append((function, future))
            self._wake.notify()

    def _to_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(callback, *arguments)

    def _announce(self, failure: EngineFailedError, sinks: list[Sink]) -> None:
        for sink in sinks:
            sink(failure)
        for _, future in self._commands:
            _set_error(future, failure)
        if self.on_failure is not None and not self._stopping:
            self.on_failure()

    # The engine thread's side.

    def _run(self) -> None:
        try:
            while self._run_commands():
                if self.engine.has_unfinished():
                    self._step()
            for request_id in self._trackers:
                self.engine.abort(request_id)
        except Exception as error:
            logger.exception("the engine failed; every running request gets an error")
            self._fail(f"the engine failed: {type(error).__name__}: {error}")
        else:
            self._fail("the server is shutting down")

    def _run_commands(self) -> bool:
        """Run what is queued, sleeping while there is nothing to do; False: stop."""
        with self._wake:
            while not (self._commands or self._stopping or self.engine.has_unfinished()):
                if not self._wake.wait(IDLE_CHECK if self._unchecked else None):
                    self._unchecked = False
                    self.engine.check_integrity()
            if self._stopping:
                return False
            commands, self._commands = self._commands, deque()
        for function, future in commands:
            self._run_command(function, future)
        return True

    def _run_command(
        self, function: Callable[[], Any], future: "asyncio.Future[Any] | None"
    ) -> None:
        try:
            result = function()
        except (VexpertError, OverloadedError) as error:
            self._to_loop(_set_error, future, error)
        except Exception as error:
            logger.exception("a request met an error of the engine")
            self._to_loop(_set_error, future, error)
        else:
            self._to_loop(_set_result, future, result)

    def _step(self) -> None:
        self._unchecked = True
        outputs = self.engine.step()
        now = time.perf_counter()
        updates = [pair for output in outputs if (pair := self._track(output, now))]
        if updates:
            self._to_loop(_deliver, updates)

    def _track(self, output: RequestOutput, now: float) -> tuple[Sink, Update | Failure] | None:
        tracker = self._trackers.get(output.request_id)
        if tracker is None:
            return None
        self.recorder.stepped(tracker, tracker.count(output), now)
        if output.finished:
            del self._trackers[output.request_id]
            self.num_sequences -= tracker.num_sequences
            reasons = [part.finish_reason or "abort" for part in output.outputs]
            self.recorder.finished(tracker, reasons, now)
        if output.error is not None:
            return tracker.sink, RequestError(output.error)
        update = tracker.update(output)
        return None if update is None else (tracker.sink, update)

    def _abort(self, request_id: str) -> None:
        tracker = self._trackers.pop(request_id, None)
        if tracker is not None:
            self.num_sequences -= tracker.num_sequences
            self.engine.abort(request_id)
            self.recorder.finished(tracker, ["abort"], time.perf_counter())

    def _fail(self, message: str) -> None:
        """End the thread's service: no command is taken from now on; the running ones fail."""
        failure = EngineFailedError(message)
        with self._wake:
            self.failure = failure
        now = time.perf_counter()
        for tracker in self._trackers.values():
            self.recorder.finished(tracker, ["abort"], now)
        self._to_loop(self._announce, failure, [t.sink for t in self._trackers.values()])
        self._trackers.clear()


_UNUSABLE = ("errored", "draining")


async def _beside(function: Callable[[], T]) -> T:
    """Run `function` on a new thread. A daemon: one that hangs in a dead file system must not keep
    the process alive, as asyncio's own worker threads would.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(callback: Callable[..., None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(callback, future, value)

    def work() -> None:
        try:
            result = function()
        except (VexpertError, OSError) as error:
            tell(_set_error, error)
        except Exception as error:
            logger.exception("a call about an adapter met an unexpected error")
            tell(_set_error, error)
        else:
            tell(_set_result, result)

    threading.Thread(target=work, name="vexpert-adapter-call", daemon=True).start()
    return await future


def _set_result(future: "asyncio.Future[Any] | None", result: Any) -> None:
    if future is not None and not future.done():
        future.set_result(result)


def _set_error(future: "asyncio.Future[Any] | None", error: Exception) -> None:
    if future is not None and not future.done():
        future.set_exception(error)


def _deliver(updates: list[tuple[Sink, Update | Failure]]) -> None:
    for sink, update in updates:
        sink(update)
