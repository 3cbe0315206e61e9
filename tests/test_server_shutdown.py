"""A signal: accepted requests end well or are told, new ones get 503, the exit code is 0."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import httpx
import pytest
from helpers_engine_thread import EngineThread
from helpers_raw_http import request_bytes
from helpers_server import BASE, FakeEngine, make_fake_engine
from helpers_wait import wait_for

from vexpert.server import run as run_module
from vexpert.server.app import create_app
from vexpert.server.listen import bind, url_of
from vexpert.server.options import ServerOptions
from vexpert.server.run import run

BODY: dict[str, Any] = {"model": BASE, "prompt": "x", "ignore_eos": True}
PATIENCE: dict[str, Any] = {
    "CLOSE_SECONDS": 60,
    "HURRIED_SECONDS": 60.0,
    "LAST_RESORT_SECONDS": 120.0,
}


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """A server that nobody hurries, and a process that a late signal does not end."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with mock.patch.multiple(run_module, **PATIENCE):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


def drained(engine: FakeEngine, seconds: float, work: Any, **more: Any) -> int:
    """The exit code of a server of which `work(url)` is run beside; it must send a signal."""
    options = ServerOptions((BASE,), status_interval=None, shutdown_timeout=seconds, **more)
    app = create_app(EngineThread(engine), options)
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work(url)
        except BaseException as error:  # noqa: BLE001 - told to the test, below
            failures.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    beside = threading.Thread(target=guarded)
    with patient():
        with bind("127.0.0.1", 0) as bound:
            url = url_of(bound, "127.0.0.1")
            code = run(app, bound, on_ready=beside.start)
        beside.join(60)
    assert not beside.is_alive()
    if failures:
        raise failures[0]
    return code


def end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_request_on_its_way_at_the_signal_gets_503() -> None:
    app = create_app(EngineThread(make_fake_engine()), ServerOptions((BASE,), status_interval=None))
    late: list[socket.socket] = []
    with patient(), bind("127.0.0.1", 0) as bound:

        def send() -> None:
            late.append(socket.create_connection(bound.getsockname()))
            late[0].sendall(request_bytes(BODY))

        def on_ready() -> None:
            end()
            asyncio.get_running_loop().call_later(0.12, send)  # uvicorn ends after 0.1 at most

        assert run(app, bound, on_ready) == 0
    with late[0]:
        late[0].settimeout(60)
        assert late[0].recv(2**16).startswith(b"HTTP/1.1 503 ")


def test_under_load_accepted_requests_finish_and_new_ones_get_503() -> None:
    engine = make_fake_engine()
    engine.held_at = 3  # until everything is seen that is to be seen before their end

    def work(url: str) -> None:
        with ThreadPoolExecutor(24) as pool, httpx.Client(timeout=60) as client:
            whole = [
                pool.submit(
                    client.post, f"{url}/v1/completions", json=BODY | {"max_tokens": 60 + i}
                )
                for i in range(12)
            ]
            streams = [
                pool.submit(
                    client.post,
                    f"{url}/v1/completions",
                    json=BODY | {"max_tokens": 60 + i, "stream": True},
                )
                for i in range(12)
            ]
            wait_for(lambda: len(engine.requests) == 24)
            end()
            wait_for(lambda: httpx.get(f"{url}/ready", timeout=60).status_code == 503)
            refused = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "shutting_down"
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200  # alive, not ready
            engine.held_at = None
            for i, answer in enumerate(future.result() for future in whole):
                assert answer.status_code == 200
                assert answer.json()["usage"]["completion_tokens"] == 60 + i
            for answer in (future.result() for future in streams):
                assert answer.text.endswith("data: [DONE]\n\n")
                assert "error" not in answer.text

    assert drained(engine, 60.0, work) == 0
    assert not engine.requests


@pytest.mark.parametrize("second_signal", [False, True])
def test_at_the_deadline_running_requests_are_told(second_signal: bool) -> None:
    engine = make_fake_engine()
    engine.held_at = 3

    def work(url: str) -> None:
        body = BODY | {"max_tokens": 200}
        with ThreadPoolExecutor(2) as pool, httpx.Client(timeout=60) as client:
            stream = pool.submit(client.post, f"{url}/v1/completions", json=body | {"stream": True})
            whole = pool.submit(client.post, f"{url}/v1/completions", json=body)
            wait_for(lambda: len(engine.requests) == 2)
            end()
            if second_signal:
                # Two signals at once may arrive as one.
                wait_for(lambda: httpx.get(f"{url}/ready", timeout=60).status_code == 503)
                end()
            events = stream.result().text.split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            error = json.loads(events[-3].removeprefix("data: "))["error"]
            assert (error["code"], error["type"]) == ("shutting_down", "server_error")
            assert whole.result().status_code == 503

    assert drained(engine, 60.0 if second_signal else 0.3, work) == 0
    assert not engine.requests
