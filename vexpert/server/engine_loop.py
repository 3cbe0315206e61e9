"""The engine's side: one thread owns the engine and steps it; messages come and go by a socket.

What must not meet a step waits for the end of one; adapters load and grammars compile on threads
of their own beside the steps. Writing waits for a server that does not read: memory stays bounded.
"""

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from vexpert.errors import VexpertError
from vexpert.log import get_logger
from vexpert.lora.info import UNUSABLE
from vexpert.server.constraints import Constraints
from vexpert.server.daemon_pool import DaemonPool
from vexpert.server.deltas import Progress
from vexpert.server.interface import EngineFacts, EngineProtocol
from vexpert.server.progress import OverloadedError
from vexpert.server.wire import (
    READ_BYTES,
    Message,
    error_fields,
    info_fields,
    new_unpacker,
    pack,
    read_params,
    stats_fields,
)

logger = get_logger(__name__)

IDLE_CHECK = 5.0  # seconds without work after which the engine's integrity is checked, once
ADAPTER_CALLS = 16  # at once, each waiting for a disk most of the time
NAME_CALLS = 2  # at once, of those that wait for none
TEMPLATE_READS = 4  # at once
SEND_BUFFER = 2**22  # bytes; the system may grant less


def facts_of(engine: EngineProtocol) -> EngineFacts:
    """What the server must know of a ready engine."""
    info = engine.model_info
    usable = {each.name for each in engine.adapters() if each.state not in UNUSABLE}
    return EngineFacts(
        model=engine.config.model,
        name=info.name,
        vocab_size=info.vocab_size,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.config.max_num_seqs,
        adapters=tuple(sorted(usable)),
    )


class EngineLoop:
    """Runs one engine for the server at the other end of `sock`."""

    engine: EngineProtocol  # from `run` on

    def __init__(self, sock: socket.socket, on_lost: Callable[[], None]) -> None:
        """`on_lost`: called on the reading thread when the server is gone."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._sock = sock
        self._on_lost = on_lost
        self._writing = threading.Lock()
        self._wake = threading.Condition()
        self._commands: deque[Message] = deque()
        self._stopping = False
        self._turns = 0  # begun by the thread that steps
        self._is_idle = True
        self._constraints = Constraints(self._reply)
        self._calling = DaemonPool(ADAPTER_CALLS, "vexpert-adapter-call")
        self._naming = DaemonPool(NAME_CALLS, "vexpert-name-call")
        self._reading = DaemonPool(TEMPLATE_READS, "vexpert-template-file")
        self._progress: dict[int, Progress] = {}  # by key; of the engine's thread alone
        self._keys: dict[str, int] = {}
        self._unchecked = True  # steps have run since the last look at the engine's integrity
        self._reader = threading.Thread(target=self._read, name="vexpert-commands", daemon=True)
        self._reader.start()

    def send(self, *message: Any) -> None:
        """Write one message; any thread. Of no use, and harmless, once the server is gone."""
        data = pack(*message)
        with self._writing, contextlib.suppress(OSError):
            self._sock.sendall(data)

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    def stop(self) -> None:
        """Let `run` return before the next step."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def run(self, engine: EngineProtocol) -> bool:
        """Serve until the server says stop or is gone; False: the engine failed."""
        self.engine = engine
        self.send("ready", asdict(facts_of(engine)))
        try:
            while self._run_commands():
                if engine.has_unfinished():
                    self._step()
        except Exception as error:  # whatever it is, the server must hear of it
            logger.exception("the engine failed; every running request gets an error")
            self.send("failed", f"the engine failed: {type(error).__name__}: {error}")
            return False
        finally:
            self._constraints.close()
            self._calling.close()
            self._naming.close()
            self._reading.close()
        for progress in self._progress.values():
            engine.abort(progress.request_id)
        return True

    def close(self) -> None:
        """Close the socket, once nobody sends any more."""
        with contextlib.suppress(OSError):  # not connected any more
            self._sock.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._sock.close()

    # The reading thread.

    def _read(self) -> None:
        unpacker = new_unpacker()
        while data := self._receive():
            unpacker.feed(data)
            for message in unpacker:
                self._take(message)
        self._on_lost()

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(READ_BYTES)
        except OSError:  # the server was killed, or this end is closed
            return b""

    def _take(self, message: Message) -> None:
        if message[0] == "stop":
            self.stop()
        elif message[0] == "beat":
            self.send("beat", self._turns, self._is_idle)
        elif message[0] == "drop":
            self._constraints.drop(message[1])
        elif message[0] == "call" and message[2] == "prepare":
            fields, key = message[3]
            self._constraints.submit(self.engine, message[1], fields, key)
        elif message[0] == "call" and message[2] in QUICK:
            self._answer(*message[1:])
        elif message[0] == "call" and message[2] == "adapter_template":
            self._tell_template(*message[1:])
        elif message[0] == "call" and message[2] in BESIDE:
            self._submit(self._naming if _reads_nothing(message) else self._calling, *message[1:])
        else:
            with self._wake:
                self._commands.append(message)
                self._wake.notify()

    def _tell_template(self, call: int, method: str, arguments: list[Any]) -> None:
        """At once where it is known, as nearly always; else once it is read, behind no load."""
        try:
            is_known = self.engine.adapter_template(arguments[0], may_read=False) is not None
        except VexpertError:
            is_known = True  # the call says the same
        if is_known:
            self._answer(call, method, arguments)
        else:
            self._submit(self._reading, call, method, arguments)

    def _submit(self, pool: DaemonPool, call: int, method: str, arguments: list[Any]) -> None:
        """Answer on a thread of `pool`; the reading thread goes on where there can be none."""
        try:
            pool.submit(self._answer, call, method, arguments)
        except OverloadedError as error:
            self.send("reply", call, error_fields(error), None)

    def _answer(self, call: int, method: str, arguments: list[Any]) -> None:
        """Run a method and reply; any thread."""
        self._reply(call, method, lambda: METHODS[method](self.engine, *arguments))
        if method == "unload":
            with self._wake:
                self._wake.notify()  # a deadline may have come

    def _reply(self, call: int, method: str, work: Callable[[], Any]) -> None:
        """Run `work` and reply with its outcome; any thread."""
        try:
            value = work()
        except (VexpertError, OSError, OverloadedError) as error:
            self.send("reply", call, error_fields(error), None)
        except Exception as error:  # a fault of ours fails one call, not all that run
            logger.exception("a call of the engine met an unexpected error: %s", method)
            self.send("reply", call, error_fields(error), None)
        else:
            self.send("reply", call, None, value)

    # The engine's thread.

    def _run_commands(self) -> bool:
        """Run what has come, sleeping while there is nothing to do; False: stop."""
        self._turns += 1
        with self._wake:
            while not (self._commands or self._stopping or self.engine.has_unfinished()):
                self._is_idle = True
                if not self._wake.wait(IDLE_CHECK if self._unchecked else None):
                    self._unchecked = self._is_idle = False
                    self.engine.check_integrity()
            self._is_idle = False
            if self._stopping:
                return False
            commands, self._commands = self._commands, deque()
        for kind, *arguments in commands:
            getattr(self, f"_on_{kind}")(*arguments)
        return True

    def _on_call(self, call: int, method: str, arguments: list[Any]) -> None:
        self._answer(call, method, arguments)

    def _on_add(self, call: int, key: int, request_id: str, *arguments: Any) -> None:
        prompt, token_ids, params, adapter, version, every_step = arguments

        def add() -> None:
            options = read_params(params)
            self.engine.add_request(request_id, prompt, token_ids, options, adapter, version)
            self._progress[key] = Progress(key, request_id, every_step)
            self._keys[request_id] = key

        self._reply(call, "add", add)

    def _on_abort(self, key: int) -> None:
        progress = self._progress.pop(key, None)
        if progress is not None:
            del self._keys[progress.request_id]
            self.engine.abort(progress.request_id)

    def _step(self) -> None:
        self._unchecked = True
        entries = []
        for output in self.engine.step():
            progress = self._progress[self._keys[output.request_id]]
            entries.append(progress.entry(output))
            if output.finished:
                del self._progress[progress.key]
                del self._keys[output.request_id]
        if entries:
            self.send("step", entries)


def _load(engine: EngineProtocol, name: str, path: str, lazy: bool, options: Any) -> Any:
    call = engine.register_adapter if lazy else engine.load_adapter
    return info_fields(call(name, path, **options))


def _reads_nothing(message: Message) -> bool:
    """Whether a call about an adapter waits for no file: no load that hangs may hold it up."""
    _, _, method, arguments = message
    return bool(method == "unload" or arguments[2])  # a lazy load


def _unload(engine: EngineProtocol, name: str, drain_seconds: float | None) -> None:
    engine.unload_adapter(name, drain_seconds=drain_seconds)


def _template(engine: EngineProtocol, name: str) -> tuple[str | None, str | None, int]:
    """(text, fault, version)."""
    found = engine.adapter_template(name)
    assert found is not None, name
    return found.text, found.fault, found.version


def _page(
    engine: EngineProtocol, after: str | None, most: int, states: list[str], part: str
) -> tuple[list[Any], str | None]:
    infos, last = engine.adapter_listing.page(after, most, frozenset(states), part)
    return [info_fields(info) for info in infos], last


def _named(engine: EngineProtocol, names: list[str]) -> list[Any]:
    return [info_fields(info) for info in engine.adapter_listing.named(names)]


METHODS: dict[str, Callable[..., Any]] = {
    "adapter_page": _page,
    "adapters_named": _named,
    "adapter_names": lambda engine, most: engine.adapter_listing.some_names(most),
    "adapter_folder": lambda engine, name: engine.adapter_folder(name),
    "adapter_template": _template,
    "load": _load,
    "unload": _unload,
    "stats": lambda engine: stats_fields(engine.stats()),
    "check_integrity": lambda engine: engine.check_integrity(),
}
# Run by the reading thread itself.
QUICK = ("adapter_page", "adapters_named", "adapter_names", "adapter_folder")
BESIDE = ("load", "unload")  # on threads of their own
