"""Bodies of millions of values: refused before they are parsed, and one finding is enough."""

import json
import random
from typing import Any

import pytest
from helpers_server import BASE, make_fake_engine, serving
from pydantic import TypeAdapter, ValidationError

from vexpert.server import structure
from vexpert.server.protocol.chat import ChatCompletionRequest
from vexpert.server.protocol.completion import CompletionRequest
from vexpert.server.protocol.fields import MOST_UNKNOWN
from vexpert.server.protocol.tokenize import DetokenizeRequest
from vexpert.server.structure import MOST_NAMES, MOST_VALUES, excess

HEADERS = {"Content-Type": "application/json"}
HELLO: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "hello"}]}
MANY = 5000
CHAT = "/v1/chat/completions"


def pieces(text: str, size: int = 65536) -> list[bytes]:
    content = text.encode()
    return [content[start : start + size] for start in range(0, len(content), size)]


def count(value: Any) -> tuple[int, int]:
    """Commas, and colons with opening brackets, as the JSON of `value` has outside strings."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = list(value.values()) if isinstance(value, dict) else value
    below = [count(each) for each in inner]
    names = 1 + (len(value) if isinstance(value, dict) else 0)
    return (
        max(0, len(inner) - 1) + sum(each[0] for each in below),
        names + sum(each[1] for each in below),
    )


def some_value(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.2:
        return rng.choice([1, None, 'a"b', "\\", '\\"', ",:[{", 'é\\\\"', "", '"', "\n,"])
    if rng.random() < 0.5:
        return [some_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {some_value(rng, 0) or "k": some_value(rng, depth - 1) for _ in range(rng.randrange(4))}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"guided_choice": ["a"] * 40_000}, "guided_choice: 40000 parts; send at most 32768"),
        (
            {"structured_outputs": {"choice": ["a"] * 40_000}},
            "structured_outputs.choice: 40000 parts",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 9000}]},
            "messages[0].content: 9000 parts; send at most 8192",
        ),
    ],
)
def test_lists_of_many_small_parts(body: dict[str, Any], told: str) -> None:
    with serving(make_fake_engine()) as running:
        answer = running.post(CHAT, json=HELLO | body)
        assert answer.status_code == 400
        assert told in answer.json()["error"]["message"]


def test_what_lies_in_strings_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    for _ in range(300):
        value = {str(i): some_value(rng, 4) for i in range(3)}
        values, names = count(json.loads(json.dumps(value)))
        text = pieces(json.dumps(value, ensure_ascii=rng.random() < 0.5), size=rng.randrange(1, 9))
        for most, is_fine in [
            ((values, names), True),
            ((values - 1, names), False),
            ((values, names - 1), False),
        ]:
            monkeypatch.setattr(structure, "MOST_VALUES", most[0])
            monkeypatch.setattr(structure, "MOST_NAMES", most[1])
            if sum(map(len, text)) > most[1]:
                assert (excess(text) is None) == is_fine, value


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[" + "1," * MOST_VALUES + "1,1]", "values"),
        ("[" + '"",' * (2 * MOST_VALUES), "values"),
        ("[" * (MOST_NAMES + 1), "names"),
        ("{" + '"a":1,' * MOST_NAMES, "names"),
        ('{"a":"' + "[{,:" * MOST_VALUES + '"}', None),
        ('{"a":"' + '\\"[{,' * MOST_VALUES + '"}', None),
        ('"' + "\\\\" * MOST_VALUES + '",' + "[" * (MOST_NAMES + 1), "names"),
    ],
)
def test_bodies_at_the_limits(text: str, word: str | None) -> None:
    found = excess(pieces(text))
    assert (found is None) if word is None else (found is not None and word in found)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16", "utf-32", "utf-8-sig"])
def test_letters_that_hold_a_quote_hide_nothing(encoding: str) -> None:
    text = '{"a":"\u2200","b":[' + "[]," * MOST_NAMES
    json.loads(f"{text}1]}}".encode(encoding))  # which parsers take
    assert "names" in str(excess([text.encode(encoding)]))
    assert excess(['{"a":1}'.encode(encoding)]) is None


@pytest.mark.parametrize("chunked", [False, True])
def test_what_is_too_much_is_not_parsed(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"timeout": 60.0, "headers": HEADERS}
    with serving(make_fake_engine()) as running:
        content = ('{"a":[' + "1," * MOST_VALUES + "1,1]}").encode()
        monkeypatch.setattr("starlette.requests.json.loads", lambda _: pytest.fail("it is parsed"))
        body: Any = iter([content[:99], content[99:]]) if chunked else content
        response = running.post(CHAT, content=body, **options)
        monkeypatch.undo()
        assert response.status_code == 413
        assert "more than 1048576 values" in response.json()["error"]["message"]
        text = HELLO | {"user": ",:[{" * MOST_VALUES}
        assert running.post(CHAT, content=json.dumps(text), **options).status_code == 200


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (ChatCompletionRequest, {f"k{i}": 1 for i in range(MANY)}),
        (ChatCompletionRequest, {"messages": [1] * MANY}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": "x", "a": 1}] * MANY}),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "user", "content": [{"type": "text"}] * MANY}]},
        ),
        (ChatCompletionRequest, {"messages": [{str(i): 1 for i in range(MANY)}]}),
        (ChatCompletionRequest, {"tools": [1] * MANY}),
        (ChatCompletionRequest, {"stop": [1] * MANY}),
        (ChatCompletionRequest, {"stop_token_ids": [-1] * MANY}),
        (ChatCompletionRequest, {"guided_choice": [1] * MANY}),
        (ChatCompletionRequest, {"structured_outputs": {"choice": [1] * MANY}}),
        (ChatCompletionRequest, {"logit_bias": {str(i): "a" for i in range(MANY)}}),
        (ChatCompletionRequest, {"metadata": {str(i): 1 for i in range(MANY)}}),
        (CompletionRequest, {"prompt": [2**70] * MANY}),
        (CompletionRequest, {"prompt": [[2**70]] * MANY}),
        (CompletionRequest, {"prompt": [{}] * MANY}),
        (DetokenizeRequest, {"tokens": ["a"] * MANY}),
    ],
)
def test_one_finding_is_enough(model: Any, fields: dict[str, Any]) -> None:
    given = (HELLO if model is ChatCompletionRequest else {"model": BASE}) | fields
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(model).validate_python(given)
    assert 0 < caught.value.error_count() <= 2 * MOST_UNKNOWN
    name = next(iter(fields))
    assert name in {str(error["loc"][0]) for error in caught.value.errors()}


def test_of_unknown_fields_none_passes() -> None:
    known = {"structured_outputs": {"json": {}} | {f"k{i}": None for i in range(MANY)}}
    TypeAdapter(ChatCompletionRequest).validate_python(HELLO | known)
    for at in (0, MANY):  # wherever it stands
        rest = [(f"k{i}", None) for i in range(MANY)]
        rest.insert(at, ("k", 1))
        with pytest.raises(ValidationError):
            TypeAdapter(ChatCompletionRequest).validate_python(HELLO | dict(rest))
