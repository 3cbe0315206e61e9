"""The engine in a process of its own, so that neither side's Python waits for the other's.

The process is a fresh interpreter (the spawn method) that gets one end of a pair of sockets. It
ignores the signals that a terminal sends to all processes, obeys the server, and ends when the
server's end of the socket closes, however that came about.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any

from vexpert.config import EngineConfig
from vexpert.errors import VexpertError
from vexpert.log import get_logger, set_up_logging
from vexpert.server.engine_boot import settle
from vexpert.server.engine_loop import EngineLoop
from vexpert.server.interface import EngineFacts, EngineProtocol, LoraModule, Tokenizer
from vexpert.server.progress import EngineFailedError
from vexpert.server.wire import Message, error_fields, first_message, read_error

logger = get_logger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM)
REFUSED = 2  # exit code: the engine told why it did not start
BOOT_SILENCE = 300.0  # seconds without an answer: to load a library may block all threads
END_SECONDS = 5.0  # to end well once the server said so
Build = Callable[[EngineConfig, Sequence[LoraModule], bool], EngineProtocol]


class EngineProcess:
    """An `EngineHost`."""

    def __init__(
        self,
        config: EngineConfig,
        build: Build,
        read_tokenizer: Callable[[EngineConfig], Tokenizer],
        log_format: str = "text",
    ) -> None:
        """`build` makes the engine, in its process: it must be importable there."""
        self.modules: Sequence[LoraModule] = ()
        self._config, self._build, self._log_format = config, build, log_format
        self._read_tokenizer = read_tokenizer
        self._tokenizer: Tokenizer | None = None
        self._facts: EngineFacts | None = None
        self._sock: socket.socket | None = None
        self._first: Message | None = None  # what the engine said, or that it ended
        self._process: Any = None  # a multiprocessing Process
        self._ended = threading.Event()
        self._how = ""

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._tokenizer is not None, "not connected"
        return self._tokenizer

    @property
    def facts(self) -> EngineFacts:
        assert self._facts is not None, "not connected"
        return self._facts

    def launch(self, modules: Sequence[LoraModule], is_restart: bool = False) -> None:
        self.modules = modules
        if self._sock is not None and self._facts is None:
            self._sock.close()  # of one that was never ready: nobody else has it
        mine, theirs = socket.socketpair()
        arguments = (theirs, self._build, self._config, modules, is_restart, self._log_format)
        process = multiprocessing.get_context("spawn").Process(
            target=run_engine, args=arguments, name="vexpert-engine"
        )
        with theirs, _signals_held():
            try:
                process.start()
            except OSError:
                mine.close()
                raise
            # A signal's handler may raise as soon as signals come again.
            self._ended = threading.Event()
            self._sock, self._process, self._facts, self._first = mine, process, None, None
            reap = (process, self._ended)
            threading.Thread(
                target=self._reap, args=reap, name="vexpert-reaper", daemon=True
            ).start()

    def connect(self) -> socket.socket:
        assert self._sock is not None, "not launched"
        if self._facts is None:
            self._facts = self._await_ready(self._sock)
        return self._sock

    def _await_ready(self, sock: socket.socket) -> EngineFacts:
        fault: VexpertError | None = None
        try:
            if not self._ended.is_set():
                self._tokenizer = self._tokenizer or self._read_tokenizer(self._config)
        except VexpertError as error:
            fault = error  # the engine, which reads more, may have a better reason
        kind, told = self._first = self._first or self._await_first(sock)
        if kind == "refused":
            raise read_error(told)
        if kind != "ready":
            raise EngineFailedError(f"the engine did not start: {told}")
        if fault is not None:
            raise fault
        if self._tokenizer is None:
            raise EngineFailedError(f"the engine ended as it was ready: {self.wait()}")
        return EngineFacts(**(told | {"adapters": tuple(told["adapters"])}))

    def _await_first(self, sock: socket.socket) -> Message:
        """What the engine says first, or how it ended. EngineFailedError if it hangs."""
        try:
            return first_message(sock, BOOT_SILENCE) or ["ended", self.wait()]
        except TimeoutError:
            silence = f"its process did not answer for {BOOT_SILENCE:g} seconds"
            raise EngineFailedError(f"the engine hangs as it starts: {silence}") from None

    @property
    def pid(self) -> int:
        """Of the process launched last."""
        assert self._process is not None, "not launched"
        return int(self._process.pid)

    def wait(self) -> str:
        self._ended.wait()
        return self._how

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process, if it has not, and let go of what belongs to it."""
        if self._process is None:
            return
        self.kill()
        self._ended.wait(END_SECONDS)  # one that waits for a dead device may stay
        if self._sock is not None:
            self._sock.close()

    def _reap(self, process: Any, ended: threading.Event) -> None:
        process.join()
        self._how = f"the engine's process ended {_words(process.exitcode)}"
        ended.set()


def _words(code: int) -> str:
    """What an exit code means."""
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"by signal {-code}"


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """A process started inside meets no signal before it ignores them; where there are masks."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # as it is started, signals come again: not amid ours
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_engine(
    sock: socket.socket,
    build: Build,
    config: EngineConfig,
    modules: Sequence[LoraModule],
    is_restart: bool,
    log_format: str,
) -> None:
    """The process: start an engine, say so or why not, and serve the other end of `sock`."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    sock.set_inheritable(False)
    os.dup2(2, 1)  # stdout is the server's
    set_up_logging("vexpert", "INFO", log_format)
    logger.info("the engine runs in process %d", os.getpid())
    loop = EngineLoop(sock, on_lost=lambda: _end(loop))
    try:
        engine = build(config, modules, is_restart)
    except VexpertError as error:
        loop.send("refused", error_fields(error))
        sys.exit(REFUSED)
    except Exception as error:  # whatever it is, the server says why it cannot start
        logger.exception("the engine cannot start")
        loop.send("failed", f"{type(error).__name__}: {error}")
        sys.exit(1)
    settle()
    has_ended_well = loop.run(engine)
    gc.unfreeze()  # else libraries that count their objects at the end miss some
    sys.exit(0 if has_ended_well else 1)


def _end(loop: EngineLoop) -> None:
    """The server is gone: end now, whatever the engine does. If it said so before, it may end."""
    if loop.is_stopping:
        time.sleep(END_SECONDS)
    os._exit(1)
