"""Every field of a request is honoured or refused with 400: none is accepted and ignored."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import pytest
from helpers_server import BASE, RunningServer, make_fake_engine, serving
from openai.types import chat as types
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.chat.chat_completion_assistant_message_param import ContentArrayOfContentPart
from openai.types.chat.chat_completion_content_part_param import File
from openai.types.shared_params import FunctionDefinition as FunctionDefinitionParam
from openai.types.shared_params import (
    ResponseFormatJSONObject,
    ResponseFormatJSONSchema,
    ResponseFormatText,
)
from openai.types.shared_params.response_format_json_schema import JSONSchema

from vexpert.engine.sampling_params import SamplingParams
from vexpert.server.options import ServerOptions
from vexpert.server.protocol.chat import JsonSchemaFormat, ResponseFormat
from vexpert.server.protocol.message import Message, TextPart
from vexpert.server.protocol.sampling import StreamOptions
from vexpert.server.protocol.tools import (
    AllowedTools,
    FunctionDefinition,
    Tool,
    ToolCall,
    ToolChoice,
)

pytest_plugins = ["helpers_server_fixtures"]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
MINIMAL: dict[str, dict[str, Any]] = {
    CHAT: {"model": BASE, "messages": [{"role": "user", "content": "hello"}]},
    TEXT: {"model": BASE, "prompt": "hello"},
}


@dataclass(frozen=True)
class Honoured:
    """A value, and what it must change: the engine's parameters or the answer."""

    value: Any
    in_params: Callable[[SamplingParams], bool] | None = None
    in_answer: Callable[[dict[str, Any]], bool] | None = None
    beside: tuple[tuple[str, Any], ...] = ()  # other fields it needs


@dataclass(frozen=True)
class Neutral:
    """A label, or a field in the one value that changes nothing; `refused`: other values."""

    value: Any
    refused: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A value of a field that is never served."""

    value: Any


Rule = Honoured | Neutral | Refused

SHARED: dict[str, Rule] = {
    "model": Honoured("upper", in_answer=lambda a: a["model"] == "upper"),
    "frequency_penalty": Honoured(0.5, lambda p: p.frequency_penalty == 0.5),
    "presence_penalty": Honoured(-0.5, lambda p: p.presence_penalty == -0.5),
    "logit_bias": Honoured({"65": -100}, lambda p: p.logit_bias == {65: -100}),
    "max_tokens": Honoured(3, lambda p: p.max_tokens == 3),
    "n": Honoured(3, lambda p: p.n == 3, lambda a: len(a["choices"]) == 3),
    "seed": Honoured(7, lambda p: p.seed == 7),
    "stop": Honoured("ll", lambda p: p.stop == ("ll",), lambda a: text_of(a) == "he"),
    "temperature": Honoured(0.25, lambda p: p.temperature == 0.25),
    "top_p": Honoured(0.5, lambda p: p.top_p == 0.5),
    "user": Neutral("someone"),
    "stream": Neutral(False),
    "stream_options": Refused({"include_usage": True}),  # without stream; streams have own tests
    # vLLM's
    "top_k": Honoured(5, lambda p: p.top_k == 5),
    "min_p": Honoured(0.1, lambda p: p.min_p == 0.1),
    "repetition_penalty": Honoured(1.5, lambda p: p.repetition_penalty == 1.5),
    "stop_token_ids": Honoured([108], lambda p: p.stop_token_ids == (108,)),
    "include_stop_str_in_output": Honoured(
        True, in_answer=lambda a: text_of(a) == "hell", beside=(("stop", "ll"),)
    ),
    "ignore_eos": Honoured(
        True, in_answer=lambda a: text_of(a) == "hello...", beside=(("max_tokens", 8),)
    ),
    "min_tokens": Honoured(7, lambda p: p.min_tokens == 7),
    "skip_special_tokens": Honoured(False, lambda p: p.skip_special_tokens is False),
    "structured_outputs": Honoured({"regex": "a+"}, lambda p: p.constraint.regex == "a+"),
    "guided_json": Honoured({"type": "string"}, lambda p: p.constraint.kind == "json"),
    "guided_regex": Honoured("a+", lambda p: p.constraint.regex == "a+"),
    "guided_choice": Honoured(["a", "b"], lambda p: p.constraint.choice == ["a", "b"]),
    "guided_grammar": Honoured('root ::= "a"', lambda p: p.constraint.kind == "grammar"),
}
CHAT_RULES: dict[str, Rule] = {
    **SHARED,
    "messages": Honoured(
        [{"role": "user", "content": [{"type": "text", "text": "word"}]}],
        in_answer=lambda a: text_of(a) == "word",
    ),
    "max_completion_tokens": Honoured(3, lambda p: p.max_tokens == 3),
    "logprobs": Honoured(True, lambda p: p.logprobs == 0),
    "top_logprobs": Honoured(2, lambda p: p.logprobs == 2, beside=(("logprobs", True),)),
    "prompt_logprobs": Honoured(
        1, lambda p: p.prompt_logprobs == 1, lambda a: a["prompt_logprobs"]
    ),
    "add_special_tokens": Honoured(
        True, in_answer=lambda a: a["usage"]["prompt_tokens"] == len("<user>hello\n<assistant>") + 1
    ),
    "add_generation_prompt": Honoured(
        False, in_answer=lambda a: a["usage"]["prompt_tokens"] == len("<user>hello\n")
    ),
    "chat_template_kwargs": Honoured(
        {"note": "abc"}, in_answer=lambda a: a["usage"]["prompt_tokens"] == 26
    ),
    "metadata": Neutral({"a": "b"}),
    "safety_identifier": Neutral("x"),
    "prompt_cache_key": Neutral("x"),
    "parallel_tool_calls": Refused(True),  # without tools; with them: test_server_tools.py
    "modalities": Neutral(["text"], (["text", "audio"],)),
    "prompt_cache_retention": Neutral("in_memory", ("24h",)),
    "reasoning_effort": Neutral("none", ("low", "high")),
    "response_format": Honoured(
        {"type": "json_object"}, lambda p: p.constraint.json_object is True
    ),
    "service_tier": Neutral("auto", ("flex",)),
    "store": Neutral(False, (True,)),
    "tool_choice": Honoured(
        "required", lambda p: p.constraint.kind == "structural_tag", beside=(("tools", TOOLS),)
    ),
    "tools": Honoured(TOOLS, in_answer=lambda a: a["usage"]["prompt_tokens"] > 50),
    "functions": Neutral([], ([{"name": "f"}],)),
    "function_call": Neutral("none", ("auto", {"name": "f"})),
    "verbosity": Neutral("medium", ("low",)),
    "audio": Refused({"voice": "x", "format": "wav"}),
    "moderation": Refused({"type": "x"}),
    "prediction": Refused({"type": "content", "content": "x"}),
    "prompt_cache_options": Refused({"mode": "x"}),
    "web_search_options": Refused({}),
}
TEXT_RULES: dict[str, Rule] = SHARED | {
    "prompt": Honoured("word", in_answer=lambda a: text_of(a) == "word"),
    "best_of": Neutral(1, (2,)),
    "echo": Honoured(True, in_answer=lambda a: text_of(a) == "hellohello"),
    "logprobs": Honoured(2, lambda p: p.logprobs == 2),
    "prompt_logprobs": Honoured(
        1, lambda p: p.prompt_logprobs == 1, lambda a: a["choices"][0]["prompt_logprobs"]
    ),
    "add_special_tokens": Honoured(
        False, in_answer=lambda a: a["usage"]["prompt_tokens"] == len("hello")
    ),
    "suffix": Neutral("", ("end",)),
}
RULES = {CHAT: CHAT_RULES, TEXT: TEXT_RULES}
CASES = [(path, name) for path, rules in RULES.items() for name in rules]


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def openai_fields(module: Any) -> set[str]:
    """Every field the openai client can send."""
    kinds = (
        module.CompletionCreateParamsNonStreaming,
        module.CompletionCreateParamsStreaming,
    )
    return {name for kind in kinds for name in kind.__required_keys__ | kind.__optional_keys__}


def send(server: RunningServer, path: str, fields: dict[str, Any]) -> Any:
    return server.post(path, json=MINIMAL[path] | fields)


def assert_refused(server: RunningServer, path: str, name: str, value: Any) -> None:
    response = send(server, path, {name: value})
    assert response.status_code == 400, (name, value, response.text)
    error = response.json()["error"]
    assert error["param"] == name
    assert name in error["message"]


@pytest.fixture(scope="module")
def server() -> Any:
    options = ServerOptions((BASE,), tool_call_parser="hermes", status_interval=None)
    with serving(make_fake_engine(), options) as running:
        yield running


@pytest.mark.parametrize(("path", "name"), CASES)
def test_a_field_does_what_its_rule_says(server: RunningServer, path: str, name: str) -> None:
    rule = RULES[path][name]
    if isinstance(rule, Refused):
        assert_refused(server, path, name, rule.value)
        return
    beside = dict(rule.beside) if isinstance(rule, Honoured) else {}
    response = send(server, path, {name: rule.value, **beside})
    assert response.status_code == 200, response.text
    if isinstance(rule, Honoured):
        assert rule.in_params or rule.in_answer, "a rule that checks nothing"
        assert rule.in_params is None or rule.in_params(server.engine.submitted[-1])
        assert rule.in_answer is None or rule.in_answer(response.json())
    else:
        for value in rule.refused:
            assert_refused(server, path, name, value)


@pytest.mark.parametrize(("path", "name"), CASES)
def test_null_means_the_default(server: RunningServer, path: str, name: str) -> None:
    if name in MINIMAL[path]:
        return
    send(server, path, {})
    plain = server.engine.submitted[-1]
    response = send(server, path, {name: None})
    assert response.status_code == 200, response.text
    assert server.engine.submitted[-1] == plain


@pytest.mark.parametrize(("path", "module"), [(CHAT, chat_params), (TEXT, text_params)])
def test_every_field_of_the_openai_client_has_a_rule_or_is_refused(
    server: RunningServer, path: str, module: Any
) -> None:
    fields = openai_fields(module)
    assert {"model", "temperature", "stream"} <= fields
    assert fields <= set(RULES[path]), "a field of a later client: give it a rule"


# Of the parts of a request, in the client's types: the fields that are served, and those that are
# refused. A new field of the client must be put into one of the two.
PARTS: dict[Any, tuple[Any, set[str]]] = {
    types.ChatCompletionDeveloperMessageParam: (Message, set()),
    types.ChatCompletionSystemMessageParam: (Message, set()),
    types.ChatCompletionUserMessageParam: (Message, set()),
    types.ChatCompletionAssistantMessageParam: (Message, {"audio", "function_call", "refusal"}),
    types.ChatCompletionToolMessageParam: (Message, set()),
    types.ChatCompletionContentPartTextParam: (TextPart, {"prompt_cache_breakpoint"}),
    types.ChatCompletionStreamOptionsParam: (StreamOptions, {"include_obfuscation"}),
    types.ChatCompletionFunctionToolParam: (Tool, set()),
    FunctionDefinitionParam: (FunctionDefinition, set()),
    types.ChatCompletionMessageFunctionToolCallParam: (ToolCall, set()),
    types.ChatCompletionNamedToolChoiceParam: (ToolChoice, set()),
    types.ChatCompletionAllowedToolChoiceParam: (ToolChoice, set()),
    types.ChatCompletionAllowedToolsParam: (AllowedTools, set()),
    ResponseFormatText: (ResponseFormat, set()),
    ResponseFormatJSONObject: (ResponseFormat, set()),
    ResponseFormatJSONSchema: (ResponseFormat, set()),
    JSONSchema: (JsonSchemaFormat, set()),
}


@pytest.mark.parametrize("theirs", list(PARTS), ids=lambda theirs: theirs.__name__)
def test_every_field_of_a_part_is_served_or_refused(theirs: Any) -> None:
    ours, refused = PARTS[theirs]
    names = {field.alias or name for name, field in ours.model_fields.items()}
    fields = theirs.__required_keys__ | theirs.__optional_keys__
    assert fields, "no fields found"
    assert fields - refused <= names, "a field of a later client: serve or refuse it"
    assert refused <= fields, "a field that the client no longer has"


def part_of(kind: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": kind, kind: fields}]}]}


CUSTOM_CALL = {"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}}
# Kinds of parts that are not served, each as the client would send it, and what names it.
NOT_SERVED: dict[Any, tuple[dict[str, Any], str]] = {
    types.ChatCompletionContentPartImageParam: (part_of("image_url", url="x"), "image_url"),
    types.ChatCompletionContentPartInputAudioParam: (
        part_of("input_audio", data="", format="wav"),
        "input_audio",
    ),
    File: (part_of("file", file_id="x"), "'file'"),
    types.ChatCompletionContentPartRefusalParam: (
        {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]},
        "'refusal'",
    ),
    types.ChatCompletionFunctionMessageParam: (
        {"messages": [{"role": "function", "name": "f", "content": "x"}]},
        "use tools",
    ),
    types.ChatCompletionMessageCustomToolCallParam: (
        {"messages": [{"role": "assistant", "tool_calls": [CUSTOM_CALL]}]},
        "tool_calls[0].type: input should be 'function'",
    ),
    types.ChatCompletionCustomToolParam: (
        {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
        "custom",
    ),
    types.ChatCompletionNamedToolChoiceCustomParam: (
        {"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
        "tool_choice.type: input should be 'function'",
    ),
}
UNIONS = (
    types.ChatCompletionMessageParam,
    types.ChatCompletionContentPartParam,
    ContentArrayOfContentPart,
    types.ChatCompletionToolUnionParam,
    types.ChatCompletionToolChoiceOptionParam,
    types.ChatCompletionMessageToolCallUnionParam,
    chat_params.ResponseFormat,
)


def test_every_kind_of_every_part_is_served_or_refused() -> None:
    kinds = {kind for union in UNIONS for kind in get_args(union) if get_origin(kind) is None}
    assert len(kinds) > 15
    assert kinds <= set(PARTS) | set(NOT_SERVED), "a kind of a later client: serve or refuse it"


@pytest.mark.parametrize("kind", list(NOT_SERVED), ids=lambda kind: kind.__name__)
def test_a_kind_that_is_not_served_is_refused_by_name(server: RunningServer, kind: Any) -> None:
    fields, told = NOT_SERVED[kind]
    response = send(server, CHAT, fields)
    assert response.status_code == 400, response.text
    assert told in response.json()["error"]["message"]


def test_an_answer_can_be_sent_back_whole(server: RunningServer) -> None:
    with server.client() as client:
        history: list[Any] = [{"role": "user", "content": "hello"}]
        for _ in range(2):
            answer = client.chat.completions.create(model=BASE, messages=history)
            history += [answer.choices[0].message.model_dump(), {"role": "user", "content": "x"}]
            assert answer.choices[0].message.content
    assert "<assistant>hello" in server.engine.prompts[-1]


@pytest.mark.parametrize(
    "part",
    [
        {"role": "assistant", "content": "x", "audio": {"id": "1"}},
        {"role": "assistant", "content": "x", "annotations": [{"type": "url_citation"}]},
        {"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": ""}},
        {"role": "assistant", "content": "x", "refusal": "no"},
        {"role": "user", "content": [{"type": "text", "text": "x", "prompt_cache_breakpoint": {}}]},
    ],
)
def test_refused_fields_of_messages(server: RunningServer, part: dict[str, Any]) -> None:
    response = send(server, CHAT, {"messages": [part]})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages[0]")


def test_a_field_in_capitals_is_an_unknown_field(server: RunningServer) -> None:
    assert_refused(server, CHAT, "Model", "x")


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_unknown_field_is_refused_with_a_hint(server: RunningServer, path: str) -> None:
    response = send(server, path, {"temprature": 1})
    assert response.status_code == 400
    assert "did you mean 'temperature'" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field", "told"),
    [
        (CHAT, "best_of", "unknown field 'best_of' here; it is one of /v1/completions"),
        (TEXT, "messages", "it is one of /tokenize, /v1/chat/completions"),
        (CHAT, "documents", "unknown field 'documents'; leave it out"),
        (CHAT, "truncate_prompt_tokens", "unknown field 'truncate_prompt_tokens'; leave it out"),
        (TEXT, "allowed_token_ids", "unknown field 'allowed_token_ids'; leave it out"),
        (TEXT, "arguments", "unknown field 'arguments'; leave it out"),  # of a part, not of a body
    ],
)
def test_hints_name_what_was_meant_or_nothing(
    server: RunningServer, path: str, field: str, told: str
) -> None:
    message = send(server, path, {field: ["x"]}).json()["error"]["message"]
    assert message.endswith(told)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_unknown_field_that_is_null_asks_for_nothing(server: RunningServer, path: str) -> None:
    assert send(server, path, {"truncate_prompt_tokens": None, "priority": None}).status_code == 200
    messages = [{"role": "user", "content": "hello", "reasoning_content": None}]
    assert send(server, CHAT, {"messages": messages, "documents": None}).status_code == 200
    assert_refused(server, path, "priority", 0)


def test_defaults_are_openais_where_the_model_has_none(server: RunningServer) -> None:
    send(server, CHAT, {})
    chat = server.engine.submitted[-1]
    assert (chat.temperature, chat.top_p, chat.n) == (1.0, 1.0, 1)
    assert chat.max_tokens == 256 - len("<user>hello\n<assistant>")  # as many as fit
    send(server, TEXT, {})
    assert server.engine.submitted[-1].max_tokens == 16


def test_roles_and_parts_reach_the_template(server: RunningServer) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "d", "name": "someone"},
    ]
    assert send(server, CHAT, {"messages": messages}).status_code == 200
    expected = "<system>be brief\n<user>a\nb\n<assistant>c\n<user>d\n<assistant>"
    assert server.engine.prompts[-1] == expected


def test_model_defaults_apply_where_the_request_is_silent() -> None:
    defaults = {"temperature": 0.0, "top_k": 20}
    options = ServerOptions((BASE,), sampling_defaults=defaults, status_interval=None)
    with serving(make_fake_engine(), options) as running:
        send(running, CHAT, {"top_k": 3})
        params = running.engine.submitted[-1]
    assert (params.temperature, params.top_k) == (0.0, 3)
