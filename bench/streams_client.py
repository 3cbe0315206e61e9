"""Many streams of completions at once, asked by clients that cost little: no HTTP library, no JSON.

Each of `processes` processes keeps its share of the streams open over raw connections; an answer
that ends is followed by the next request of the process's share, over the same connection. Used by
`stream_cost.py` and `streams_of_a_model.py`.
"""

import asyncio
import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

DONE, EVENT, TEXT = b"data: [DONE]\n\n", b"data: {", b'"finish_reason":"length"'


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
        self._tail = b""
        self._saw_end = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        if not self._bodies:
            self._transport.close()
            return
        body = self._bodies.pop()
        head = f"POST {self._path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.streams.append(Stream(time.perf_counter()))
        self._tail, self._saw_end = b"", False

    def data_received(self, data: bytes) -> None:
        now, stream = time.perf_counter(), self.streams[-1]
        if not stream.status:
            stream.status = data[:40].partition(b"\r\n")[0].decode()
        data = self._tail + data
        # An event counts when its first bytes are whole; the tail is too short to hold them.
        count = data.count(EVENT)
        stream.event_times += [now] * count
        self._saw_end = self._saw_end or TEXT in data
        is_over = DONE in data
        keep = max(len(EVENT) - 1, 0)
        self._tail = data[-64:] if not count else data[-keep:]
        if EVENT in self._tail:
            self._tail = data[-keep:]
        if is_over or not stream.status.endswith("200 OK"):
            stream.is_whole = self._saw_end and is_over
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
            lambda done=done: Connection(path, bodies, done),  # type: ignore[misc]
            *("127.0.0.1", port),
        )
        connections.append(connection)
        ends.append(done)
    await asyncio.gather(*ends)
    return [stream for connection in connections for stream in connection.streams]


def _work(pipe: Any, port: int, path: str, bodies: list[bytes], at_once: int) -> None:
    pipe.send("ready")
    pipe.recv()
    pipe.send(asyncio.run(_run(port, path, bodies, at_once)))


def ask_all(
    port: int, path: str, bodies: Sequence[dict[str, Any]], at_once: int, processes: int = 1
) -> list[Stream]:
    """Every body's stream, `at_once` at a time."""
    encoded = [json.dumps(body).encode() for body in bodies]
    context = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for i in range(processes):
        ours, theirs = context.Pipe()
        share = encoded[i::processes], len(range(i, at_once, processes))
        worker = context.Process(target=_work, args=(theirs, port, path, *share), daemon=True)
        worker.start()
        pipes.append(ours)
        workers.append(worker)
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send("go")
    streams = [stream for pipe in pipes for stream in pipe.recv()]
    for worker in workers:
        worker.join()
    return streams
