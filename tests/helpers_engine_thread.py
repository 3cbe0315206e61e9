"""An engine on a thread of this process: tests can then look at it and make it fail.

Server and engine speak the same messages as between two processes. It cannot start anew.
"""

import socket
import threading
from collections.abc import Sequence

from vexpert.server.engine_loop import EngineLoop, facts_of
from vexpert.server.interface import EngineFacts, EngineProtocol, LoraModule, Tokenizer
from vexpert.server.progress import EngineFailedError
from vexpert.server.wire import first_message


class EngineThread:
    """An `EngineHost` around an engine that exists."""

    modules: tuple[LoraModule, ...] = ()

    def __init__(self, engine: EngineProtocol) -> None:
        self.engine = engine
        self._thread: threading.Thread | None = None
        self._sock: socket.socket | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer: Tokenizer = self.engine.tokenizer
        return tokenizer

    @property
    def facts(self) -> EngineFacts:
        return facts_of(self.engine)

    def launch(self, modules: Sequence[LoraModule], is_restart: bool = False) -> None:
        """Nothing to start: `connect` does."""
        if is_restart:
            raise EngineFailedError("an engine in a thread cannot start anew")

    def connect(self) -> socket.socket:
        if self._sock is None:
            self._sock, theirs = socket.socketpair()
            self._thread = threading.Thread(
                target=self._run, args=(theirs,), name="vexpert-engine", daemon=True
            )
            self._thread.start()
            first_message(self._sock)  # its facts, which `facts` reads off the engine
        return self._sock

    def _run(self, sock: socket.socket) -> None:
        loop = EngineLoop(sock, on_lost=lambda: loop.stop())
        try:
            loop.run(self.engine)
        finally:
            loop.close()

    def wait(self) -> str:
        assert self._thread is not None, "not started"
        self._thread.join()
        return "the engine's thread has ended"

    def kill(self) -> None:
        """A thread ends by itself when its server has gone."""
