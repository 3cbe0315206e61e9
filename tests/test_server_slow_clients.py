"""Clients that read nothing, or send half of a request: they cost little, and not for long."""

import contextlib
import os
import re
import signal
import threading
import time
import tracemalloc
from typing import Any

import httpx
import pytest
from helpers_raw_http import connect, is_cut, request_bytes
from helpers_serve_process import HELD_AT, PATIENT
from helpers_server import BASE, make_fake_engine, serving
from helpers_wait import wait_for
from test_engine_process import FAKE
from test_engine_process import serving as serving_process
from test_server_shutdown import drained, end

from vexpert.engine.outputs import Logprob
from vexpert.server import connections, generation
from vexpert.server.options import ServerOptions
from vexpert.server.progress import Delta, Update

# Tokens of a request that only ends by its abort. What the kernel takes is no fixed number of
# them: where the server lags behind, several go together.
ENDLESS = 10**8
# More than the kernel takes for a client that reads nothing.
LARGE = {
    "model": BASE,
    "prompt": "x",
    "ignore_eos": True,
    "max_tokens": 200,
    "n": 64,
    "logprobs": 5,
    "stream": True,
}


def test_a_client_that_reads_nothing_is_cut_off_and_its_request_aborted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(generation, "MAX_BACKLOG", 2**40)  # it is no slow reader
    engine = make_fake_engine()
    engine.max_model_len = ENDLESS + 10
    engine.step_seconds = 0.005

    def work(url: str) -> None:
        with connect(url) as silent:
            silent.sendall(request_bytes(LARGE | {"max_tokens": ENDLESS}))
            wait_for(lambda: bool(engine.requests))
            wait_for(lambda: bool(engine.aborted))
            assert not engine.requests
            assert is_cut(silent)
        end()

    assert drained(engine, 5.0, work, write_timeout=1.0) == 0
    told = [r for r in caplog.records if "read nothing of their answers" in r.getMessage()]
    assert len(told) == 1


def test_what_is_kept_for_a_slow_client_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(generation, "MAX_BACKLOG", 2**20)
    engine = make_fake_engine()
    engine.max_model_len = ENDLESS + 10
    engine.step_seconds = 0.005
    options = ServerOptions((BASE,), status_interval=None)
    with serving(engine, options) as running, connect(running.url) as silent:
        silent.sendall(request_bytes(LARGE | {"max_tokens": ENDLESS}))
        wait_for(lambda: bool(engine.requests))
        wait_for(lambda: bool(engine.aborted))
        assert running.ask("upper", "hello") == "HELLO"
        content = b""
        while b"[DONE]" not in content:
            piece = silent.recv(2**20)
            assert piece, "the stream was cut off"
            content = content[-1000:] + piece
        assert b'"code":"slow_reader"' in content
    assert len([r for r in caplog.records if "reads too slowly" in r.getMessage()]) == 1


def test_a_reader_that_keeps_up_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_BACKLOG", 2**18)
    engine = make_fake_engine()
    engine.step_seconds = 0.005
    steps, step = threading.Semaphore(8), engine.step

    def slow_step() -> Any:
        assert steps.acquire(timeout=60)
        return step()

    monkeypatch.setattr(engine, "step", slow_step)
    body, lines = LARGE | {"n": 8}, []
    with (
        serving(engine) as running,
        running.http.stream("POST", "/v1/completions", json=body) as response,
    ):
        for line in filter(None, response.iter_lines()):
            lines.append(line)
            if len(lines) % 8 == 0:  # a burst is a line for each choice
                steps.release()
    assert lines[-1] == "data: [DONE]"
    assert not any('"error"' in line for line in lines)
    assert sum(map(len, lines)) > generation.MAX_BACKLOG


@pytest.mark.parametrize("head", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_half_a_head_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 1.5)

    def work(url: str) -> None:
        with connect(url) as slow:
            begun = time.monotonic()
            slow.sendall(head)
            while head and time.monotonic() - begun < 1.0:
                time.sleep(0.2)
                with contextlib.suppress(ConnectionError):  # cut off while this thread waited
                    slow.sendall(b"y")
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
            is_cut(slow)  # reads to the end; no longer than the socket's own limit
            assert time.monotonic() - begun > 1.4
        end()

    assert drained(make_fake_engine(), 5.0, work) == 0


def test_a_head_of_any_size_is_refused() -> None:
    def work(url: str) -> None:
        with connect(url) as large:
            head = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Large: " + b"x" * 10**5
            with contextlib.suppress(ConnectionError):  # refused before all of it was sent
                large.sendall(head)
            assert large.recv(100).startswith(b"HTTP/1.1 431 ")
        end()

    assert drained(make_fake_engine(), 5.0, work) == 0


def tokens(page: str) -> float:
    """What the engine has generated, by the metrics page."""
    found = re.findall(r"^vllm:generation_tokens_total\{.*\} (.*)$", page, re.MULTILINE)
    return sum(map(float, found))


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_second_signal_ends_the_server_at_once(
    is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though clients read nothing, and the engine may be stopped; a first one grants more time."""
    monkeypatch.setenv(PATIENT, "1")
    monkeypatch.setenv(HELD_AT, "100")
    with serving_process(FAKE, "--shutdown-timeout", "1000") as server:
        silent: list[Any] = [connect(server.url) for _ in range(4)]
        for each in silent:
            each.sendall(request_bytes(LARGE))
        wait_for(lambda: tokens(server.get("/metrics").text) > 4 * 64 * 40)
        if is_stopped:
            wait_for(lambda: bool(server.engines()))
            os.kill(server.engines()[0], signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        # Two signals at once may arrive as one.
        wait_for(lambda: server.get("/ready").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        for each in silent:
            each.close()
    assert "Traceback" not in "".join(server.log)


def test_the_size_of_an_update_is_what_it_takes() -> None:
    def update(k: int, count: int) -> Update:
        row = {k + j: Logprob(-0.1 * j - k, j, f"t{j + k}") for j in range(count)}
        delta = Delta(0, f"ab{k}", [1000 + k], [row] if count else None, None, None)
        return Update([delta], False, 0, None)

    for count in (0, 1, 20):
        tracemalloc.start()
        kept = [update(1000 * k, count) for k in range(1000)]
        taken = tracemalloc.get_traced_memory()[0] / 1000
        tracemalloc.stop()
        assert 0.7 < kept[0].size() / taken < 1.5
