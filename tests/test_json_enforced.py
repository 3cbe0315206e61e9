"""What a schema says of numbers, names, values and places is kept by every text, or refused."""

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vexpert.engine.grammar_probe import needs_probe
from vexpert.engine.structured_outputs import StructuredOutputs, enforceable
from vexpert.errors import RequestError
from vexpert.server.tools.formats import FORMATS
from vexpert.server.tools.tags import calls_constraint

pytest.importorskip("xgrammar")
jsonschema_rs = pytest.importorskip("jsonschema_rs")

from helpers_walks import compiled, walk  # noqa: E402 - needs xgrammar

TEXTS = 4  # of each schema
NULL = {"type": "null"}
values = st.sampled_from(
    [None, True, 0, -3, 2.5, 1e10, "", "a", 'ü"\\\n', "😀", [1, "x"], {"k": [None]}, 2**63 - 1]
)
bounds = st.sampled_from([-100, -7, -1, 0, 1, 5, 9, 10, 99, 100, 12345, 1e3, 0.5, -1.5, 3.141593])
names = st.sampled_from(["a", "ab", "abc", "d e", "ü", '"q', "", "b"])


@st.composite
def numbers(draw: st.DrawFn) -> Any:
    schema: Any = {"type": draw(st.sampled_from(["integer", "number", ["integer", "null"]]))}
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if draw(st.integers(0, 3)) == 0:
            schema[name] = draw(bounds)
    if draw(st.booleans()):
        schema["multipleOf"] = draw(st.sampled_from([1, 2, 3, 5, 10, 7.0, 0.5, 1.5, 100]))
    return schema


TEXT_FORMATS = ("date", "time", "email", "uuid", "ipv4", "uri", "hostname")
OF_STRINGS: list[dict[str, Any]] = [
    {"minLength": 1, "maxLength": 3},
    {"maxLength": 0},
    {"pattern": "^[a-c]+$"},
    {"pattern": '["x]'},
    *({"format": kind} for kind in TEXT_FORMATS),
]
strings = st.sampled_from(OF_STRINGS).map(lambda more: {"type": "string", **more})


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> Any:
    properties = draw(st.dictionaries(names, inner, max_size=3))
    schema: Any = {"type": "object", "properties": properties}
    schema["required"] = [name for name in properties if draw(st.booleans())]
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(st.booleans() | inner)
    for name in ("minProperties", "maxProperties"):
        if draw(st.integers(0, 3)) == 0:
            schema[name] = draw(st.integers(0, 3))
    if draw(st.integers(0, 5)) == 0:
        schema["patternProperties"] = {draw(st.sampled_from(["^x", "[0-9]+$"])): draw(inner)}
    if draw(st.integers(0, 5)) == 0:
        schema["propertyNames"] = draw(strings)
    return schema


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> Any:
    schema: Any = {"type": "array"}
    if draw(st.booleans()):
        schema["items"] = draw(inner)
    for name in ("minItems", "maxItems"):
        if draw(st.booleans()):
            schema[name] = draw(st.integers(0, 3))
    return schema


leaves = (
    numbers()
    | strings
    | values.map(lambda value: {"const": value})
    | st.lists(values, min_size=1, max_size=3).map(lambda several: {"enum": several})
    | st.just({"$ref": "#/$defs/d~1e"})
)
schemas = st.recursive(leaves, lambda inner: objects(inner) | arrays(inner), max_leaves=6)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(schemas, numbers() | strings, st.booleans(), st.integers(0, 9))
def test_texts_of_an_accepted_schema_are_valid(
    schema: Any, shared: Any, strict: bool, seed: int
) -> None:
    whole = {"$defs": {"d/e": shared}, "type": "object", "properties": {"p": schema}}
    try:
        wanted = StructuredOutputs(json=whole, strict=strict, disable_any_whitespace=True)
        grammar = compiled(wanted)
    except (RequestError, RuntimeError):
        return
    check_texts(grammar, whole, random.Random(seed))


def check_texts(grammar: Any, schema: Any, rng: random.Random) -> int:
    """The number of complete texts, all of which are valid."""
    validator, complete = jsonschema_rs.Draft202012Validator(schema), 0
    for _ in range(TEXTS):
        text = walk(grammar, rng)
        if text is not None:
            complete += 1
            validator.validate(json.loads(text))
    return complete


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer", "minimum": 10, "maximum": 30, "multipleOf": 10}, {10, 20, 30}),
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 7, "multipleOf": 2.5}, {5}),
        ({"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.5}, {0, 0.5, 1}),
        ({"type": ["integer", "null"], "minimum": 4, "maximum": 6, "multipleOf": 5}, {5, None}),
        ({"type": "integer", "minimum": 0.5, "exclusiveMaximum": 3}, {1, 2}),
        ({"type": "string", "pattern": '^["x\\\\]$'}, {"x"}),
        ({"enum": ["😀", "\u2028"]}, {"😀", "\u2028"}),
        ({"const": 2**63 - 1}, {2**63 - 1}),
    ],
)
def test_all_texts_and_no_others(schema: Any, expected: set[Any]) -> None:
    grammar, rng = compiled(StructuredOutputs(json=schema)), random.Random(0)
    assert {json.loads(walk(grammar, rng) or "") for _ in range(30)} == expected


@pytest.mark.parametrize("multiple", [3, 10, 100])
def test_multiples_without_bounds(multiple: int) -> None:
    for kind in ("integer", "number"):
        schema = {"type": kind, "multipleOf": multiple}
        grammar, rng = compiled(StructuredOutputs(json=schema)), random.Random(0)
        found = [json.loads(text) for _ in range(30) if (text := walk(grammar, rng))]
        assert len(set(found)) > 5
        assert all(value % multiple == 0 for value in found)


def test_an_open_name_is_never_one_of_the_named() -> None:
    """Not even by an escape, as "\\u0061" for "a"."""
    schema = {
        "type": "object",
        "properties": {"a": NULL, "ab": NULL, '"q': NULL, "x" * 60: NULL},
        "additionalProperties": {"type": "boolean"},
    }
    grammar = compiled(StructuredOutputs(json=schema, disable_any_whitespace=True))
    import xgrammar

    def accepts(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar)
        return bool(matcher.accept_string(text) and matcher.is_completed())

    for good in ('{"a":null}', '{"b":true}', '{"abc":true}', '{"":true}', '{"a":null,"é":false}'):
        assert accepts(good), good
    assert accepts('{"\\"q":null}')
    for bad in ("a", "ab", "\\u0061", '"q', '\\"q', "x" * 60):
        assert not accepts(f'{{"{bad}":true}}'), bad


def accepts(grammar: Any, text: str | bytes) -> bool:
    """Whether `text` is a whole one of the grammar's."""
    import xgrammar

    matcher = xgrammar.GrammarMatcher(grammar)
    return bool(matcher.accept_string(text) and matcher.is_completed())


@pytest.mark.parametrize("length", [0, 1, 507, 5000, 60000])
def test_any_length_is_quick_and_exact(length: int) -> None:
    text = {"type": "string", "minLength": length, "maxLength": length}
    other = {"enum": ["\u2028😀", 'a"\\\n[^\\"\\\\\\r\\n]', "é"]}
    properties = {"t": text, "p": {"type": "string", "pattern": "^(?:é|[x-z]{2})$"}, "o": other}
    schema = {"type": "object", "properties": properties, "required": ["t", "p", "o"]}
    wanted = StructuredOutputs(json=schema, disable_any_whitespace=True)
    assert not needs_probe(wanted)
    compiled(StructuredOutputs(json={}))  # the compiler itself takes 0.7 s to make
    begun = time.thread_time()
    grammar = compiled(wanted)
    assert time.thread_time() - begun < 0.1

    def whole(text: str, pattern: str = "é", value: Any = other["enum"][1]) -> str:
        values = {"t": text, "p": pattern, "o": value}
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"))

    for character in ("x", "é", "😀"):
        assert accepts(grammar, whole(character * length))
        assert not accepts(grammar, whole(character * (length + 1)))
    for value in other["enum"]:
        assert accepts(grammar, whole("x" * length, "xy", value))
    assert not accepts(grammar, whole("x" * length, "x"))
    assert length == 0 or not accepts(grammar, whole("x" * (length - 1)))


@pytest.mark.parametrize(
    "inside", [*map(chr, range(0x20)), "\\n", '"', b"\xc0\x80", b"\xe0\x9d\xb9"]
)
def test_what_a_length_counts_may_stand_in_json(inside: str | bytes) -> None:
    grammar = compiled(StructuredOutputs(json={"type": "string", "maxLength": 9}))
    raw = inside.encode() if isinstance(inside, str) else inside
    assert accepts(grammar, b'"a"')
    assert not accepts(grammar, b'"a%s"' % raw)


ENUM = {"Color": {"enum": ["red", "blue"], "type": "string"}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "required": ["a"]}, ['{"a":1}', '{"a":{"x":2}}'], ["{}", '{"b":1}']),
        (
            {"type": "object", "required": ["a"], "additionalProperties": True},
            ['{"a":1}', '{"a":1,"b":[2]}'],
            ["{}", '{"b":1}'],
        ),
        ({"type": "string", "x-order": 1, "nullable": False}, ['"a"'], ["null"]),
        ({"enum": ["", "ab", "abc", 7], "minLength": 1, "maxLength": 2}, ['"ab"', "7"], ['""']),
        (
            {
                "type": "object",
                "propertyNames": {"$ref": "#/$defs/Color"},
                "additionalProperties": {"type": "integer"},
                "$defs": ENUM,
            },
            ['{"red":1}', '{"blue":2}', "{}"],
            ['{"green":1}', '{"red":"x"}'],
        ),
        ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ['"ab"'], ['""', '"abc"']),
        ({"type": "array", "items": NULL, "maxItems": 1.0}, ["[null]"], ["[null,null]"]),
        ({"enum": ["", "ab"], "minLength": 1.0}, ['"ab"'], ['""']),
        (
            {"type": "object", "minProperties": 1.0, "additionalProperties": NULL},
            ['{"a":null}'],
            ["{}"],
        ),
        (
            {
                "type": "object",
                "propertyNames": {"pattern": "^a+$"},
                "additionalProperties": NULL,
            },
            ['{"aa":null}', "{}"],
            ['{"b":null}'],
        ),
        ({"type": "array", "prefixItems": [NULL]}, ["[null]", "[]"], ["[null,null]"]),
        ({"type": "array", "prefixItems": [NULL], "items": True}, ["[null,1]"], ["[1]"]),
        (
            {"type": "object", "properties": {"x-a": NULL, "nullable": NULL, "b": NULL}},
            ['{"x-a":null}', '{"b":null}'],
            ['{"c":null}'],
        ),
    ],
)
def test_what_other_writers_leave_in_a_schema(schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = compiled(StructuredOutputs(json=schema, disable_any_whitespace=True))
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "object", "required": ["a"], "additionalProperties": {"type": "null"}},
        {"type": "object", "required": ["a"], "minProperties": 2},
        {"type": "object", "required": [1]},
        {"type": "string", "nullable": True},
        {"enum": ["a"], "minLength": 2},
        {"enum": ["a"], "minLength": "2"},
        {"type": "object", "propertyNames": {"$ref": "#/$defs/N"}, "$defs": {"N": NULL}},
        {"type": "object", "propertyNames": {"$ref": "#/$defs/none"}, "$defs": {}},
        {"type": "object", "propertyNames": {"$ref": "#"}},
    ],
)
def test_what_looks_like_those_and_binds_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError):
        StructuredOutputs(json=schema)


def test_lengths_in_tool_calls_and_of_names() -> None:
    names = {"type": "string", "minLength": 1, "maxLength": 4000}
    schema = {"type": "object", "propertyNames": names, "additionalProperties": NULL}
    tool = {"name": "f", "parameters": enforceable(schema, "tools")[0]}
    tag = calls_constraint(FORMATS["hermes"], [tool], single=True)
    grammar = compiled(StructuredOutputs(structural_tag=tag))
    for name, is_fine in (("a", 1), ("é" * 4000, 1), ("", 0), ("a" * 4001, 0), ("\t", 0)):
        call = f'{{"name": "f", "arguments": {{"{name}": null}}}}\n</tool_call>'
        assert accepts(grammar, call) == bool(is_fine), name[:9]


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "integer", "minimum": 0, "multipleOf": 5}, "give both minimum and maximum"),
        ({"type": "number", "multipleOf": 0.1}, "give both minimum and maximum"),
        ({"type": "integer", "multipleOf": 4096}, "at most 1024"),
        ({"type": "integer", "multipleOf": 0}, "above 0"),
        ({"type": "integer", "minimum": 0, "maximum": 10**6, "multipleOf": 2}, "500001 multiples"),
        ({"type": "integer", "minimum": 11, "maximum": 19, "multipleOf": 10}, "no multiple"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "no integer"),
        ({"type": "integer", "minimum": 10**30}, "beyond"),
        ({"type": "integer", "exclusiveMinimum": True}, "use a number"),
        ({"type": "number", "minimum": 1e-9, "maximum": 2e-9}, "six decimals"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}, "six decimals"),
        ({"type": "number", "minimum": 10**400}, "cannot be enforced"),
        ({"type": "string", "pattern": '^["\\\\]$'}, "asks for a quote"),
        ({"type": "string", "pattern": "^[\\n]$"}, "asks for a quote"),
        ({"type": "object", "patternProperties": {'["]': NULL}}, "asks for a quote"),
        ({"const": 2**63}, "as strings"),
        ({"enum": [{"a": [-(2**70)]}]}, "as strings"),
        ({"$ref": "#/default", "default": {"not": {}}}, "no schema at"),
        ({"$ref": "#/examples", "examples": {"not": {}}}, "no schema at"),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a%20b": NULL, "a b": NULL}}, "rename"),
        (
            {"type": "object", "properties": {"a": NULL}, "patternProperties": {"a": NULL}},
            "properties beside patternProperties",
        ),
        (
            {"type": "object", "properties": {"a": NULL}, "propertyNames": {"type": "string"}},
            "properties beside",
        ),
        ({"type": "object", "propertyNames": {"type": "integer"}}, "propertyNames"),
        ({"type": "object", "patternProperties": {"a": NULL, "b": NULL}}, "one pattern"),
        ({"type": "object", "minProperties": 2, "additionalProperties": NULL}, "at most 1"),
        ({"type": "object", "minProperties": 3, "properties": {"a": NULL}}, "at most 1"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no more than"),
        ({"type": "array", "minItems": -1}, "from 0"),
        ({"type": "string", "minLength": True}, "from 0"),
        ({"type": "string", "minLength": 1e300}, "use at most"),
        ({"type": "object", "propertyNames": {"minimum": 3}}, "propertyNames"),
        ({"type": "array", "maxItems": 2.5}, "from 0"),
        ({"type": "string", "pattern": "a", "format": "date"}, "two of"),
        ('{"maximum": ' + "1" * 5000 + ', "type": "integer"}', "not valid JSON"),
    ],
)
def test_what_cannot_be_kept_is_refused(schema: Any, told: str) -> None:
    with pytest.raises(RequestError) as refused:
        StructuredOutputs(json=schema)
    assert told in str(refused.value)


def test_choices_are_written_as_they_are() -> None:
    choices = ["😀", "\U0010ffff", "a\nb", '"q"', "\\", "\x7f", "é", "/*x*/"]
    for choice in choices:
        import xgrammar

        matcher = xgrammar.GrammarMatcher(compiled(StructuredOutputs(choice=[choice, "other"])))
        assert matcher.accept_string(choice)
        assert matcher.is_completed()


def test_the_compiler_warns_of_nothing_that_is_accepted(capfd: pytest.CaptureFixture[str]) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.5},
            "b": {"type": "integer", "multipleOf": 1.5},
            "c": {"type": "string", "pattern": r"^\[x\]\ \<$"},
            "d": {"type": "string", "maxLength": 2**40},
        },
    }
    compiled(StructuredOutputs(json=schema))
    assert capfd.readouterr().err == ""


def test_a_form_that_is_a_schema_is_enforced_in_tool_calls() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 2.5}}}
    assert enforceable(schema, "tools")[0]["properties"]["n"] == {
        "type": ["integer"],
        "multipleOf": 5,
    }
