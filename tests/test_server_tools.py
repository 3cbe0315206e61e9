"""Tool calling over HTTP: what the template sees, what comes back, and what is refused."""

import json
from typing import Any

import pytest
from helpers_server import BASE, RunningServer, make_fake_engine, serving
from helpers_wait import wait_for

from vexpert import demo
from vexpert.server.options import ServerOptions

CHAT = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 6}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look_up", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "now", "description": "the time"}},
]
CALL = '<tool_call>{"name": "look_up", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture(scope="module")
def fake() -> Any:
    options = ServerOptions((BASE,), tool_call_parser="hermes", status_interval=None)
    engine = make_fake_engine()
    engine.max_model_len = 2048
    with serving(engine, options) as running:
        yield running


def ask(server: RunningServer, content: str, **fields: Any) -> Any:
    body = {"model": BASE, "messages": [{"role": "user", "content": content}], "tools": TOOLS}
    return server.post(CHAT, json=body | fields)


def test_a_call_comes_back_in_openais_shape(fake: RunningServer) -> None:
    with fake.client() as client:
        messages: Any = [{"role": "user", "content": f"Well. {CALL}"}]
        answer = client.chat.completions.create(model=BASE, messages=messages, tools=TOOLS)
        chunks: list[Any] = list(
            client.chat.completions.create(
                model=BASE, messages=messages, tools=TOOLS, stream=True, logprobs=True
            )
        )
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Well.")
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("look_up", '{"city": "Oslo"}')
    assert call.id.startswith("call_")
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [part for delta in deltas for part in delta.tool_calls or []]
    assert [part.index for part in calls] == [0] * len(calls)
    assert calls[0].id
    assert calls[0].function is not None
    assert (calls[0].function.name, calls[0].function.arguments) == ("look_up", "")
    text = "".join((part.function and part.function.arguments) or "" for part in calls)
    assert text == '{"city": "Oslo"}'
    # Of the text that one event carries, one piece: how much that is depends on who is late.
    # That each new text is told at once is for test_tool_parser.
    assert len(calls) > 1
    assert "".join(delta.content or "" for delta in deltas) == "Well."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    rows = [row for c in chunks if c.choices[0].logprobs for row in c.choices[0].logprobs.content]
    assert len(rows) == len(f"Well. {CALL}") + 1  # and the end


@pytest.mark.parametrize("name", [r"get\_weather", r"\ud83d"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_call_is_content(fake: RunningServer, name: str, stream: bool) -> None:
    text = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
    response = ask(fake, text, stream=stream)
    assert response.status_code == 200
    if stream:
        assert response.text.endswith("data: [DONE]\n\n")
        blocks = response.text.split("\n\n")[:-2]
        chunks = [json.loads(block.removeprefix("data: ")) for block in blocks]
        found = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        [choice] = response.json()["choices"]
        found, reason = choice["message"]["content"], choice["finish_reason"]
    assert (found, reason) == (text, "stop")


def test_an_unexpected_error_in_a_stream_is_an_event(
    fake: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Any, text: str, is_last: bool) -> None:
        raise KeyError("planted")

    monkeypatch.setattr("vexpert.server.tools.answer.ToolAnswer.deltas", fail)
    response = ask(fake, "words " * 50, stream=True)
    last = response.text.split("\n\n")[-2]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["message"], error["type"]) == ("internal error: KeyError", "server_error")
    assert [r.message for r in caplog.records if r.exc_info] == ["unexpected error in a stream"]
    wait_for(lambda: not fake.engine.has_unfinished())


@pytest.mark.parametrize(("limit", "reason"), [({"stop": ["Os"]}, "stop"), ({}, "tool_calls")])
def test_a_call_that_a_stop_string_cuts_is_not_told_as_complete(
    fake: RunningServer, limit: Any, reason: str
) -> None:
    content = CALL.removeprefix("<tool_call>")
    choice = ask(fake, content, tool_choice="required", **limit).json()["choices"][0]
    assert choice["finish_reason"] == reason
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] in ('{"city": "', '{"city": "Oslo"}')
    early = ask(fake, content, tool_choice="required", stop=["name"]).json()["choices"][0]
    assert early["finish_reason"] == "stop"
    assert not early["message"]["content"]


def test_words_alone_are_an_answer_as_ever(fake: RunningServer) -> None:
    choice = ask(fake, "just words").json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "just words", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_the_template_sees_tools_and_earlier_calls(fake: RunningServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
        {"role": "user", "content": "y"},
    ]
    assert ask(fake, "", messages=messages).status_code == 200
    prompt = fake.engine.prompts[-1]
    shown = json.loads(prompt.partition("<tools>")[2].partition("\n")[0])
    assert [tool["function"]["name"] for tool in shown] == ["look_up", "now"]
    assert "strict" not in shown[0]["function"]
    assert "<tool>noon" in prompt
    assert fake.engine.submitted[-1].skip_special_tokens is False


@pytest.mark.parametrize(
    ("choice", "names", "is_forced"),
    [
        ("none", [], False),
        ("auto", ["look_up", "now"], False),
        ("required", ["look_up", "now"], True),
        ({"type": "function", "function": {"name": "now"}}, ["now"], True),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "now"}}],
                },
            },
            ["now"],
            True,
        ),
    ],
)
def test_the_choice_decides_tools_and_constraint(
    fake: RunningServer, choice: Any, names: list[str], is_forced: bool
) -> None:
    assert ask(fake, "{}", tool_choice=choice).status_code == 200
    prompt = fake.engine.prompts[-1]
    shown = json.loads(prompt.partition("<tools>")[2].partition("\n")[0] or "[]")
    assert [tool["function"]["name"] for tool in shown] == names
    assert prompt.endswith("<tool_call>\n") == is_forced
    constraint = fake.engine.submitted[-1].constraint
    assert (constraint is not None) == (choice != "none")
    if constraint is not None:
        assert ('"dispatch"' in constraint.text) != is_forced  # of words, in which calls may be
        assert constraint.special_tokens != is_forced
        assert constraint.size < 16  # so small that it is tried in no other process first
        assert all(f'"name\\": \\"{name}\\"' in constraint.text for name in names)


def test_without_a_strict_tool_words_are_free(fake: RunningServer) -> None:
    loose = [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]
    assert ask(fake, "x", tools=loose).status_code == 200
    assert fake.engine.submitted[-1].constraint is None
    mode = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": mode}
    assert ask(fake, "x", tool_choice=choice).status_code == 200  # the strict one is not among them
    assert fake.engine.submitted[-1].constraint is None


def test_without_parallel_calls_only_the_first_counts(fake: RunningServer) -> None:
    both = CALL + CALL
    assert len(ask(fake, both).json()["choices"][0]["message"]["tool_calls"]) == 2
    answer = ask(fake, both, parallel_tool_calls=False).json()
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    ask(fake, "x", tool_choice="required", parallel_tool_calls=False)
    assert '"stop_after_first":true' in fake.engine.submitted[-1].constraint.text


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "only with tools"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0]", "custom"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": TOOLS * 65}, "tools", "128"),
        ({"tools": [TOOLS[0]] * 2}, "tools", "same name"),
        ({"tools": None, "parallel_tool_calls": True}, "parallel_tool_calls", "only with tools"),
        ({"tool_choice": "maybe"}, "tool_choice", "auto"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "function"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "'x' is not among",
        ),
        ({"response_format": {"type": "json_object"}}, "response_format", "not together"),
        ({"guided_regex": "a"}, "guided_regex", "not together"),
        ({"guided_regex": "a", "guided_json": {}, "tools": None}, "guided_regex", "contradicts"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
                ],
                "tool_choice": "required",
            },
            "tools",
            "'not' cannot be enforced",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "strict": True, "parameters": {"not": {}}},
                    }
                ],
            },
            "tools",
            "'not' cannot be enforced; leave it out (parameters of 'f')",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"enum": [1]}},
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
            "use type 'object'",
        ),
        (
            {"tools": None, "response_format": {"type": "json_schema"}},
            "response_format",
            "needs it",
        ),
        (
            {
                "tools": None,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "colour"}},
                },
            },
            "response_format",
            "colour",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(
    fake: RunningServer, fields: dict[str, Any], param: str, told: str
) -> None:
    response = ask(fake, "x", **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    if told != "colour":
        assert told in error["message"]


def test_without_a_parser_or_a_template_tools_are_refused() -> None:
    engine = make_fake_engine()
    engine.max_model_len = 2048
    with serving(engine) as running:
        response = ask(running, "x")
        assert response.status_code == 400
        assert "--tool-call-parser" in response.json()["error"]["message"]
        assert ask(running, "x", tool_choice="none").status_code == 200
    options = ServerOptions((BASE,), tool_call_parser="hermes", status_interval=None)
    engine = make_fake_engine()
    engine.tokenizer.chat_template = "fake"
    with serving(engine, options) as running:
        response = ask(running, "x")
        assert response.status_code == 400
        assert "takes no tools" in response.json()["error"]["message"]


@pytest.fixture(scope="module")
def demo_engine() -> Any:
    pytest.importorskip("xgrammar")
    from vexpert.config import EngineConfig
    from vexpert.engine.engine import Engine

    return Engine(EngineConfig(model=str(demo.model_path()), max_num_seqs=16))


@pytest.fixture(scope="module", params=["hermes", "mistral", "llama3_json"])
def demo_server(request: pytest.FixtureRequest, demo_engine: Any) -> Any:
    """The demo model; its own template shows tools, whatever the form of the calls."""
    options = ServerOptions((BASE,), tool_call_parser=request.param, status_interval=None)
    with serving(demo_engine, options) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls_of_a_real_model_keep_to_the_schema(
    demo_server: RunningServer, stream: bool
) -> None:
    named = {"type": "function", "function": {"name": "look_up"}}
    with demo_server.client() as client:
        options: Any = {
            "model": BASE,
            "messages": [{"role": "user", "content": "hello"}],
            "tools": TOOLS,
            "tool_choice": named,
            "max_tokens": 150,
            "n": 5,
        }
        calls: dict[int, list[Any]] = {}
        if stream:
            for chunk in client.chat.completions.create(**options, stream=True):
                choice = chunk.choices[0]
                for part in choice.delta.tool_calls or []:
                    name, arguments = part.function.name, part.function.arguments or ""
                    row = calls.setdefault(choice.index, [name, ""])
                    row[1] += arguments
        else:
            for choice in client.chat.completions.create(**options).choices:
                [call] = choice.message.tool_calls
                calls[choice.index] = [call.function.name, call.function.arguments]
                assert choice.finish_reason in ("tool_calls", "length")
    assert sorted(calls) == list(range(5))
    complete = 0
    for name, arguments in calls.values():
        assert name == "look_up"
        if arguments.endswith("}"):
            complete += 1
            assert set(json.loads(arguments)) <= {"city"}
    assert complete >= 3


@pytest.mark.parametrize("strict", [True, False])
def test_a_call_that_a_model_chose_keeps_to_a_strict_schema(demo_engine: Any, strict: bool) -> None:
    """It is pushed to open one: left to itself, one that was not trained to call does not."""
    options = ServerOptions((BASE,), tool_call_parser="llama3_json", status_interval=None)
    brace = demo_engine.tokenizer.convert_tokens_to_ids("{")
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": strict}}]
    with serving(demo_engine, options) as running:
        fields = {"tools": tools, "logit_bias": {str(brace): 60}, "max_tokens": 80, "n": 5}
        choices = ask(running, "hello", **fields).json()["choices"]
    calls = [call for choice in choices for call in choice["message"].get("tool_calls", [])]
    assert bool(calls) == strict
    complete = [c for c in calls if c["function"]["arguments"].endswith("}")]
    assert len(complete) >= 3 * strict
    for call in complete:
        found = json.loads(call["function"]["arguments"])
        assert set(found) <= {"city"}
        assert len(found.get("city", "")) <= 6


def test_a_required_choice_calls_any_of_the_tools(demo_server: RunningServer) -> None:
    answer = ask(demo_server, "hello", tool_choice="required", max_tokens=60, n=8).json()
    names = {
        call["function"]["name"]
        for choice in answer["choices"]
        for call in choice["message"].get("tool_calls", [])
    }
    assert names <= {"look_up", "now"}
    assert names
