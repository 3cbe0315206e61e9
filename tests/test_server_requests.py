"""Request ids, names, tokens, chat templates of adapters, limits, and what keeps a stream alive."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers_raw_http import connect, request_bytes
from helpers_server import BASE, FakeEngine, RunningServer, make_fake_engine, serving
from helpers_wait import wait_for

from vexpert.log import JsonFormatter
from vexpert.server.options import ServerOptions

pytest_plugins = ["helpers_server_fixtures"]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def options(**fields: Any) -> ServerOptions:
    return ServerOptions((BASE,), status_interval=None, **fields)


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [("abc-123", True), (None, False), ("two words", False), ("x" * 129, False), ("", False)],
)
def test_a_request_id_comes_back(
    fake_server: RunningServer, given: str | None, is_kept: bool
) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    for path in ("/health", "/nothing", "/v1/models"):
        answer = fake_server.get(path, headers=headers)
        shown = answer.headers["x-request-id"]
        assert (shown == given) == is_kept
        assert len(shown) >= 7


def test_the_access_log_names_the_request(
    fake_server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vexpert.access"):
        fake_server.get("/a%0Ab", headers={"X-Request-Id": "me"})
        # The line is written once the answer is out.
        wait_for(lambda: any(r.name == "vexpert.access" for r in caplog.records))
    [record] = [r for r in caplog.records if r.name == "vexpert.access"]
    assert "\n" not in record.getMessage()
    assert "404" in record.getMessage()
    line = json.loads(JsonFormatter().format(record))
    assert (line["status"], line["request_id"], line["level"]) == (404, "me", "info")
    assert line["path"] == "/a\nb"


@pytest.mark.parametrize("stream", [False, True])
def test_the_access_log_names_model_and_tokens(
    fake_server: RunningServer, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    bodies = [{"model": name, "prompt": "ab", "stream": stream} for name in ("upper", "no\none")]
    with caplog.at_level(logging.INFO, "vexpert.access"):
        for count, body in enumerate(bodies, 1):
            fake_server.post(TEXT, json=body)
            wait_for(lambda n=count: sum(r.name == "vexpert.access" for r in caplog.records) == n)
    known, unknown = (r for r in caplog.records if r.name == "vexpert.access")
    assert known.getMessage().endswith(" model='upper' tokens=3+3")
    assert unknown.getMessage().partition(" model=")[2] == r"'no\none' tokens=3+0"
    line = json.loads(JsonFormatter().format(known))
    assert (line["model"], line["prompt_tokens"], line["completion_tokens"]) == ("upper", 3, 3)


@pytest.mark.parametrize("name", ["upper", f"{BASE}:upper"])
def test_an_adapter_is_named_alone_or_behind_its_base(
    fake_server: RunningServer, name: str
) -> None:
    assert fake_server.ask(name, "hello") == "HELLO"
    answer = fake_server.post(TEXT, json={"model": name, "prompt": "ab"})
    assert answer.json()["model"] == name


@pytest.mark.parametrize("name", [f"{BASE}:", f"{BASE}:nobody", f"other:{BASE}", "nobody"])
def test_other_names_are_404(fake_server: RunningServer, name: str) -> None:
    for path, words in ((TEXT, {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        assert fake_server.post(path, json={"model": name, **words}).status_code == 404


def test_tokens_of_a_text_and_back(fake_server: RunningServer) -> None:
    body = {"model": BASE, "prompt": "hey", "return_token_strs": True}
    answer = fake_server.post("/tokenize", json=body).json()
    assert answer == {
        "count": 4,
        "max_model_len": 256,
        "tokens": [1, 104, 101, 121],
        "token_strs": ["", "h", "e", "y"],
    }
    plain = fake_server.post("/tokenize", json={"prompt": "hey", "add_special_tokens": False})
    assert plain.json()["tokens"] == [104, 101, 121]
    assert plain.json()["token_strs"] is None
    back = fake_server.post("/detokenize", json={"tokens": [104, 101, 121]})
    assert back.json() == {"prompt": "hey"}


def test_tokens_of_a_conversation_are_those_of_its_answer(fake_server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hey"}]
    answer = fake_server.post("/tokenize", json={"messages": messages}).json()
    asked = fake_server.post(CHAT, json={"model": BASE, "messages": messages}).json()
    assert answer["count"] == asked["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "\ud800"}),
        ("/tokenize", {"prompt": "x" * 100_000}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {}),
    ],
)
def test_what_has_no_tokens_is_400(fake_server: RunningServer, path: str, body: Any) -> None:
    content = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    response = fake_server.post(path, content=content, headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (TEXT, {"model": BASE, "prompt": "a", "str": 1}, "unknown field 'str'"),
        (TEXT, {"model": BASE, "prompt": "a", "x[y]": 1}, "unknown field 'x[y]'"),
        (TEXT, {"model": BASE, "prompt": "a", "stream_options": {"int": 1}}, "stream_options.int"),
        (CHAT, {"model": BASE, "messages": [{}] * 65537}, "messages: 65537 parts; send at most"),
        (TEXT, [], "the body must be a JSON object"),
        ("/tokenize", {}, "send one of prompt and messages"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "send one"),
        ("/detokenize", {"tokens": [10**9]}, "tokens: token 1000000000"),
        ("/detokenize", {"tokens": [1] * 1000}, "tokens: the text has 1000 tokens"),
    ],
)
def test_a_refusal_says_what_is_wrong(
    fake_server: RunningServer, path: str, body: Any, told: str
) -> None:
    response = fake_server.post(path, json=body)
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]


def test_a_chat_template_that_is_a_pipe_hangs_nobody(fake: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    os.mkfifo(tmp_path / "chat_template.jinja")
    fake.load_adapter("pipe", str(tmp_path))
    with serving(fake, options()) as running:
        body = {"model": "pipe", "messages": [{"role": "user", "content": "x"}]}
        answer = running.post(CHAT, json=body)
        assert answer.status_code == 400
        assert "not a regular file" in answer.json()["error"]["message"]
        assert running.ask(BASE, "hello") == "hello"


@pytest.mark.parametrize("error", [RecursionError, ZeroDivisionError, OverflowError, KeyError])
def test_what_a_template_raises_is_400(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(*args: Any, **options: Any) -> str:
        raise error("of the template")

    monkeypatch.setattr(type(fake.tokenizer), "apply_chat_template", refuse)
    with serving(fake, options()) as running:
        body = {"model": BASE, "messages": [{"role": "user", "content": "x"}]}
        answer = running.post(CHAT, json=body)
        assert answer.status_code == 400
        assert "of the template" in answer.json()["error"]["message"]


def test_an_adapters_own_chat_template_counts(fake: FakeEngine, tmp_path: Path) -> None:
    for name in ("jinja", "config", "list", "none"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    config = {"chat_template": "[B]{{ messages[0].content }}"}
    listed = {"chat_template": [{"name": "rag", "template": "X"}, {"name": "default"}]}
    listed["chat_template"][1]["template"] = "[C]"
    (tmp_path / "jinja" / "chat_template.jinja").write_text("[A]")
    (tmp_path / "jinja" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "list" / "tokenizer_config.json").write_text(json.dumps(listed))
    for name in ("jinja", "config", "list", "none"):
        fake.load_adapter(name, str(tmp_path / name))
    with serving(fake, options(chat_template="S")) as running:
        for name, mark in (("jinja", "A"), ("config", "B"), ("list", "C"), ("none", "S")):
            running.ask(name, "x")
            assert str(fake.prompts[-1]).startswith(f"[{mark}]")
        running.ask(BASE, "x")
        assert str(fake.prompts[-1]).startswith("[S]")
        (tmp_path / "config" / "tokenizer_config.json").write_text("{")
        fake.load_adapter("config", str(tmp_path / "config"), load_inplace=True)
        body = {"model": "config", "messages": [{"role": "user", "content": "x"}]}
        response = running.post(CHAT, json=body)
        assert response.status_code == 400
        assert "chat template" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_silent_stream_gets_comments(fake: FakeEngine, path: str) -> None:
    fake.held_at = 0
    words = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    body = {"model": BASE, "stream": True, "max_tokens": 1, **words}
    with serving(fake, options(keep_alive=0.05)) as running:
        with running.http.stream("POST", path, json=body) as response:
            lines = response.iter_lines()
            assert [next(lines) for _ in range(6)] == [": keep-alive", ""] * 3
            fake.held_at = None
            events = [line for line in lines if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        assert len(events) > 1
        with running.client() as client:  # openai's client passes over comments
            chunks = client.completions.create(model=BASE, prompt="ab", stream=True)
            assert "".join(chunk.choices[0].text for chunk in chunks) == "ab"


def test_a_full_queue_is_429_and_recovers(fake: FakeEngine) -> None:
    fake.config = type(fake.config)(model="fake-model", max_num_seqs=1)
    fake.held_at = 3  # the request runs until its client leaves
    body = {"model": BASE, "prompt": "x", "n": 2, "ignore_eos": True, "max_tokens": 100}
    with serving(fake, options(max_queue_len=1)) as running:
        with running.http.stream("POST", TEXT, json=body | {"stream": True}) as response:
            lines = response.iter_lines()  # kept: its end would close the connection
            next(lines)
            refused = running.post(TEXT, json={"model": BASE, "prompt": "x"})
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        wait_for(lambda: running.app.state.service.engine.num_sequences == 0)
        fake.held_at = None
        for _ in range(3):
            assert running.post(TEXT, json={"model": BASE, "prompt": "x"}).status_code == 200
        too_many = running.post(TEXT, json={"model": BASE, "prompt": ["x"] * 3})
        assert too_many.status_code == 400  # that can never be taken
        wait_for(lambda: not fake.requests)
        wait_for(lambda: running.app.state.service.engine.num_sequences == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends_with_504(fake: FakeEngine, stream: bool) -> None:
    fake.held_at = 3
    body = {"model": BASE, "prompt": "x", "ignore_eos": True, "max_tokens": 200, "stream": stream}
    answers: list[httpx.Response] = []

    def ask(body: dict[str, Any]) -> int:
        answers.append(running.post(TEXT, json=body))
        return answers[-1].status_code

    with serving(fake, options(request_timeout=1.0)) as running:
        # On a crowded machine an answer may not even begin in time.
        wait_for(lambda: ask(body) == (200 if stream else 504))
        response = answers[-1]
        wait_for(lambda: not fake.requests)
        if stream:
            assert response.status_code == 200
            error = json.loads(response.text.split("\n\n")[-3].removeprefix("data: "))["error"]
        else:
            assert response.status_code == 504
            error = response.json()["error"]
        assert error["code"] == "timeout"
        fake.held_at = None
        wait_for(lambda: ask({"model": BASE, "prompt": "x"}) == 200)


def test_a_body_that_does_not_arrive_is_408() -> None:
    with serving(make_fake_engine(), options(body_timeout=0.1)) as running:
        with connect(running.url) as slow:
            slow.sendall(request_bytes({"model": "x"}, TEXT)[:-5])
            assert slow.recv(100).startswith(b"HTTP/1.1 408 ")
        with connect(running.url) as quick:  # in one piece: libraries send a body behind its head
            quick.sendall(request_bytes({"model": "upper", "prompt": "hello"}, TEXT))
            assert quick.recv(100).startswith(b"HTTP/1.1 200 ")


def test_pages_of_other_origins_may_ask_where_allowed() -> None:
    origins = ("https://a.example",)
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with serving(make_fake_engine(), options(allowed_origins=origins, api_keys=("k",))) as running:
        preflight = running.http.options(CHAT, headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        other = running.http.options(CHAT, headers=asked | {"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = running.post(CHAT, json={}, headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
