"""Bad input is a 4xx with cause and remedy, and the server answers afterwards."""

import json
from typing import Any

import pytest
from helpers_raw_http import connect
from helpers_server import BASE, RunningServer, make_fake_engine, serving

from vexpert import errors
from vexpert.server.options import ServerOptions

pytest_plugins = ["helpers_server_fixtures"]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD_CALL = CALL | {"function": {"name": "f", "arguments": "{"}}
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def still_answers(server: RunningServer) -> Any:
    """Whatever a test sent, the next request is answered."""
    yield
    assert server.ask("upper", "hello") == "HELLO"
    assert server.get("/health").status_code == 200


def error_of(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return dict(error)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1, 2]",
        b'"text"',
        b"null",
        b'{"model": "x", }',
        b"\xff\xfe",
        b'{"model": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
    ],
    ids=["empty", "cut", "list", "string", "null", "comma", "not utf-8", "digits", "deep"],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/load_lora_adapter"])
def test_malformed_json(server: RunningServer, path: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    assert "body" in error_of(server.post(path, content=body, headers=headers))["message"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"model": "\xff"}', "not valid utf-8: invalid start byte at byte 11"),
        (b'{"model": "\xe6\x97"}', "not valid utf-8: invalid continuation byte at byte 11"),
        (
            b'{"x": "[[[\\"[", "y":' + b"[" * 100_000,
            "nested too deeply: level 257 begins at character 275",
        ),
        (b'{"x":' * 60_000, "nested too deeply: level 257 begins at character 1280"),
        (
            b'{"x": "' + b"8" * 5000 + b'\\\\", "y": ' + b"9" * 5000 + b"}",
            "an integer of 5000 digits at character 5017; send at most 4300",
        ),
    ],
    ids=["byte", "cut character", "lists", "objects", "digits"],
)
def test_a_body_that_no_parser_takes_is_told_where(
    server: RunningServer, body: bytes, told: str
) -> None:
    headers = {"Content-Type": "application/json"}
    assert told in error_of(server.post(TEXT, content=body, headers=headers))["message"]


def test_two_spellings_of_one_token(server: RunningServer) -> None:
    body = {"model": BASE, "prompt": "a", "max_tokens": 1}
    refused = server.post(TEXT, json=body | {"logit_bias": {"40": 1, "7": 0, "040": -1}})
    error = error_of(refused)
    assert error["param"] == "logit_bias"
    assert "'40' and '040' are one token" in error["message"]
    assert server.post(TEXT, json=body | {"logit_bias": {"040": 1}}).status_code == 200


def test_of_two_fields_of_one_name_the_last_counts(fake_server: RunningServer) -> None:
    """As with OpenAI, whose servers' and clients' parsers do so."""
    body = b'{"model": "nobody", "model": "%s", "prompt": "a", "max_tokens": 1}' % BASE.encode()
    headers = {"Content-Type": "application/json"}
    assert fake_server.post(TEXT, content=body, headers=headers).status_code == 200


def test_an_empty_prompt_of_several_is_named(server: RunningServer) -> None:
    body = {"model": BASE, "prompt": [[5], [6], []]}
    assert "prompt 2 is empty" in error_of(server.post(TEXT, json=body))["message"]


def test_a_form_is_told_the_content_type(server: RunningServer) -> None:
    response = server.post(TEXT, data={"model": BASE, "prompt": "x"})
    assert "application/json" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -1),
        ("temperature", 1e300),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("top_k", 10**30),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("n", 0),
        ("n", 10**9),
        ("max_tokens", -1),
        ("max_tokens", 10**30),
        ("max_tokens", 100_000),
        ("min_tokens", 10**9),
        ("seed", 2**70),
        ("presence_penalty", 3),
        ("frequency_penalty", float("-inf")),
        ("repetition_penalty", 0),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"99999999": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": float("nan")}),
        ("stop", [""]),
        ("stop", [5]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 10**6),
        ("stream", "yes"),
        ("model", 5),
        ("user", 5),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_absurd_values_name_their_field(
    server: RunningServer, path: str, name: str, value: Any
) -> None:
    body = {"model": BASE, name: value} | (
        {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    )
    body[name] = value
    headers = {"Content-Type": "application/json"}
    response = server.post(path, content=json.dumps(body), headers=headers)
    error = error_of(response)
    assert str(error["param"]).startswith(name), error
    assert name in error["message"], error


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([], "at least 1"),
        (None, "list"),
        ([{"role": "user"}], "content"),
        ([{"content": "x"}], "role"),
        ([{"role": "king", "content": "x"}], "king"),
        ([{"role": "function", "content": "x", "name": "f"}], "use tools"),
        ([{"role": "tool", "content": "x"}], "tool_call_id"),
        ([{"role": "user", "content": "x", "tool_call_id": "1"}], "tool_call_id"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "of the assistant"),
        ([{"role": "assistant", "content": None, "tool_calls": [BAD_CALL]}], "not JSON"),
        ([{"role": "user", "content": None}], "content"),
        ([{"role": "user", "content": []}], "text parts"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text"),
        ([{"role": "user", "content": "x", "colour": "red"}], "colour"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "is missing"),
    ],
)
def test_bad_messages(server: RunningServer, messages: Any, word: str) -> None:
    error = error_of(server.post(CHAT, json={"model": BASE, "messages": messages}))
    assert str(error["param"]).startswith("messages")
    assert word in error["message"]


@pytest.mark.parametrize(
    "prompt",
    [None, [], "", 5, {}, [[]], ["a", 5], [5, "a"], [[5], "a"], [True], [1.5], [-1], [10**6],
     [[1], [10**30]], ["a"] * 2000],
    ids=lambda prompt: str(prompt)[:20],
)  # fmt: skip
def test_bad_prompts(server: RunningServer, prompt: Any) -> None:
    # Without special tokens an empty string has no tokens at all.
    body = {"model": BASE, "prompt": prompt, "add_special_tokens": False}
    assert str(error_of(server.post(TEXT, json=body))["param"]).startswith("prompt")


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_prompts_say_the_lengths(server: RunningServer, stream: bool) -> None:
    limit = server.engine.max_model_len
    messages = [{"role": "user", "content": "w" * 40 * limit}]
    chat = server.post(CHAT, json={"model": BASE, "messages": messages, "stream": stream})
    assert f"the model takes {limit}" in error_of(chat)["message"]
    body = {"model": BASE, "prompt": [2] * limit, "stream": stream}
    assert f"has {limit} tokens" in error_of(server.post(TEXT, json=body))["message"]
    body = {"model": BASE, "prompt": [2] * (limit - 3), "max_tokens": 4}
    assert "use at most 3" in error_of(server.post(TEXT, json=body))["message"]


def test_lone_surrogates_are_refused(server: RunningServer) -> None:
    headers = {"Content-Type": "application/json"}
    for text in (
        '{"model": "%s", "prompt": "a\\ud800b"}' % BASE,  # noqa: UP031 (braces of JSON)
        '{"model": "\\ud800", "prompt": "a"}',
        '{"model": "a", "prompt": "a", "\\ud800": 1}',
    ):
        response = server.post(TEXT, content=text, headers=headers)
        assert response.status_code in (400, 404), response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"conversations": 1}}, "chat_template_kwargs"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_contradictions(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    response = server.post(CHAT, json={"model": BASE, "messages": HELLO, **fields})
    assert str(error_of(response)["param"]).startswith(param)


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"lora_name": "x", "lora_path": "/no/such/folder"}, 400, "/no/such/folder"),
        ({"lora_name": "x", "lora_path": "."}, 400, "adapter_config.json"),
        ({"lora_name": "x", "lora_path": ""}, 400, "lora_path"),
        ({"lora_name": "x"}, 400, "lora_path"),
        ({"lora_path": "."}, 400, "lora_name"),
        ({"lora_name": BASE, "lora_path": "."}, 400, "base model"),
        ({"lora_name": "upper", "lora_path": "."}, 400, "upper"),
        ({"lora_name": "x", "lora_path": ".", "load_inplace": 5}, 400, "load_inplace"),
        ({"lora_name": "x", "lora_path": ".", "rank": 5}, 400, "rank"),
    ],
)
def test_bad_adapters(server: RunningServer, body: Any, status: int, word: str) -> None:
    before = server.get("/v1/models").json()
    assert word in error_of(server.post("/v1/load_lora_adapter", json=body), status)["message"]
    assert server.get("/v1/models").json() == before


def test_unloading_an_unknown_adapter_is_404(server: RunningServer) -> None:
    error_of(server.post("/v1/unload_lora_adapter", json={"lora_name": "nobody"}), 404)


def test_wrong_paths_and_methods(server: RunningServer) -> None:
    error_of(server.get("/v1/nothing"), 404)
    error_of(server.get(CHAT), 405)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_413(chunked: bool) -> None:
    options = ServerOptions((BASE,), max_body_bytes=1000, status_interval=None)
    body = json.dumps({"model": BASE, "prompt": "a" * 2000}).encode()
    content: Any = iter([body[:500], body[500:]]) if chunked else body
    with serving(make_fake_engine(), options) as small:
        headers = {"Content-Type": "application/json"}
        response = small.post(TEXT, content=content, headers=headers)
        assert "1000 bytes" in error_of(response, 413)["message"]
        assert small.ask(BASE, "hello") == "hello"


def test_a_template_that_refuses(fake_server: RunningServer) -> None:
    messages = [{"role": "assistant", "content": "x"}]
    error = error_of(fake_server.post(CHAT, json={"model": BASE, "messages": messages}))
    assert "must not be the assistant's" in error["message"]
    body = {"model": BASE, "messages": HELLO, "chat_template_kwargs": {"note": 5}}
    assert error_of(fake_server.post(CHAT, json=body))["param"] == "messages"
    fake_server.engine.tokenizer.chat_template = None
    error = error_of(fake_server.post(CHAT, json={"model": BASE, "messages": HELLO}))
    assert "/v1/completions" in error["message"]


def test_what_the_engine_refuses_runs_none_of_the_prompts(fake_server: RunningServer) -> None:
    body = {"model": BASE, "prompt": ["a", "b"], "seed": 13, "stream": True}
    assert error_of(fake_server.post(TEXT, json=body))["param"] == "seed"
    assert fake_server.engine.requests == {}


def test_what_cannot_fit_is_refused_before_it_is_tokenised(fake_server: RunningServer) -> None:
    limit, tokenizer = fake_server.engine.max_model_len, fake_server.engine.tokenizer
    encode, sizes = tokenizer.encode, []
    tokenizer.encode = lambda text, **options: sizes.append(len(text)) or encode(text, **options)
    text = "\u00e9" * (32 * limit)  # 64 bytes for each token that fits
    assert error_of(fake_server.post(TEXT, json={"model": BASE, "prompt": text}))
    assert len(sizes) == 1
    body: dict[str, Any] = {"model": BASE, "prompt": text + "a"}
    assert error_of(fake_server.post(TEXT, json=body))["param"] == "prompt"
    body = {"model": BASE, "messages": [{"role": "user", "content": text}]}
    assert error_of(fake_server.post(CHAT, json=body))["param"] == "messages"
    assert len(sizes) == 1
    body = {"model": BASE, "prompt": [10**6] * (limit + 1)}
    assert f"has {limit + 1} tokens" in error_of(fake_server.post(TEXT, json=body))["message"]


def test_completions_of_one_request_are_bounded(fake_server: RunningServer) -> None:
    body = {"model": BASE, "prompt": ["a"] * 205, "n": 5, "max_tokens": 1}
    assert "1024 completions" in error_of(fake_server.post(TEXT, json=body))["message"]
    body["prompt"] = ["a"] * 204
    response = fake_server.post(TEXT, json=body)
    assert len(response.json()["choices"]) == 204 * 5


@pytest.mark.parametrize("token", [2**63, -(2**63) - 1, 10**30, int("9" * 4000)])
@pytest.mark.parametrize("form", [lambda ids: ids, lambda ids: [[1], ids]])
def test_a_number_that_is_no_token_id_says_so(server: RunningServer, form: Any, token: int) -> None:
    error = error_of(server.post(TEXT, json={"model": BASE, "prompt": form([1, token])}))
    assert error["message"].startswith(f"prompt: {str(token)[:20]}")
    assert "is no token id" in error["message"]
    assert len(error["message"]) < 200


@pytest.mark.parametrize("coding", ["chunked", "identity"])
def test_a_body_of_two_lengths_is_refused(server: RunningServer, coding: str) -> None:
    """Who reads the one and who reads the other would see two requests."""
    content = b'{"model": "upper", "prompt": "x", "max_tokens": 1}'
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: 4\r\nTransfer-Encoding: {coding}\r\n\r\n{len(content):x}\r\n"
    )
    with connect(server.url) as sock:
        sock.sendall(head.encode() + content + b"\r\n0\r\n\r\n")
        answer = b""
        while piece := sock.recv(65536):  # the connection is closed, too
            answer += piece
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 4" if coding == "chunked" else b"HTTP/1.1 ")
    assert not answer.startswith(b"HTTP/1.1 2")


def test_no_guess_is_made_at_a_word_of_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "get_close_matches", lambda *_: pytest.fail("compared"))
    assert errors.nearest("x" * 101, ["x"]) is None


@pytest.mark.parametrize(
    ("path", "headers", "status", "word"),
    [
        ("/health", {"X-Long": "a" * 20_000}, 431, "16384 bytes"),
        ("/health", {f"X-{i}": "a" * 100 for i in range(200)}, 431, "16384 bytes"),
        ("/health", dict.fromkeys((f"X-{i}" for i in range(2000)), ""), 431, "16384 bytes"),
        ("/" + "a" * 20_000, {}, 431, "16384 bytes"),
        ("/health?" + "a=b&" * 5000, {}, 431, "16384 bytes"),
        ("/health", {"Content-Encoding": "gzip"}, 415, "Content-Encoding"),
    ],
)
def test_heads_that_are_refused(
    server: RunningServer, path: str, headers: dict[str, str], status: int, word: str
) -> None:
    assert word in error_of(server.get(path, headers=headers), status)["message"]


def test_a_body_that_is_not_coded_says_so(server: RunningServer) -> None:
    headers = {"Content-Encoding": "identity"}
    body = {"model": BASE, "prompt": "x", "max_tokens": 1}
    assert server.post(TEXT, json=body, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_probes_may_ask_for_the_head_alone(server: RunningServer, path: str) -> None:
    response = server.http.head(path)
    assert (response.status_code, response.content) == (200, b"")


def test_messages_do_not_repeat_what_is_long(server: RunningServer) -> None:
    long = "x" * 1_000_000
    requests: list[tuple[str, dict[str, Any]]] = [
        (TEXT, {"model": long, "prompt": "x"}),
        (CHAT, {"model": long, "messages": HELLO}),
        ("/v1/load_lora_adapter", {"lora_name": "q", "lora_path": long}),
        ("/v1/load_lora_adapter", {"lora_name": long, "lora_path": "x"}),
        ("/v1/unload_lora_adapter", {"lora_name": long}),
        (TEXT, {"model": BASE, "prompt": "x", long: 1}),
        (TEXT, {"model": BASE, "prompt": "x", "stop_token_ids": [long]}),
        (CHAT, {"model": BASE, "messages": [{"role": long, "content": "x"}]}),
        (CHAT, {"model": BASE, "messages": [{"role": "user", "content": [{"type": long}]}]}),
        (CHAT, {"model": BASE, "messages": HELLO, "tools": [{"type": long}]}),
        (CHAT, {"model": BASE, "messages": HELLO, "chat_template_kwargs": {long: 1}}),
        (CHAT, {"model": BASE, "messages": HELLO, "logit_bias": {long: 1}}),
        (CHAT, {"model": BASE, "messages": HELLO, "response_format": {"type": long}}),
        (CHAT, {"model": BASE, "messages": HELLO, "metadata": {long: 1}}),
        (CHAT, {"model": BASE, "messages": [{**HELLO[0], "content": "x", long: 1}]}),
        (CHAT, {"model": BASE, "messages": HELLO, "tool_choice": long}),
    ]
    for path, body in requests:
        response = server.post(path, json=body)
        assert response.status_code in (200, 400, 404), response.text[:200]
        assert len(response.text) < 2_000, (path, list(body)[-1][:20])
