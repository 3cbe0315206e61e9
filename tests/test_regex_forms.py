"""A regular expression means to the compiler what it means to its reader, or is refused."""

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vexpert.engine.regex_parser import RegexError
from vexpert.engine.regex_writer import rewritten, rewritten_in_json
from vexpert.engine.structured_outputs import StructuredOutputs
from vexpert.errors import RequestError

pytest.importorskip("xgrammar")

from helpers_walks import compiled, walk

TEXTS = 6  # of each expression
LARGEST = 24  # states; more of them take longer and show no more


def texts(wanted: StructuredOutputs, seed: int = 0) -> set[str]:
    grammar, rng = compiled(wanted), random.Random(seed)
    return {text for _ in range(TEXTS) if (text := walk(grammar, rng)) is not None}


CODED = [r"\x41", r"\u0042", r"\n"]
SETS = [r"\d", r"\w", r"\s", r"\D", r"\W", r"\S"]
IN_CLASS = [
    "a",
    "b-e",
    "^",
    r"\^",
    r"\]",
    r"\\",
    r"\-",
    "-",
    '"',
    "é",
    "😀",
    "[",
    "{",
    ".",
    "$",
    "|",
]
ALONE = ["a", "b", "0", " ", "é", "😀", '"', "'", "-", "]", "{", "}", "{x", "{,}", ",", "#", "&"]
ESCAPED = [r"\.", r"\\", r"\^", r"\$", r"\/", r"\{", r"\[", r"\t", r"\-"]
members = st.sampled_from([*IN_CLASS, *SETS, *CODED, "!-~", "_", "0-9"])
literals = st.sampled_from([*ALONE, *ESCAPED, *SETS, *CODED, "."])


@st.composite
def classes(draw: st.DrawFn) -> str:
    inner = draw(st.lists(members, min_size=1, max_size=4))
    text = "".join(inner)
    return f"[{'^' if draw(st.booleans()) else ''}{text}]"


counts = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "{1,2}?"])


def repeated(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(inner, counts).map("".join)


def grouped(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    sequence = st.lists(repeated(inner), min_size=0, max_size=3).map("".join)
    choice = st.lists(sequence, min_size=1, max_size=3).map("|".join)
    return st.tuples(st.sampled_from(["(", "(?:", "(?P<n>"]), choice).map(
        lambda x: f"{''.join(x)})"
    )


atoms = st.recursive(literals | classes(), grouped, max_leaves=4)
expressions = st.tuples(
    st.sampled_from(["", "^"]),
    st.lists(repeated(atoms), min_size=1, max_size=4).map("".join),
    st.sampled_from(["", "$"]),
).map("".join)


def python_reads(expression: str) -> re.Pattern[str] | None:
    """What Python makes of it; None where it is no expression, or warns that it may change."""
    try:
        return re.compile(expression, re.ASCII)
    except (re.error, FutureWarning):  # fmt: skip
        return None


@settings(max_examples=120, deadline=None, derandomize=True)
@given(expressions)
def test_texts_of_an_expression_match_it(expression: str) -> None:
    read = python_reads(expression)
    try:
        _, size = rewritten(expression)
    except RegexError:
        return
    if read is None or size > LARGEST:
        return
    for text in texts(StructuredOutputs(regex=expression)):
        assert read.fullmatch(text), (expression, rewritten(expression)[0], text)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(expressions, st.sampled_from(["pattern", "patternProperties", "propertyNames"]))
def test_strings_and_names_of_a_pattern_match_it(expression: str, keyword: str) -> None:
    read = python_reads(expression)
    null = {"type": "null"}
    schema = {
        "pattern": {"type": "string", "pattern": expression},
        "patternProperties": {
            "type": "object",
            "patternProperties": {expression: null},
            "minProperties": 1,
        },
        "propertyNames": {
            "type": "object",
            "propertyNames": {"type": "string", "pattern": expression},
            "additionalProperties": null,
        },
    }[keyword]
    try:
        _, size = rewritten_in_json(expression)
    except RegexError:
        return
    if read is None or size > LARGEST:
        return
    for text in texts(StructuredOutputs(json=schema, disable_any_whitespace=True)):
        document = json.loads(text)
        for string in [document] if isinstance(document, str) else document:
            assert read.search(string), (expression, text)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (r"[\^a]", {"^", "a"}),
        (r"x[\^]", {"x^"}),
        (r"^(a|b)$", {"a", "b"}),
        ("^a|b$", {"a", "b"}),
        (r"[\x5e-\x60]", {"^", "_", "`"}),
        (r"\.\^", {".^"}),
        ("(?<name>a)", {"a"}),
        ('{"n": [01]}', {'{"n": 0}', '{"n": 1}'}),
        ("a{0}", {""}),
        ("😀|[😀]", {"😀"}),
    ],
)
def test_what_was_read_otherwise_before(expression: str, expected: set[str]) -> None:
    found = set[str]()
    for seed in range(5):
        found |= texts(StructuredOutputs(regex=expression), seed)
    assert found == expected


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("a^b", "only at the beginning"),
        ("a$b", "only at the end"),
        ("(^a|b$)c", "only at the end"),
        ("(^a)*b", "only at the beginning"),
        (r"\bword", r"'\\b' is not served"),
        (r"(a)\1", r"'\\1' is not served"),
        ("a(?=b)", "Lookahead"),
        ("(?<!b)a", "Lookahead or lookbehind"),
        ("(?i)a", "not served"),
        ("a++", "repetition of a repetition"),
        ("a{2}{3}", "repetition of a repetition"),
        ("a{,3}", "readers take differently"),
        ("a{3,2}", "smaller"),
        ("a{100000}", "at most 65536"),
        ("[]a]", "readers take differently"),
        ("[[:alpha:]]", "in a class"),
        ("[z-a]", "no range"),
        ("[a", "not closed"),
        ("(a", "not closed"),
        ("a)", "without"),
        ("*a", "nothing to repeat"),
        (r"\ud83d", "not a character"),
        (r"[^\s\S]", "no character"),
        ("(" * 70 + ")" * 70, "64 deep"),
        ("a\\", "ends too early"),
    ],
)
def test_what_readers_do_not_agree_on_is_refused(expression: str, told: str) -> None:
    with pytest.raises(RequestError) as refused:
        StructuredOutputs(regex=expression)
    assert told in str(refused.value)
