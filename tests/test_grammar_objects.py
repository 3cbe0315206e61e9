"""Objects whose properties may be left out: the same texts as before, at less cost for a mask."""

import itertools
import json
import random
import re
import time
from typing import Any

import pytest
from helpers_walks import TOKENS, compiled, compiler

from vexpert.engine.grammar import Compilers, compile_text
from vexpert.engine.grammar_cache import GrammarCache, is_lazy, key_of
from vexpert.engine.grammar_objects import factored
from vexpert.engine.grammar_probe import needs_probe, walk
from vexpert.engine.structured_outputs import StructuredOutputs

xgrammar = pytest.importorskip("xgrammar")
NULL = {"type": "null"}
NAMES = ("a", "ab", "", '"', "c\\", "x) | (y", "b")


SPACINGS = (
    {"any_whitespace": True, "max_whitespace_cnt": 32},
    {"any_whitespace": False, "separators": (",", ":")},
)


def accepts(grammar: Any, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return bool(matcher.accept_string(text) and matcher.is_completed())


def schema_of(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.choice((1, 3, 5)))
    schema: dict[str, Any] = {"type": "object", "properties": dict.fromkeys(names, NULL)}
    schema["required"] = [name for name in names if rng.random() < rng.choice((0.1, 0.5))]
    schema["additionalProperties"] = rng.choice([False, False, NULL])
    if rng.random() < 0.3:
        schema["maxProperties"] = len(schema["required"]) + rng.randrange(3)
    return schema


def documents(names: list[str]) -> list[str]:
    """Objects of some of these names in many orders."""
    rows = itertools.chain.from_iterable(itertools.permutations(names, n) for n in range(4))
    texts = [", ".join(f"{json.dumps(name)}: null" for name in row) for row in rows]
    return [f"{{{text}}}" for text in texts] + ['{"a": null,}', '{,"a": null}', '{"a": null "ab"}']


@pytest.mark.parametrize("spacing", SPACINGS)
def test_a_factored_grammar_takes_the_same_texts(spacing: dict[str, Any]) -> None:
    rng, changed, taken = random.Random(2), 0, 0
    for _ in range(40):
        schema = schema_of(rng)
        grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), **spacing)
        text = factored(str(grammar))
        changed += text != str(grammar)
        one, other = compiler().compile_grammar(grammar), compiler().compile_grammar(text)
        names = [*schema["properties"], "other"]
        for loose in documents(names):
            document = loose if spacing["any_whitespace"] else re.sub("(?<=[,:]) ", "", loose)
            is_fine = accepts(one, document)
            assert accepts(other, document) == is_fine, (schema, document)
            taken += is_fine
    assert changed > 20
    assert taken > 200


def test_what_is_in_another_form_stays() -> None:
    lines = (
        'root_part_0 ::= ((root_part_1) | ("," "\\"b\\"" x root_part_1))',  # without root_part_1
        "root_part_0 ::= ((root_part_1{0, 3}))",
        'root_x ::= ("" | ("," "\\"b\\"" x))',
        'root_part_0 ::= ("" | ("," "\\"b) | (\\"" x))',
        'root_part_0 ::= ("" | (";" "\\"b\\"" x))',
    )
    for line in lines:
        assert factored(line) == line + "\n"


def median_of_masks(grammar: Any, text: str) -> float:
    """Seconds of the processor for the mask behind `text`."""
    matcher = xgrammar.GrammarMatcher(grammar)
    assert matcher.accept_string(text)
    mask = xgrammar.allocate_token_bitmask(1, len(PIECES))
    times = []
    for _ in range(9):
        begun = time.thread_time()
        matcher.fill_next_token_bitmask(mask)
        times.append(time.thread_time() - begun)
    return sorted(times)[4]


PIECES = TOKENS + [f'"{x}{y}'.encode() for x in ", :}]" for y in map(chr, range(33, 127))]


def test_masks_in_texts_of_wide_objects_cost_no_more_than_in_narrow_ones() -> None:
    """Each of these tokens may end the string and begin the next property."""
    made = Compilers(PIECES, [0]).get(False)
    costs = []
    for count in (2, 300):
        properties = {f"field_{i}": {"type": "string"} for i in range(count)}
        wanted = StructuredOutputs(json={"type": "object", "properties": properties})
        grammar = compile_text(made, *key_of(wanted))
        costs.append(median_of_masks(grammar, '{"field_0": "some te'))
    assert costs[1] < 15 * costs[0] + 1e-4  # 100 times, with a comma for each property


def open_object(count: int) -> StructuredOutputs:
    properties = {f"{i:x}_name_of_it": NULL for i in range(count)}
    schema = {"type": "object", "properties": properties, "additionalProperties": NULL}
    return StructuredOutputs(json=schema)


def test_masks_of_open_names_are_made_when_a_sequence_gets_there() -> None:
    assert not is_lazy(StructuredOutputs(json={"type": "object"}))
    assert not is_lazy(StructuredOutputs(json_object=True))
    assert not is_lazy(StructuredOutputs(regex="a{1000}"))
    assert not is_lazy(open_object(500))
    wanted = open_object(40)
    assert is_lazy(wanted)
    assert needs_probe(wanted)
    eager, lazy = (
        compile_text(Compilers(PIECES, [0]).get(kind), *key_of(wanted)) for kind in (False, True)
    )
    begun = lazy.memory_size_bytes
    assert begun < eager.memory_size_bytes / 3
    walk(lazy, len(PIECES))
    assert begun < lazy.memory_size_bytes < eager.memory_size_bytes
    for text in ('{"0_name_of_it": null}', '{"0_name_of_i": null}', '{"x": null}', '{"x": 1}'):
        assert accepts(lazy, text) == accepts(eager, text)
    assert compiled(wanted) is not None


def test_sequences_in_threads_share_a_lazy_grammar() -> None:
    lazy = compile_text(Compilers(PIECES, [0]).get(True), *key_of(open_object(20)))
    eager = compile_text(Compilers(PIECES, [0]).get(False), *key_of(open_object(20)))
    texts = [f'{{"{i:x}_name_of_{rest}' for i in range(20) for rest in ("", "i", "it", "other")]
    count = len(texts)
    masks = []
    for grammar in (lazy, eager):
        matchers = [xgrammar.GrammarMatcher(grammar) for _ in texts]
        for matcher, text in zip(matchers, texts, strict=True):
            assert matcher.accept_string(text)
        mask = xgrammar.allocate_token_bitmask(count, len(PIECES))
        xgrammar.BatchGrammarMatcher(max_threads=8).batch_fill_next_token_bitmask(matchers, mask)
        masks.append(mask)
    assert masks[0].equal(masks[1])


class Grown:
    """A compiled grammar that has grown since it was kept."""

    memory_size_bytes = 10


def test_the_cache_counts_what_grammars_have_grown_to() -> None:
    cache = GrammarCache(100)
    kept = [StructuredOutputs(regex=letter) for letter in "abc"]
    first = Grown()
    cache.put(kept[0], first)
    cache.put(kept[1], Grown())
    assert cache.get(kept[0]) is first
    first.memory_size_bytes = 95
    cache.put(kept[2], Grown())
    assert [cache.get(wanted) is None for wanted in kept] == [True, True, False]
    tagged = StructuredOutputs(regex="c", special_tokens=True)
    assert cache.get(tagged) is None  # for other tokens


def test_tags_may_name_tokens() -> None:
    """By number or by text; the text round a schema is the compiler's business."""
    made = Compilers([b"", *(bytes([byte]) for byte in range(256)), b"<tool>"], [0]).get(False)
    schema = {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 3}}
    for name in (257, "<tool>"):
        parts = [{"type": "token", "token": name}, schema]
        tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}
        grammar = compile_text(made, *key_of(StructuredOutputs(structural_tag=tag)))
        matcher = xgrammar.GrammarMatcher(grammar)
        assert matcher.accept_token(257)
        assert matcher.accept_string('"abc"')
        assert matcher.is_completed()
