"""Words with calls of strict tools among them: what a grammar lets through, and a parser finds."""

import json
import random
from functools import lru_cache
from typing import Any

import pytest
from helpers_walks import compiled
from test_engine_vocabulary import byte_level

from vexpert.engine.grammar import Compilers, Grammars, compile_text, unpack
from vexpert.engine.grammar_cache import key_of
from vexpert.engine.structured_outputs import StructuredOutputs, enforceable, own_tag
from vexpert.server.tools.formats import FORMATS, PYTHON_TAG
from vexpert.server.tools.parser import CallArguments, CallStart, ToolParser
from vexpert.server.tools.tags import words_constraint

xgrammar = pytest.importorskip("xgrammar")
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
}
TOOLS = [
    {"name": "look_up", "parameters": enforceable(CITY, "tools")[0]},
    {"name": "note", "parameters": {"type": "object"}},
]
GOOD = '{"name": "look_up", "%s": {"city": "Oslo"}}'
FREE = '{"name": "note", "%s": {"x": [1, {"y": null}]}}'
WRONG = (
    '{"name": "look_up", "%s": {"city": "Bonn"}}',
    '{"name": "look_up", "%s": {}}',
    '{"name": "look_up", "%s": {"city": "Oslo", "more": 1}}',
    '{"name": "other", "%s": {"city": "Oslo"}}',
    '{"name": "note", "%s": [1]}',
)
AROUND = {  # (what leads to a call and what ends it, words beside it)
    "hermes": [
        ("<tool_call>\n{}\n</tool_call>", True),
        ("<tool_call>{}</tool_call>", True),
        ("I look.\n\n<tool_call>\n{}\n</tool_call>\n so, done < <tool", True),
        ("<<tool_call>\n{}\n</tool_call><tool_call>\n{}\n</tool_call>", True),
        ("<tool_call>\n\n\n{}\n</tool_call>", False),
        ("<tool_call>\n{}", False),
        ("<tool_call>\n{}\n</tool_call>\n<tool_call>\n", False),
    ],
    "mistral": [
        ("[TOOL_CALLS][{}]", True),
        ("[TOOL_CALLS] [{}]", True),
        ("words [TOOL_CALL [TOOL_CALLS][{}, {}] and more", True),
        ("[TOOL_CALLS]{}", False),
        ("[TOOL_CALLS][]{}", False),
    ],
    "llama3_json": [
        ("{}", True),
        ("\n\u2003{}", True),
        (PYTHON_TAG + "{}", True),
        ("{}; {}", True),
        ("{} and more {{", True),
        ("{};", False),
        ("{}" + PYTHON_TAG, False),
    ],
}
WORDS = {
    "hermes": ["", "just words", "{ <tool_cal é \n<", '{"name": "look_up", "arguments": {}}'],
    "mistral": ["", "[TOOL_CALL", '[{"name": "look_up", "arguments": {}}]', "\U0001f600 \0"],
    "llama3_json": ["", " ", "words {", "<|python", "<|python_tag", "<|python_tac {", "<b>{</b>"],
}
BAD_WORDS = {
    "hermes": ["<tool_call>", "words <tool_call> are", '<tool_call>{"name": 1}</tool_call>'],
    "mistral": ["[TOOL_CALLS]", "words [TOOL_CALLS] are", "[TOOL_CALLS][[TOOL_CALLS]"],
    "llama3_json": ["{", " {}", "\xa0{x", PYTHON_TAG, f" {PYTHON_TAG}print(1)"],
}


def wanted(form: str) -> StructuredOutputs:
    return own_tag(words_constraint(FORMATS[form], TOOLS), 8, "tools", special_tokens=True)


@lru_cache(maxsize=8)
def grammar(form: str) -> Any:
    return compiled(wanted(form))


def accepts(form: str, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar(form))
    return bool(matcher.accept_string(text) and matcher.is_completed())


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_call_among_words_keeps_to_the_schema(form: str) -> None:
    key = FORMATS[form].arguments
    good, free, *wrong = (call % key for call in (GOOD, FREE, *WRONG))
    for template, is_fine in AROUND[form]:
        count = template.replace("{{", "").count("{}")
        for calls in ([good] * count, [free, good][:count], [good, free][:count]):
            assert accepts(form, template.format(*calls)) == is_fine, (template, calls)
        for call in wrong:
            assert not accepts(form, template.format(*[good, call][-count:])), (template, call)


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_words_stay_free(form: str) -> None:
    assert [text for text in WORDS[form] if not accepts(form, text)] == []
    assert [text for text in BAD_WORDS[form] if accepts(form, text)] == []


PIECES = [b"", *(bytes([byte]) for byte in range(256)), b"<tool_call>", b"</tool_call>"]
PIECES += [b"[TOOL_CALLS]", PYTHON_TAG.encode(), b"{", b'{"name": ', b'{"city": "', b"; ", b"]"]
PIECES += [mark.encode() for mark in ("</tool_call>\n<tool_call>", "\xa0{", "\u180e{", "\n</")]
LIKELY = range(257, len(PIECES))


def random_text(compiled: Any, rng: random.Random) -> str | None:
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, len(PIECES))
    text = b""
    for _ in range(200):
        matcher.fill_next_token_bitmask(mask)
        allowed = unpack(mask, len(PIECES))[0].nonzero().flatten().tolist()
        likely = [token for token in allowed if token in LIKELY]
        token = rng.choice(likely if likely and rng.random() < 0.6 else allowed)
        if 0 in allowed and rng.random() < 0.03:
            token = 0
        assert matcher.accept_token(token)
        if token == 0:
            return text.decode("utf-8", "replace")
        text += PIECES[token]
    return None


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_parser_finds_no_other_calls_in_random_texts(form: str) -> None:
    compiler = Compilers(PIECES, [0]).get(False)
    compiled = compile_text(compiler, *key_of(wanted(form)))
    rng, count = random.Random(5), 0
    for _ in range(120):
        text = random_text(compiled, rng)
        if text is None:
            continue
        parser = ToolParser(FORMATS[form], is_open=False, single=False)
        calls: list[list[str]] = []
        for event in parser.feed(text) + parser.finish():
            if isinstance(event, CallStart):
                calls.append([event.name, ""])
            elif isinstance(event, CallArguments):
                calls[-1][1] += event.text
        for name, arguments in calls:
            count += 1
            found = json.loads(arguments)
            assert name == "note" or found in ({"city": "Oslo"}, {"city": "Rome"}), text
            assert name in ("note", "look_up")
            assert isinstance(found, dict)
    assert count > 10


def test_marks_that_are_special_tokens_may_come_among_words() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    mark, end, other = tokenizer.convert_tokens_to_ids(["[TOOL_CALLS]", "</s>", "<|tool|>"])
    size = len(tokenizer)
    grammars = Grammars(tokenizer, size, (end,))
    tag = words_constraint(FORMATS["mistral"], TOOLS)

    def allowed(matcher: Any) -> set[int]:
        mask = xgrammar.allocate_token_bitmask(1, size)
        matcher.fill(mask, 0)
        return set(unpack(mask, size)[0].nonzero().flatten().tolist())

    free = grammars.matcher(wanted("mistral"))
    assert {mark, end, other} <= allowed(free)
    free.accept(other)
    free.accept(mark)
    following = tokenizer.convert_ids_to_tokens(sorted(allowed(free)))
    assert all(piece[0] in "Ġ[Ċ" for piece in following), following
    plain = grammars.matcher(own_tag(tag, 8, "tools"))
    assert not {mark, other} & allowed(plain)
    assert end in allowed(plain)
