"""A schema that is accepted is enforced in full; what cannot be enforced is named."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from vexpert.engine.grammar import Compilers, compile_text
from vexpert.engine.json_form import compiled_form
from vexpert.engine.json_schema import check_schema
from vexpert.engine.structured_outputs import MAX_WHITESPACE, enforceable
from vexpert.server.tools.formats import FORMATS
from vexpert.server.tools.tags import calls_constraint

xgrammar = pytest.importorskip("xgrammar")
jsonschema_rs = pytest.importorskip("jsonschema_rs")

STRING = {"type": "string"}
ANY_OBJECT = {"type": "object", "additionalProperties": True}
DOCUMENTS = (
    '{%s"a"%s:%s[%s1%s,%s2%s]%s,%s"b"%s:%s{%s"c"%s:%snull%s}%s}',
    '{"a":[%s],"b":{%s}}',
)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "array", "items": STRING, "uniqueItems": True}, "'uniqueItems' beside 'type'"),
        ({"not": STRING}, "'not' cannot be enforced"),
        ({"if": STRING, "then": {}}, "'if' cannot be enforced"),
        ({"allOf": [STRING, {"maxLength": 3}]}, "allOf"),
        ({"anyOf": [STRING], "maxLength": 3}, "'maxLength' beside 'anyOf'"),
        ({"anyOf": []}, "list of schemas"),
        ({"$ref": "#/$defs/a", "maxLength": 2, "$defs": {"a": STRING}}, "'maxLength' beside"),
        ({"$ref": "http://x/y"}, "only to a place in this schema"),
        ({"$ref": "#/$defs/b", "$defs": {}}, "no schema at"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "two of pattern, format"),
        ({"type": "string", "minimum": 3}, "'minimum' beside 'type'"),
        ({"type": "string", "maxLength": 2.5}, "integer from 0"),
        ({"type": "string", "pattern": 'a"'}, "asks for a quote"),
        ({"type": "string", "pattern": r"\ba"}, "is not served"),
        ({"type": "string", "pattern": r"\\"}, "asks for a quote"),
        ({"type": "string", "pattern": r"a\tb"}, "asks for a quote"),
        ({"type": "object", "patternProperties": {r"\x09": STRING}}, "asks for a quote"),
        ({"minLength": 3}, "without a type"),
        ({"enum": ["a", 1], "type": "string"}, "1 is not of type 'string'"),
        ({"enum": []}, "not empty"),
        ({"type": []}, "use one or more of"),
        ({"type": "colour"}, "use one or more of"),
        ({"type": "object", "properties": {}, "required": ["z"]}, "'z' is not among"),
        ({"type": "object", "properties": [1]}, "object of schemas"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "properties 'a': 'not'"),
        ({"type": "array", "items": [STRING]}, "items is not a schema"),
        ({"type": "array", "contains": STRING}, "'contains' beside"),
        ({"$defs": {"a": {"type": "colour"}}, "type": "null"}, "$defs 'a'"),
    ],
)
def test_what_cannot_be_enforced_is_named(schema: Any, told: str) -> None:
    fault = check_schema(schema, strict=True)
    assert fault is not None
    assert told in fault


def test_depth_is_bounded() -> None:
    schema: dict[str, Any] = STRING
    for _ in range(70):
        schema = {"type": "array", "items": schema}
    assert "64 deep" in str(check_schema(schema, strict=True))


def test_what_pydantic_writes_is_accepted() -> None:
    from pydantic import BaseModel, Field

    class Part(BaseModel):
        """A part."""

        name: str = Field(description="its name", examples=["bolt"])
        next: "Part | None" = None

    class Order(BaseModel):
        parts: list[Part]
        state: str = "new"
        sizes: tuple[int, float]
        extra: dict[str, int] = {}

    assert check_schema(Order.model_json_schema(), strict=True) is None


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of any of the kinds that are accepted, mostly."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "bare"]
    kinds += ["object", "array", "anyOf"] * 2 if depth < 3 else []
    kind = rng.choice(kinds)
    match kind:
        case "string":
            sizes = [{}, {"minLength": 1, "maxLength": 4}, {"pattern": "^[a-c]+$"}]
            sizes += [{"format": "date"}, {"pattern": r"^[^a\]]*[\s\S].\w$"}]
            return {"type": "string", **rng.choice(sizes)}
        case "integer" | "number":
            return {"type": kind, **rng.choice([{}, {"minimum": -3, "maximum": 12}])}
        case "enum":
            return {"enum": rng.sample([1, "a", None, True, [1], {"b": 2}], 2)}
        case "const":
            return {"const": rng.choice([1.5, "x y", {"a": [None]}])}
        case "object":
            names = rng.sample(["a", "b", "c c", 'd"'], rng.randrange(1, 4))
            inner = {name: random_schema(rng, depth + 1) for name in names}
            required = rng.sample(names, rng.randrange(len(names) + 1))
            return {"type": "object", "properties": inner, "required": required}
        case "array":
            return {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": 2}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    return {"type": rng.choice(["boolean", "null", ["string", "integer"]])}


def test_lengths_and_values_stay_as_they_are() -> None:
    schema = {"type": "object", "properties": {"maxLength": {"type": "string", "maxLength": 2}}}
    inner = compiled_form(schema, True)[0]["properties"]["maxLength"]
    assert inner == {"type": "string", "maxLength": 2}
    values = {"enum": [{"type": "string", "maxLength": 2}], "title": "x"}
    assert compiled_form(values, True)[0] == {"enum": values["enum"]}


def walk(compiled: Any, vocabulary: list[bytes], rng: random.Random) -> str:
    """A random text of the grammar; ends it as soon as it may end, most of the time."""
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, len(vocabulary))
    text = b""
    for _ in range(600):
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [t for t in range(len(vocabulary)) if words[t // 32] >> (t % 32) & 1]
        closers = [t for t in allowed if t == 0 or vocabulary[t] in (b'"', b"}", b"]")]
        token = rng.choice(closers if closers and rng.random() < 0.7 else allowed)
        assert matcher.accept_token(token)
        if token == 0:
            return text.decode()
        text += vocabulary[token]
    return ""


def test_texts_of_random_schemas_are_valid() -> None:
    vocabulary = [b"", *(bytes([byte]) for byte in range(127))]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_size=len(vocabulary), stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    rng = random.Random(3)
    complete = 0
    for _ in range(150):
        schema = random_schema(rng)
        assert check_schema(schema, strict=True) is None, schema
        form = json.dumps(compiled_form(schema, True)[0])
        compiled = compile_text(compiler, "json", form, True, False)
        text = walk(compiled, vocabulary, rng)
        if text:
            complete += 1
            jsonschema_rs.validator_for(schema).validate(json.loads(text))
    assert complete > 100


def grammars(compiler: Any) -> Iterator[tuple[str, Any, str]]:
    """(name, compiled grammar, text around a document) of all ways to an object."""
    for kind, text in (("json_object", '{"type":"object"}'), ("json", json.dumps(ANY_OBJECT))):
        yield kind, compile_text(compiler, kind, text, True, False), "%s"
    tools = [{"name": "f", "parameters": enforceable(ANY_OBJECT, "tools")[0]}]
    for form in FORMATS.values():
        tag = calls_constraint(form, tools, single=False)
        compiled = compile_text(compiler, "structural_tag", tag, True, False)
        yield form.name, compiled, f'{{"name": "f", "{form.arguments}": %s}}{form.closing}'


def test_white_space_is_bounded_between_all_parts() -> None:
    pieces = [bytes([byte]) for byte in range(256)] + [b""]
    compiler = Compilers(pieces, [256]).get(False)

    def accepts(compiled: Any, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return bool(matcher.accept_string(text) and matcher.is_completed())

    seen = []
    for name, compiled, around in grammars(compiler):
        seen.append(name)
        document = {"a": [1, {"b": None}], "c": "x" * 100 + " " * 100}
        assert accepts(compiled, around % json.dumps(document, indent=8))  # blanks in strings too
        for template in DOCUMENTS:
            places = template.count("%s")
            for space in (" ", "\n", "\t", "\r"):
                full = template % ((space * MAX_WHITESPACE,) * places)
                assert accepts(compiled, around % full), (name, template)
            for place in range(places):
                more = [""] * places
                more[place] = " " * (MAX_WHITESPACE + 1)
                assert not accepts(compiled, around % (template % tuple(more))), (name, template)
    assert seen == ["json_object", "json", "hermes", "mistral", "llama3_json"]
