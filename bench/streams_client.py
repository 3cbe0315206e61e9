"""Many streams of completions at once, asked by clients that cost little: no HTTP library, no JSON.

Each of `processes` processes keeps its share of the streams open over raw connections; an answer
that ends is followed by the next request of the process's share, over the same connection. Used by
`stream_cost.py` and `streams_of_a_model.py`.
"""

import asyncio
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

OK, EVENT, LENGTH = b"HTTP/1.1 200 OK\r\n", b"data: {", b'"finish_reason":"length"'
GO = b"!"
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


@dataclass
class Stream:
    """One answer: seconds of the machine's clock that all processes share."""

    asked: float
    event_times: list[float] = field(default_factory=list)
    is_whole: bool = False  # it ended as asked, by its length
    status: str = ""


class Connection(asyncio.Protocol):
    """Asks the requests of `bodies`, one after another, until there is none."""

    def __init__(self, path: str, bodies: list[bytes], done: "asyncio.Future[None]") -> None:
        self._path, self._bodies, self._done = path, bodies, done
        self.streams: list[Stream] = []
        self._answer = bytearray()
        self._counted = 0  # bytes of it in which events were counted

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        if not self._bodies:
            self._transport.close()
            return
        body = self._bodies.pop()
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.streams.append(Stream(time.perf_counter()))
        self._answer, self._counted = bytearray(), 0

    def data_received(self, data: bytes) -> None:
        now, stream, answer = time.perf_counter(), self.streams[-1], self._answer
        answer += data
        stream.event_times += [now] * answer.count(EVENT, self._counted)
        self._counted = max(self._counted, len(answer) - len(EVENT) + 1)
        if not answer.startswith(OK) or answer.endswith(END):
            stream.status = answer[:40].partition(b"\r\n")[0].decode()
            stream.is_whole = answer.rfind(LENGTH) >= 0 and answer.endswith(END)
            self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


async def _run(port: int, path: str, bodies: list[bytes], at_once: int) -> list[Stream]:
    loop = asyncio.get_running_loop()
    connections, ends = [], []
    for _ in range(min(at_once, len(bodies))):
        done: asyncio.Future[None] = loop.create_future()
        _, connection = await loop.create_connection(
            partial(Connection, path, bodies, done),
            *("127.0.0.1", port),
        )
        connections.append(connection)
        ends.append(done)
    await asyncio.gather(*ends)
    return [stream for connection in connections for stream in connection.streams]


def ask_all(
    port: int, path: str, bodies: Sequence[dict[str, Any]], at_once: int, processes: int = 1
) -> list[Stream]:
    """Every body's stream, `at_once` at a time."""
    encoded = [json.dumps(body).encode() for body in bodies]
    workers = [
        subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(processes)
    ]
    for i, worker in enumerate(workers):
        assert worker.stdin is not None
        job = port, path, encoded[i::processes], len(range(i, at_once, processes))
        pickle.dump(job, worker.stdin)
        worker.stdin.flush()
    for worker in workers:  # all are ready before the first asks
        assert worker.stdout is not None
        assert worker.stdout.read(1) == GO
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(GO)
        worker.stdin.close()
    streams = []
    for worker in workers:
        assert worker.stdout is not None
        streams += [Stream(*fields) for fields in pickle.load(worker.stdout)]
        worker.wait()
    return streams


def main() -> None:
    """One process: a pickled job comes by standard input, its streams go to standard output."""
    job = pickle.load(sys.stdin.buffer)
    os.write(1, GO)
    assert sys.stdin.buffer.read(1) == GO
    streams = asyncio.run(_run(*job))
    sys.stdout.buffer.write(pickle.dumps([tuple(vars(stream).values()) for stream in streams]))


if __name__ == "__main__":
    main()
