"""An engine that is stopped or never ends a step: requests end, it is noticed and replaced."""

import asyncio
import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers_hosts import is_ended, process_host, started, submit, until
from helpers_raw_http import connect, request_bytes
from helpers_serve_process import GATE, HELD_AT
from helpers_server import BASE, make_fake_engine, serving
from helpers_wait import wait_for
from test_engine_process import FAKE, LONG, is_gone
from test_engine_process import serving as serving_process

from vexpert.engine.sampling_params import SamplingParams
from vexpert.server import engine_client, engine_process, wire
from vexpert.server.heartbeat import Heartbeat
from vexpert.server.options import ServerOptions
from vexpert.server.progress import EngineFailedError

CHAT = {"model": "upper", "messages": [{"role": "user", "content": "hello"}]}
SHORT = SamplingParams(max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """The command with a time limit for requests; its engine goes on at the end of each test.

    A long request stands still after its first tokens, until that limit.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HELD_AT, "9")
        with serving_process(FAKE, "--request-timeout", "3") as running:
            yield running


def engine_of(server: Any) -> int:
    """The process of its only engine, once the log has told it."""
    wait_for(lambda: bool(server.engines()))
    [engine] = server.engines()
    return int(engine)


def wait_for_an_answer(server: Any) -> None:
    """The first ones after a halt, or on a crowded machine, may meet a time limit."""
    answers: list[httpx.Response] = []

    def ask() -> int:
        answers.append(server.post("/v1/chat/completions", CHAT | {"temperature": 0}))
        return answers[-1].status_code

    wait_for(lambda: ask() == 200)
    assert answers[-1].json()["choices"][0]["message"]["content"] == "HELLO"


@pytest.fixture
def stopped(server: Any) -> Iterator[Any]:
    engine = engine_of(server)
    os.kill(engine, signal.SIGSTOP)
    yield server
    os.kill(engine, signal.SIGCONT)
    wait_for_an_answer(server)


def test_the_deadline_holds_and_metrics_answer_while_the_engine_is_stopped(stopped: Any) -> None:
    """All at once: each waits for its own deadline."""

    def ask(method: str, path: str, body: Any = None) -> httpx.Response:
        return httpx.request(method, stopped.url + path, json=body, timeout=60)

    requests: list[tuple[Any, ...]] = [
        ("POST", "/v1/completions", LONG),
        ("POST", "/v1/completions", LONG | {"stream": True}),
        ("POST", "/tokenize", {"model": "upper", "prompt": "x"}),
        ("GET", "/v1/models"),
    ]
    with ThreadPoolExecutor(len(requests) + 1) as pool:
        pages = pool.submit(lambda: [ask("GET", "/metrics") for _ in range(2)])
        answers = list(pool.map(lambda request: ask(*request), requests))
    for answer in answers:
        assert answer.status_code == 504, answer.text
        assert answer.json()["error"]["code"] == "timeout"
        assert answer.headers["x-request-id"]
    for answer in pages.result():
        assert answer.status_code == 200, answer.text
        assert "vexpert:engine_answers 0.0" in answer.text
        assert "vexpert:engine_restarts_total 0.0" in answer.text


def test_a_stream_ends_at_the_deadline_while_the_engine_is_stopped(server: Any) -> None:
    engine = engine_of(server)
    statuses: list[int] = []
    events: list[str] = []

    def ask() -> int:
        body = LONG | {"stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(engine, signal.SIGSTOP)
            try:
                events[:] = [line.removeprefix("data: ") for line in lines if line]
            finally:
                os.kill(engine, signal.SIGCONT)
            statuses.append(stream.status_code)
        return statuses[-1]

    wait_for(lambda: ask() == 200)  # 504 where it does not begin in time
    assert set(statuses) <= {200, 504}
    assert json.loads(events[-2])["error"]["code"] == "timeout"
    assert events[-1] == "[DONE]"


def test_a_stopped_engine_is_noticed_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv(GATE, str(gate))  # the next engine waits for it
    words = ("--engine-step-timeout", "3", "--engine-restarts", "100")
    with serving_process(FAKE, *words) as server:
        engine = engine_of(server)
        os.kill(engine, signal.SIGSTOP)
        answer = server.post("/tokenize", CHAT)
        assert answer.status_code == 503
        assert "hangs" in answer.json()["error"]["message"]
        assert server.get("/ready").status_code == 503
        assert server.get("/health").status_code == 200  # not given up
        wait_for(lambda: is_gone(engine))
        gate.touch()
        wait_for(lambda: server.get("/ready").status_code == 200)
        wait_for_an_answer(server)
    assert "Traceback" not in "".join(server.log)
    assert "has not answered" in "".join(server.log)  # before it was taken for hung


def all_of(sock: socket.socket) -> str:
    """All that the server sends before it closes the connection."""
    content = b""
    while piece := sock.recv(2**16):
        content += piece
    return content.decode()


def test_at_the_end_requests_of_a_stopped_engine_are_told() -> None:
    with serving_process(FAKE, "--shutdown-timeout", "0.3") as server:
        engine = engine_of(server)
        os.kill(engine, signal.SIGSTOP)
        models = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
        with connect(server.url) as one, connect(server.url) as other:
            one.sendall(request_bytes(LONG))
            other.sendall(models)
            # Connections are taken in their order: once this one is answered, those wait.
            assert server.get("/health").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            for each in (one, other):
                answer = all_of(each)
                assert answer.startswith("HTTP/1.1 503 ")
                assert '"code":"shutting_down"' in answer
        assert server.process.wait(60) == 0
        wait_for(lambda: is_gone(engine))
    assert "Traceback" not in "".join(server.log)


class OfSteps(Heartbeat):
    """Looks at steps alone: a crowded machine may hold up the answers of the process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._silence = self._doubt = 200.0


def test_a_step_that_never_ends_is_a_hang_and_a_long_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_client, "Heartbeat", OfSteps)

    async def scenario() -> None:
        with process_host() as host:
            async with started(host, max_restarts=1, step_timeout=3.0) as engine:
                pid = host.pid
                begun = time.monotonic()
                sink = await submit(engine, "a", prompt="hang")
                await until(lambda: engine.failure or is_ended(sink))
                assert time.monotonic() - begun > 2.9
                await until(lambda: is_ended(sink))
                assert isinstance(sink[-1], EngineFailedError)
                assert "a step took more than 3 seconds" in str(sink[-1])
                await until(lambda: engine.failure is None)
                assert host.pid != pid
                await until(lambda: engine.doubt is None)
                other = await submit(engine, "b", params=SHORT)
                await until(lambda: is_ended(other))

    asyncio.run(scenario())


def test_loads_may_take_longer_than_requests() -> None:
    engine = make_fake_engine()
    engine.load_seconds = 0.6
    options = ServerOptions((BASE,), request_timeout=0.2, status_interval=None)
    with serving(engine, options) as running:
        body = {"lora_name": "more", "lora_path": "bundled"}
        assert running.post("/v1/load_lora_adapter", json=body).status_code == 200


@pytest.mark.parametrize("at_once", [True, False])
def test_an_engine_that_is_stopped_while_it_starts_again_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at_once: bool
) -> None:
    """At once, or in the middle of its start; the next one has all the time it needs."""
    monkeypatch.setattr(engine_process, "BOOT_SILENCE", 1.0)
    stopped, boots = threading.Event(), itertools.count(1)

    def first_message(sock: socket.socket, silence: float) -> Any:
        if (boot := next(boots)) == 2:
            assert stopped.wait(60)
        return wire.first_message(sock, silence if boot == 2 else 60.0)

    monkeypatch.setattr(engine_process, "first_message", first_message)

    async def scenario() -> None:
        with process_host(f"gate: {tmp_path}") as host:
            async with started(host, max_restarts=2) as engine:
                first = host.pid
                host.kill()
                await until(lambda: host.pid != first)
                second = host.pid
                if not at_once:
                    await until((tmp_path / "begun").exists)
                assert engine.is_restarting
                os.kill(second, signal.SIGSTOP)
                (tmp_path / "go").touch()  # the next one starts without delay
                stopped.set()
                await until(lambda: host.pid != second)
                assert engine.failure is not None
                assert "did not answer for 1 seconds" in str(engine.failure)
                assert is_gone(second)
                await until(lambda: engine.failure is None)
                sink = await submit(engine, "a", params=SHORT)  # the messages are still whole
                await until(lambda: is_ended(sink))
                assert sink.text().startswith("abc")

    asyncio.run(scenario())
