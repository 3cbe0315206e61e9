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
from helpers_server import BASE, make_fake_engine, serving, wait_for
from test_engine_process import FAKE, LONG, is_gone
from test_engine_process import serving as serving_process

from vexpert.server import engine_process, wire
from vexpert.server.options import ServerOptions
from vexpert.server.progress import EngineFailedError


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """The command with a time limit for requests; its engine goes on at the end of each test."""
    with serving_process(FAKE, "--request-timeout", "3") as running:
        yield running


@pytest.fixture
def stopped(server: Any) -> Iterator[Any]:
    [engine] = server.engines()
    os.kill(engine, signal.SIGSTOP)
    yield server
    os.kill(engine, signal.SIGCONT)
    wait_for(lambda: server.get("/v1/models").status_code == 200)
    assert server.ask("upper", "hello") == "HELLO"


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
    [engine] = server.engines()
    body = LONG | {"stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(engine, signal.SIGSTOP)
        try:
            events = [line.removeprefix("data: ") for line in lines if line]
        finally:
            os.kill(engine, signal.SIGCONT)
    assert json.loads(events[-2])["error"]["code"] == "timeout"
    assert events[-1] == "[DONE]"


def test_a_stopped_engine_is_noticed_and_replaced() -> None:
    with serving_process(FAKE, "--engine-step-timeout", "2") as server:
        [engine] = server.engines()
        os.kill(engine, signal.SIGSTOP)
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(server.post("/tokenize", CHAT)))
        asking.start()
        wait_for(lambda: server.get("/ready").status_code == 503)
        assert server.get("/health").status_code == 200  # not given up
        asking.join()
        assert answers[0].status_code == 503
        assert "hangs" in answers[0].json()["error"]["message"]
        wait_for(lambda: server.get("/ready").status_code == 200)
        assert server.ask("upper", "hello") == "HELLO"
        assert is_gone(engine)
    assert "Traceback" not in "".join(server.log)
    assert "has not answered" in "".join(server.log)  # before it was taken for hung


CHAT = {"model": "upper", "messages": [{"role": "user", "content": "x"}]}


def test_at_the_end_requests_of_a_stopped_engine_are_told() -> None:
    with serving_process(FAKE, "--shutdown-timeout", "0.3") as server:
        [engine] = server.engines()
        os.kill(engine, signal.SIGSTOP)
        answers: list[httpx.Response] = []
        ask = [lambda: server.post("/v1/completions", LONG), lambda: server.get("/v1/models")]
        asking = [threading.Thread(target=lambda f=f: answers.append(f())) for f in ask]
        for each in asking:
            each.start()
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        for each in asking:
            each.join()
        assert [answer.status_code for answer in answers] == [503, 503]
        assert {answer.json()["error"]["code"] for answer in answers} == {"shutting_down"}
        assert server.process.wait(60) == 0
        wait_for(lambda: is_gone(engine))
    assert "Traceback" not in "".join(server.log)


def test_a_step_that_never_ends_is_a_hang_and_a_long_one_is_not() -> None:
    async def scenario() -> None:
        with process_host() as host:
            async with started(host, max_restarts=1, step_timeout=1.0) as engine:
                pid = host.pid
                sink = await submit(engine, "a", prompt="hang")
                begun = time.monotonic()
                await until(lambda: engine.failure or engine.doubt or is_ended(sink))
                assert time.monotonic() - begun > 0.9
                await until(lambda: is_ended(sink))
                assert isinstance(sink[-1], EngineFailedError)
                assert "a step took more than 1 seconds" in str(sink[-1])
                await until(lambda: engine.failure is None)
                assert host.pid != pid
                await until(lambda: engine.doubt is None)
                other = await submit(engine, "b")
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
    begun, stopped, boots = tmp_path / "begun", threading.Event(), itertools.count(1)

    def first_message(sock: socket.socket, silence: float) -> Any:
        if (boot := next(boots)) == 2:
            assert stopped.wait(60)
        return wire.first_message(sock, silence if boot == 2 else 60.0)

    monkeypatch.setattr(engine_process, "first_message", first_message)
    if at_once:
        begun.touch()  # what comes after the stopped one starts without delay

    async def scenario() -> None:
        with process_host(f"slow once: {begun}") as host:
            async with started(host, max_restarts=2) as engine:
                first = host.pid
                host.kill()
                await until(lambda: host.pid != first)
                second = host.pid
                await until(begun.exists)
                assert engine.is_restarting
                os.kill(second, signal.SIGSTOP)
                stopped.set()
                await until(lambda: host.pid != second)
                assert engine.failure is not None
                assert "did not answer for 1 seconds" in str(engine.failure)
                assert is_gone(second)
                await until(lambda: engine.failure is None)
                sink = await submit(engine, "a")  # the messages are still whole
                await until(lambda: is_ended(sink))
                assert sink.text().startswith("abc")

    asyncio.run(scenario())
