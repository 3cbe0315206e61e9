"""Where a token is a single byte, the bytes of a constrained text are UTF-8."""

from functools import lru_cache
from typing import Any

import pytest

from vexpert.engine.grammar import Compilers, compile_text
from vexpert.engine.grammar_cache import key_of
from vexpert.engine.structured_outputs import StructuredOutputs, enforceable
from vexpert.server.tools.formats import FORMATS
from vexpert.server.tools.tags import calls_constraint, words_constraint

xgrammar = pytest.importorskip("xgrammar")
TEXT = {"type": "string"}
OBJECT = {"type": "object", "properties": {"a": TEXT}, "additionalProperties": TEXT}
TOOL = {"name": "f", "parameters": enforceable(OBJECT, "tools")[0]}
CALLS = calls_constraint(FORMATS["hermes"], [TOOL], single=True)
WORDS = words_constraint(FORMATS["llama3_json"], [TOOL])
KINDS: dict[str, tuple[dict[str, Any], str, str]] = {  # and what stands around the text
    "free": ({"json": TEXT}, '"', '"'),
    "any object": ({"json_object": True}, '{"a": "', '"}'),
    "any name": ({"json_object": True}, '{"', '": 1}'),
    "length": ({"json": TEXT | {"maxLength": 9}}, '"', '"'),
    "any pattern": ({"json": TEXT | {"pattern": "^.*$"}}, '"', '"'),
    "all but": ({"json": TEXT | {"pattern": "^[^a]*$"}}, '"', '"'),
    "wide class": ({"json": TEXT | {"pattern": "^[\\u{80}-\\u{10ffff}]*$"}}, '"', '"'),
    "with a caret": ({"json": TEXT | {"pattern": "^[\\^-\\u{10ffff}]*$"}}, '"', '"'),
    "open name": ({"json": OBJECT}, '{"', '": "x"}'),
    "value": ({"json": OBJECT}, '{"a": "', '"}'),
    "name of a length": ({"json": {"propertyNames": TEXT | {"minLength": 1}}}, '{"', '": 1}'),
    "expression": ({"regex": "[^a]*"}, "", ""),
    "call": (
        {"structural_tag": CALLS},
        '{"name": "f", "arguments": {"b": "',
        '"}}\n</tool_call>',
    ),
    "words": ({"structural_tag": WORDS}, "so ", ""),
}
KINDS["name of a length"][0]["json"]["type"] = "object"
BROKEN = [
    *(b"\xc0\x80", b"\xc1\xbf", b"\xe0\x80\x80", b"\xe0\x9f\xbf"),  # overlong
    *(b"\xf0\x80\x80\x80", b"\xf0\x8f\xbf\xbf"),
    *(b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80"),
    *(b"\x80", b"\xff", b"\xc3", b"\xe6\x97", b"\xc3\xc3\xa9"),
]
EDGES = "\x7e\x7f\x80\u07ff\u0800\u0fff\u1000\ucfff\ud7ff\ue000\uffff\U00010000\U0003ffff\U0010ffff"


@lru_cache(maxsize=1)
def compiler() -> Any:
    return Compilers([b"", *(bytes([byte]) for byte in range(256))], [0]).get(False)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_text_are_characters(kind: str) -> None:
    wanted, before, behind = KINDS[kind]
    grammar = compile_text(compiler(), *key_of(StructuredOutputs(**wanted)))

    def accepts(middle: bytes) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar)
        text = before.encode() + middle + behind.encode()
        return bool(matcher.accept_string(text) and matcher.is_completed())

    assert [middle for middle in BROKEN if accepts(middle)] == []
    edges = EDGES[2:] if kind == "wide class" else EDGES
    assert [character for character in edges if not accepts(character.encode())] == []
