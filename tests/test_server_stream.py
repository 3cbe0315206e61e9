"""The form of server-sent events, byte for byte where clients depend on it."""

import json
from typing import Any

import pytest
from helpers_server import BASE, RunningServer

pytest_plugins = ["helpers_server_fixtures"]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def events(server: RunningServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Chunks of a stream whose form is checked."""
    words: dict[str, Any] = {"messages": [{"role": "user", "content": "héllo"}]}
    words = words if path == CHAT else {"prompt": "héllo"}
    response = server.post(path, json={"model": BASE, "stream": True, **words, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    blocks = response.content.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: {") and "\n" not in block for block in blocks[:-2])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_comes_last_and_only_when_asked(server: RunningServer, path: str) -> None:
    plain = events(server, path, max_tokens=3)
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in plain)
    asked = events(server, path, max_tokens=3, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in asked[:-1]] == [None] * (len(asked) - 1)
    assert asked[-1]["choices"] == []
    assert asked[-1]["usage"]["completion_tokens"] == 3


def test_the_role_comes_first_for_each_choice(server: RunningServer) -> None:
    chunks = events(server, CHAT, max_tokens=3, n=2)
    for index in range(2):
        deltas = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in deltas[1:])
        assert [choice["finish_reason"] for choice in deltas][-1] == "length"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_streamed_logprobs_are_one_for_each_token(server: RunningServer, path: str) -> None:
    ask: dict[str, Any] = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    chunks = events(
        server, path, max_tokens=3, temperature=0, stream_options={"include_usage": True}, **ask
    )
    logprobs = [c["choices"][0]["logprobs"] for c in chunks if c["choices"]]
    found = [row for row in logprobs if row]
    if path == CHAT:
        assert sum(len(row["content"]) for row in found) == 3
    else:
        assert sum(len(row["tokens"]) for row in found) == 3
        offsets = [offset for row in found for offset in row["text_offset"]]
        assert offsets == sorted(offsets)


def test_line_breaks_do_not_break_the_form(server: RunningServer) -> None:
    chunks = events(server, TEXT, prompt="a\n\ndata: b\r\n", echo=True, max_tokens=1)
    assert chunks[0]["choices"][0]["text"].startswith("a\n\ndata: b\r\n")


def test_an_error_before_the_stream_is_a_status(server: RunningServer) -> None:
    body = {"model": "nobody", "prompt": "x", "stream": True}
    response = server.post(TEXT, json=body)
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"
