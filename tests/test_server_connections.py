"""More connections than there is room for: the limit of open files is never met."""

import contextlib
import http.client
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from helpers_raw_http import connect, is_cut, request_bytes, rest_of
from helpers_server import BASE, make_fake_engine
from helpers_wait import wait_for
from test_server_shutdown import drained, end

from vexpert.errors import ConfigError
from vexpert.server import acceptor, connections, scrape
from vexpert.server.listen import RESERVED_FILES, most_connections

HALF = b"GET /health HTTP/1.1\r\nHost: x\r\n"
SLOW = request_bytes({"prompt": "x" * 10**6})[:1000]
SHORT = {"model": BASE, "prompt": "x", "ignore_eos": True, "max_tokens": 3}
LONG = {"model": BASE, "prompt": "x", "ignore_eos": True, "max_tokens": 200, "stream": True}


@contextlib.contextmanager
def half_open(url: str, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(connect(url)) for _ in range(count)]
        for each in found:
            each.sendall(HALF)
        yield found


def test_half_open_connections_make_room(caplog: pytest.LogCaptureFixture) -> None:
    answered: list[float] = []

    def work(url: str) -> None:
        with half_open(url, 100) as many:
            begun = time.monotonic()
            for _ in range(3):
                assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 200
            answered.append(time.monotonic() - begun)
            assert is_cut(many[0])
        end()

    with caplog.at_level(logging.WARNING, "vexpert"):
        assert drained(make_fake_engine(), 5.0, work, max_connections=8, write_timeout=1) == 0
    assert answered[0] < 20
    assert len([each for each in caplog.records if "max_connections" in each.message]) == 1


def test_beside_running_requests_only_probes_and_metrics_are_answered() -> None:
    engine = make_fake_engine()
    engine.step_seconds = 0.1

    def work(url: str) -> None:
        with contextlib.ExitStack() as stack:
            running = [stack.enter_context(connect(url)) for _ in range(4)]
            for each in running:
                each.sendall(request_bytes(LONG))
            wait_for(lambda: len(engine.requests) == 4)
            with httpx.Client(base_url=url, timeout=60) as client:
                paths = ("/health", "/ready", "/metrics", "/v1/models")
                for path, status in zip(paths, (200, 200, 200, 503), strict=True):
                    answer = client.get(path)
                    assert answer.status_code == status
                    assert answer.headers["connection"] == "close"
                assert answer.json()["error"]["code"] == "too_many_connections"
                assert answer.headers["retry-after"] == "1"
                engine.step_seconds = 0.0
                for each in running:
                    assert each.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
                    each.close()
                wait_for(lambda: client.get("/v1/models").status_code == 200)
        end()

    assert drained(engine, 5.0, work, max_connections=4) == 0


def test_more_than_those_wait_to_be_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask at once: no more are open than may be."""
    monkeypatch.setattr(acceptor, "SPARE", 3)
    most = 0
    connected = acceptor.Acceptor._connect

    async def watched(self: acceptor.Acceptor, *arguments: object) -> None:
        nonlocal most
        await connected(self, *arguments)  # type: ignore[arg-type]
        most = max(most, len(self._open))

    monkeypatch.setattr(acceptor.Acceptor, "_connect", watched)

    def work(url: str) -> None:
        with half_open(url, 50):
            wait_for(lambda: most == 5 + 3)
        end()

    assert drained(make_fake_engine(), 5.0, work, max_connections=5) == 0
    assert most == 5 + 3


def test_a_failed_accept_is_told_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "RETRY_SECONDS", 0.01)
    failures = iter(range(20))

    class Failing(acceptor.Acceptor):
        async def _accept(self) -> socket.socket:
            if next(failures, None) is not None:
                raise OSError(24, "Too many open files")
            return await super()._accept()

    monkeypatch.setattr("vexpert.server.run.Acceptor", Failing)

    def work(url: str) -> None:
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        end()

    with caplog.at_level(logging.WARNING, "vexpert"):
        assert drained(make_fake_engine(), 5.0, work) == 0
    told = [each.message for each in caplog.records if "Too many open files" in each.message]
    assert len(told) == 1


def test_the_number_follows_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1000, 1000))
    assert most_connections(None) == 1000 - RESERVED_FILES
    assert most_connections(7) == 7
    for wanted in (0, -1, 1001 - RESERVED_FILES):
        with pytest.raises(ConfigError, match=rf"max_connections={wanted}: use 1 to .*1000"):
            most_connections(wanted)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (RESERVED_FILES, 1000))
    with pytest.raises(ConfigError, match="ulimit -n"):
        most_connections(None)


def test_half_bodies_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a byte of them comes now and then."""
    monkeypatch.setattr(connections, "BODY_SECONDS", 1.0)

    def work(url: str) -> None:
        with contextlib.ExitStack() as stack:
            slow = [stack.enter_context(connect(url)) for _ in range(4)]
            for each in slow:
                each.sendall(SLOW)

            def is_answered() -> bool:
                for each in slow:
                    with contextlib.suppress(ConnectionError):  # it was told to go
                        each.sendall(b" ")
                return httpx.get(f"{url}/v1/models", timeout=60).status_code == 200

            wait_for(is_answered)
        end()

    assert drained(make_fake_engine(), 5.0, work, max_connections=4, write_timeout=1) == 0


def test_a_half_body_in_a_full_house_gets_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_SECONDS", 1.0)

    def work(url: str) -> None:
        with connect(url) as slow:
            slow.sendall(request_bytes(SHORT)[:-20])
            wait_for(lambda: httpx.get(f"{url}/v1/models", timeout=60).status_code == 200)
            answer = rest_of(slow)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"\r\nconnection: close" in head.lower()
        assert b'"too_many_connections"' in body
        end()

    assert drained(make_fake_engine(), 5.0, work, max_connections=1, write_timeout=1) == 0


def test_beside_free_places_a_slow_body_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.5)
    waited = watch_bodies(monkeypatch)

    def work(url: str) -> None:
        with connect(url) as slow:
            slow.sendall(request_bytes(SHORT)[:-20])
            wait_for(lambda: max(waited) > 2 * connections.BODY_SECONDS)
            assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 200
            slow.sendall(request_bytes(SHORT)[-20:])
            assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        end()

    assert drained(make_fake_engine(), 5.0, work, max_connections=4, write_timeout=1) == 0


def test_who_left_amid_its_body_just_before_the_end_does_not_hold_it_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no look between: what the last one found is a request that waits for its body."""
    looks: list[tuple[connections.Connections, Any, float]] = []
    faults: list[Exception | None] = []
    look_at_body = connections.Connections._look_at_body
    end_slow_bodies = connections.Connections.end_slow_bodies

    def watched_look(self: connections.Connections, protocol: Any, look: Any) -> None:
        look_at_body(self, protocol, look)
        looks.append((self, protocol, look.body_seconds))

    def watched_end(self: connections.Connections, error: Exception) -> None:
        fault = None
        try:
            end_slow_bodies(self, error)
        except RuntimeError as raised:  # raised on, it would end the task that ends the server
            fault = raised
        faults.append(fault)

    monkeypatch.setattr(connections.Connections, "_look_at_body", watched_look)
    monkeypatch.setattr(connections.Connections, "end_slow_bodies", watched_end)
    engine = make_fake_engine()
    engine.held_at = 3

    def work(url: str) -> None:
        with connect(url) as running:
            running.sendall(request_bytes(LONG))
            wait_for(lambda: len(engine.requests) == 1)
            with connect(url) as slow:
                slow.sendall(SLOW)
                wait_for(lambda: any(seconds > 0 for _, _, seconds in looks))
                looks[0][0]._interval = 3600.0  # no look after the next one
                wait_for(lambda: any(seconds >= 3600 for _, _, seconds in looks))
            protocol = looks[-1][1]
            wait_for(lambda: len(protocol.tasks) == 1)  # the stream's alone
            end()
            wait_for(lambda: bool(faults))
            engine.held_at = None
            assert b"data: [DONE]" in rest_of(running)

    assert drained(engine, 60.0, work, max_connections=4, write_timeout=1) == 0
    assert not any(faults)


def test_the_pace_of_a_body() -> None:
    """What came fast before is no credit; what the server does not read yet is not the client's."""
    looking = connections.Connections([], 4.0)  # a look a second
    cycle = SimpleNamespace(more_body=True, response_started=False, response_complete=False)
    flow = SimpleNamespace(read_paused=False)
    protocol: Any = SimpleNamespace(cycle=cycle, flow=flow, received=0)
    look = connections._Look(cycle=cycle)
    for sent, seconds in ((2**20, 0.0), (0, 1.0), (2**14 - 1, 2.0), (1, 0.0), (1, 1.0)):
        protocol.received += sent
        looking._look_at_body(protocol, look)
        assert look.body_seconds == seconds
    for _ in range(3):
        assert looking._waited(protocol, look) == 0.0
        looking._look_at_body(protocol, look)
    assert looking._waited(protocol, look) == 4.0
    cycle.response_started = True
    assert looking._waited(protocol, look) == 0.0
    cycle.response_started = False
    flow.read_paused = True
    looking._look_at_body(protocol, look)
    assert look.body_seconds == 0.0


def test_scrapes_hold_few_of_the_extra_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the engine answers none of them: probes have the others."""
    monkeypatch.setattr(scrape, "SECONDS", 60.0)
    engine = make_fake_engine()
    held, stats = threading.Event(), engine.stats

    def late_stats() -> Any:
        assert held.wait(60)
        return stats()

    def work(url: str) -> None:
        with contextlib.ExitStack() as stack:
            running = stack.enter_context(connect(url))
            running.sendall(request_bytes(LONG))
            wait_for(lambda: len(engine.requests) == 1)
            monkeypatch.setattr(engine, "stats", late_stats)
            scraping = [stack.enter_context(connect(url)) for _ in range(acceptor.MOST_SCRAPING)]
            for each in scraping:
                each.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = httpx.get(f"{url}/metrics", timeout=60)
            assert answer.json()["error"]["code"] == "too_many_connections"
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
            held.set()
            for each in scraping:
                assert each.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            wait_for(lambda: httpx.get(f"{url}/metrics", timeout=60).status_code == 200)
        end()

    engine.held_at = 3
    assert drained(engine, 5.0, work, max_connections=1) == 0


def test_a_short_wait_in_a_full_house_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that are answered while others wait for a place are closed."""
    monkeypatch.setattr(acceptor, "WAIT_SECONDS", 60.0)
    engine = make_fake_engine()
    engine.held_at = 3

    def work(url: str) -> None:
        with contextlib.ExitStack() as stack:
            running, waiting = (stack.enter_context(connect(url)) for _ in range(2))
            running.sendall(request_bytes(SHORT | {"max_tokens": 9}))
            wait_for(lambda: len(engine.requests) == 1)
            waiting.sendall(request_bytes(SHORT))
            wait_for(lambda: any(each._waiting for each in acceptors))
            engine.held_at = None
            assert answered(running).getheader("connection") == "close"
            assert answered(waiting).getheader("connection") is None
            waiting.sendall(request_bytes(SHORT))  # the place is its own now
            answered(waiting)
        end()

    acceptors = watch_acceptors(monkeypatch)
    assert drained(engine, 5.0, work, max_connections=1) == 0


def test_few_wait_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are refused at once, and so are probes answered."""
    monkeypatch.setattr(acceptor, "WAIT_SECONDS", 3600.0)
    engine = make_fake_engine()
    engine.held_at = 3

    def work(url: str) -> None:
        with contextlib.ExitStack() as stack:
            running = stack.enter_context(connect(url))
            running.sendall(request_bytes(LONG))
            wait_for(lambda: len(engine.requests) == 1)
            waiting = [stack.enter_context(connect(url)) for _ in range(acceptor.MOST_WAITING)]
            for each in waiting:
                each.sendall(request_bytes(SHORT))
            wait_for(lambda: any(each._waiting == len(waiting) for each in acceptors))
            assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 503
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
            for each in waiting[1:]:
                each.close()
            wait_for(lambda: any(each._waiting == 1 for each in acceptors))
            engine.held_at = None
            assert waiting[0].recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        end()

    acceptors = watch_acceptors(monkeypatch)
    assert drained(engine, 5.0, work, max_connections=1) == 0


def test_half_requests_take_no_place_that_a_whole_one_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor one of those to wait at, though they come first."""
    monkeypatch.setattr(acceptor, "WAIT_SECONDS", 3600.0)
    monkeypatch.setattr(acceptor, "WHOLE_SECONDS", 3600.0)
    monkeypatch.setattr(acceptor, "MOST_WAITING", 1)
    engine = make_fake_engine()
    engine.held_at = 3

    def work(url: str) -> None:
        with contextlib.ExitStack() as stack:
            running, half, whole = (stack.enter_context(connect(url)) for _ in range(3))
            running.sendall(request_bytes(SHORT | {"max_tokens": 9}))
            wait_for(lambda: len(engine.requests) == 1)
            half.sendall(SLOW)
            wait_for(lambda: any(each._extra for each in acceptors))
            whole.sendall(request_bytes(SHORT | {"stream": True}))
            wait_for(lambda: any(each._waiting for each in acceptors))
            engine.held_at = None
            answered(running)
            assert whole.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        end()

    acceptors = watch_acceptors(monkeypatch)
    assert drained(engine, 5.0, work, max_connections=1) == 0


@pytest.mark.parametrize("is_crowded", [False, True])
def test_half_requests_in_a_full_house_get_503(
    is_crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sooner where many are there, whatever else they would be granted."""
    monkeypatch.setattr(acceptor, "WHOLE_SECONDS", 3600.0 if is_crowded else 0.5)
    monkeypatch.setattr(acceptor, "SPARE", 4 if is_crowded else 32)
    engine = make_fake_engine()
    engine.held_at = 3

    def work(url: str) -> None:
        with contextlib.ExitStack() as stack:
            running = stack.enter_context(connect(url))
            running.sendall(request_bytes(LONG))
            wait_for(lambda: len(engine.requests) == 1)
            halves = [stack.enter_context(connect(url)) for _ in range(3)]
            for each in halves:
                each.sendall(SLOW)
            for each in halves:
                answer = rest_of(each)
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b'"too_many_connections"' in answer
            engine.held_at = None
            assert running.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        end()

    assert drained(engine, 5.0, work, max_connections=1) == 0


def test_as_much_room_is_made_as_is_waited_for() -> None:
    asked: list[int] = []

    def close_idle(most: int) -> bool:
        asked.append(most)
        return True

    looking: Any = SimpleNamespace(close_idle=close_idle)
    bound, make = cast("Any", None), cast("Any", None)
    for most in (8, 100):
        accepting = acceptor.Acceptor(bound, make, (), looking, most)
        for waiting in (0, 5, 100):
            accepting._waiting = waiting
            accepting._make_room()
    assert asked == [1, 5, 32, 12, 12, 32]


def test_a_half_body_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_SECONDS", 1.0)
    waited, told = watch_bodies(monkeypatch), b""

    def work(url: str) -> None:
        nonlocal told
        with connect(url) as slow:
            slow.sendall(SLOW)
            wait_for(lambda: max(waited) > 0.0)
            end()
            told = rest_of(slow)

    assert drained(make_fake_engine(), 20.0, work, write_timeout=1) == 0
    assert told.startswith(b"HTTP/1.1 503 ")
    assert b"too slowly" in told


def answered(sock: socket.socket) -> http.client.HTTPResponse:
    """One whole answer, which is 200."""
    response = http.client.HTTPResponse(sock)
    response.begin()
    assert response.status == 200
    response.read()
    return response


def watch_bodies(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how many seconds a body came slowly, at each look from now on; the first one is 0."""
    found = [0.0]
    look_at_body = connections.Connections._look_at_body

    def watched(self: connections.Connections, protocol: Any, look: Any) -> None:
        look_at_body(self, protocol, look)
        found.append(look.body_seconds)

    monkeypatch.setattr(connections.Connections, "_look_at_body", watched)
    return found


def watch_acceptors(monkeypatch: pytest.MonkeyPatch) -> list[acceptor.Acceptor]:
    """Those that run from now on."""
    found: list[acceptor.Acceptor] = []
    run = acceptor.Acceptor.run

    async def watched(self: acceptor.Acceptor) -> None:
        found.append(self)
        await run(self)

    monkeypatch.setattr(acceptor.Acceptor, "run", watched)
    return found
