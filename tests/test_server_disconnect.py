"""A client that goes away frees what its request holds."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from helpers_engine_thread import EngineThread
from helpers_raw_http import connect, request_bytes
from helpers_server import BASE, FakeEngine, RunningServer, make_fake_engine
from helpers_wait import wait_for

from vexpert.server.app import create_app
from vexpert.server.disconnect import EventStream
from vexpert.server.middleware import OPEN_PATHS

pytest_plugins = ["helpers_server_fixtures"]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


HELD_AT = 3  # tokens: a request that has so many stands still until its client leaves


def endless(path: str, **fields: Any) -> dict[str, Any]:
    """A request of more tokens than HELD_AT."""
    words = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    return {"model": "upper", "ignore_eos": True, "max_tokens": 200, **words, **fields}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_leaving_a_stream_aborts(fake: FakeEngine, fake_server: RunningServer, path: str) -> None:
    fake.held_at = HELD_AT
    with fake_server.http.stream("POST", path, json=endless(path, stream=True)) as response:
        lines = response.iter_lines()  # dropped, it would close the response
        first = next(lines)
        assert json.loads(first.removeprefix("data: "))["model"] == "upper"
        assert len(fake.requests) == 1
    wait_for(lambda: not fake.requests)
    assert len(fake.aborted) == 1
    fake.held_at = None
    assert fake_server.ask(BASE, "hello") == "hello"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_leaving_before_a_whole_answer_aborts(
    fake: FakeEngine, fake_server: RunningServer, path: str
) -> None:
    fake.held_at = HELD_AT
    with connect(fake_server.url) as client:
        client.sendall(request_bytes(endless(path), path))
        wait_for(lambda: len(fake.requests) == 1)
    wait_for(lambda: not fake.requests)
    assert len(fake.aborted) == 1


def test_leaving_amid_the_body_is_no_error(
    fake_server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """On every route that reads one, whatever says where the body ends: one line of the log."""
    app = create_app(EngineThread(make_fake_engine()))
    posts = [path for path, item in app.openapi()["paths"].items() if "post" in item]
    assert {CHAT, TEXT, "/tokenize", "/v1/load_lora_adapter"} <= set(posts) - set(OPEN_PATHS)
    halves = (b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
    with caplog.at_level(logging.INFO, "vexpert.access"):
        for path in posts:
            for half in halves:
                head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                with connect(fake_server.url) as client:
                    client.sendall(head.encode() + half)
        wait_for(lambda: sum(r.name == "vexpert.access" for r in caplog.records) == 2 * len(posts))
    assert {vars(r)["fields"]["status"] for r in caplog.records if r.name == "vexpert.access"} == {
        499
    }
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.INFO] == []


def test_leaving_aborts_every_prompt_of_a_request(
    fake: FakeEngine, fake_server: RunningServer
) -> None:
    fake.held_at = HELD_AT
    body = endless(TEXT, prompt=["a", "b", "c"], stream=True)
    with fake_server.http.stream("POST", TEXT, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert len(fake.requests) == 3
    wait_for(lambda: not fake.requests)
    assert len(fake.aborted) == 3


def test_a_slow_reader_loses_nothing(fake: FakeEngine, fake_server: RunningServer) -> None:
    body = endless(TEXT, stream=True, prompt="abc" * 30, max_tokens=150)
    with fake_server.http.stream("POST", TEXT, json=body) as response:
        wait_for(lambda: not fake.requests)  # the engine is done before the first read
        chunks = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert chunks[-1] == "[DONE]"
    text = "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks[:-1])
    assert text == "ABC" * 30 + "." * 60
    assert fake.aborted == []


def test_a_client_that_leaves_before_the_first_event_ends_the_work_too() -> None:
    """A generator that has not begun has no `finally` to run."""
    ended: list[str] = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"never asked for"

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.Event().wait()  # the client reads nothing

    stream = EventStream(events(), lambda: ended.append("end"))
    asyncio.run(stream({"type": "http"}, receive, send))
    assert ended == ["end"]
