"""Structured output on the demo model: constrained answers are right, free ones as before."""

import json
import os
import re
import signal
import time
from typing import Any

import pytest
import torch

from vexpert import LLM, SamplingParams, StructuredOutputs, demo
from vexpert.engine.grammar import Grammars, mask_logits, unpack
from vexpert.errors import RequestError

xgrammar = pytest.importorskip("xgrammar")
jsonschema_rs = pytest.importorskip("jsonschema_rs")

HELLO = [{"role": "user", "content": "hello"}]
NAMES = [None, "upper", "reverse", "sort", "shift"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "maxLength": 5},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "b", None]},
    },
    "required": ["word", "count", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    llm = LLM(max_num_seqs=128)
    for name, path in demo.adapter_paths().items():
        llm.load_adapter(name, str(path))
    return llm


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowded machine may hold up the process that compiles."""
    monkeypatch.setattr("vexpert.engine.grammar_probe.SECONDS", 60)


def constrained(limit: int = 200, **kind: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=limit, structured_outputs=kind)


def text_of(output: Any) -> str:
    return str(output.outputs[0].text)


def test_json_schema_is_kept_in_200_of_200_beside_free_requests(llm: LLM) -> None:
    wanted = constrained(json=SCHEMA, disable_any_whitespace=True)
    free = SamplingParams(temperature=0, max_tokens=12)
    params = [free if i % 5 == 4 else wanted for i in range(250)]
    names = [NAMES[i // 5 % 5] for i in range(250)]
    outputs = llm.chat([HELLO] * 250, params, adapter=names)
    validator = jsonschema_rs.validator_for(SCHEMA)
    answers = [text_of(o) for o, p in zip(outputs, params, strict=True) if p is wanted]
    assert len(answers) == 200
    for answer in answers:
        validator.validate(json.loads(answer))
    assert len(set(answers)) > 150  # not one answer over and over
    alone = dict(zip(NAMES, llm.chat([HELLO] * 5, free, adapter=NAMES), strict=True))
    for output, p, name in zip(outputs, params, names, strict=True):
        if p is free:
            assert text_of(output) == text_of(alone[name])


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ({"regex": r"[a-f]{3}-[0-9]{2,4}"}, r"[a-f]{3}-[0-9]{2,4}"),
        ({"choice": ['say "yes"', "no\\", "new\nline"]}, r'say "yes"|no\\|new\nline'),
        ({"grammar": 'root ::= "x" more\nmore ::= "y" | "z" "w"'}, r"x(y|zw)"),
        ({"json": {"type": "string", "pattern": "^a{3}$"}}, r'"aaa"'),
        ({"json": '{"const": 7}'}, r"7"),
    ],
)
def test_each_kind_constrains_the_whole_text(llm: LLM, kind: Any, pattern: str) -> None:
    outputs = llm.generate(["hello"] * 8, constrained(**kind))
    for output in outputs:
        assert re.fullmatch(pattern, text_of(output)), text_of(output)
        assert output.outputs[0].finish_reason == "stop"


def test_any_object_may_have_line_breaks(llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, structured_outputs={"json_object": True}, n=4)
    for part in llm.generate("hello", params)[0].outputs:
        assert part.text.startswith("{")
        if part.finish_reason == "stop":
            assert isinstance(json.loads(part.text), dict)


def test_other_options_work_inside_the_grammar(llm: LLM) -> None:
    """Seeds, top-k, biases and log-probabilities; the same seed gives the same text."""
    params = SamplingParams(
        seed=5,
        top_k=3,
        top_p=0.9,
        repetition_penalty=1.2,
        logprobs=2,
        max_tokens=20,
        structured_outputs={"regex": "[ab]{10}"},
    )
    first, second = (llm.generate("hello", params)[0].outputs[0] for _ in range(2))
    assert re.fullmatch("[ab]{10}", first.text)
    assert first.text == second.text
    assert first.logprobs is not None
    assert len(first.logprobs) == len(first.token_ids)


def test_preemption_keeps_the_place_in_the_grammar() -> None:
    llm = LLM(kv_cache_memory=150_000, max_num_seqs=8, max_model_len=64)
    wanted = constrained(45, json=SCHEMA, disable_any_whitespace=True)
    outputs = llm.generate(["hello" * 3] * 8, wanted)
    assert llm.engine.stats().preemptions > 0
    validator = jsonschema_rs.validator_for(SCHEMA)
    for output in outputs:
        if output.outputs[0].finish_reason == "stop":
            validator.validate(json.loads(text_of(output)))
    assert any(o.outputs[0].finish_reason == "stop" for o in outputs)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ({}, "set one of json"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"colour": "red"}, "colour"),
        ({"regex": "(a"}, "not closed"),
        ({"regex": "(?=a)b"}, "Lookahead"),
        ({"regex": r"(a)\1"}, r"'\\\\1' is not served"),
        ({"regex": "a" * 9000}, "at most 8192"),
        ({"regex": "a\x00"}, r"U\+0000"),
        ({"regex": "é+"}, "no token"),
        ({"regex": 3}, "use a string"),
        ({"choice": ["é"]}, "cannot write 'é'"),
        ({"choice": []}, "list of strings"),
        ({"choice": ["x" * 70_000]}, "at most 65536"),
        ({"grammar": "root ::= other"}, "other"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": [1]}, "JSON object"),
        ({"json": {"type": "colour"}}, "type"),
        ({"json": {"enum": [f"{i}" * 9 for i in range(9000)]}}, "at most 65536"),
        ({"json": {"$ref": "#"}}, "Circular"),
        ({"json": {"const": {1, 2}}}, "not a JSON document"),
    ],
)
def test_a_constraint_that_cannot_be_served_is_refused(llm: LLM, kind: Any, told: str) -> None:
    with pytest.raises(RequestError, match=told) as refused:
        llm.generate("x", SamplingParams(structured_outputs=kind))
    assert refused.value.param == "structured_outputs"
    assert not llm.engine.has_unfinished()


def test_the_end_of_a_constrained_text_cannot_be_ignored() -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(ignore_eos=True, structured_outputs={"regex": "a"})


def test_options_that_contradict_the_grammar_end_the_request_with_the_cause(llm: LLM) -> None:
    params = SamplingParams(min_tokens=9, max_tokens=9, structured_outputs={"regex": "abc"})
    with pytest.raises(RequestError, match="structured_outputs"):
        llm.generate("x", params)
    assert not llm.engine.has_unfinished()


def compiling_process(llm: LLM, grammar: str) -> int:
    """Of the compiler of `llm`, which compiled `grammar` and is idle now."""
    llm.generate("x", constrained(grammar=grammar))
    _, _, probe = llm.engine._grammars._made
    assert probe._process is not None
    return int(probe._process.pid)


def test_what_kills_the_compiler_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="compiler cannot take it"):
        llm.generate("x", constrained(grammar="root ::= root{3}"))
    again = llm.generate("x", constrained(grammar='root ::= [ab] "c"'))  # by a new process
    assert text_of(again[0]) in ("ac", "bc")


def test_what_stalls_the_compiler_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stopped never answers, however late this process looks."""
    stalled = compiling_process(llm, 'root ::= [ab] "f"')
    os.kill(stalled, signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr("vexpert.engine.grammar_probe.SECONDS", 0)
        with pytest.raises(RequestError, match="compiling takes more than 0 seconds; simplify it"):
            llm.generate("x", constrained(grammar='root ::= [ab] "g"'))
    assert compiling_process(llm, 'root ::= [ab] "h"') != stalled


def test_a_process_that_died_idle_tells_nothing_about_the_next_constraint(llm: LLM) -> None:
    died = compiling_process(llm, 'root ::= [ab] "d"')
    os.kill(died, signal.SIGKILL)
    os.waitid(os.P_PID, died, os.WEXITED | os.WNOWAIT)
    assert text_of(llm.generate("x", constrained(grammar='root ::= [ab] "e"'))[0]) in ("ae", "be")


@pytest.mark.parametrize("beside", [0, 3])
def test_a_grammar_whose_cost_explodes_ends_its_own_request(llm: LLM, beside: int) -> None:
    rules = [f'a{i} ::= a{i + 1} | a{i + 1} a{i + 1} | ""' for i in range(300)]
    grammar = "\n".join(['root ::= a0 "b"', *rules, 'a300 ::= "a" | ""'])
    token = llm.engine.tokenizer.encode("a", add_special_tokens=False)[0]
    # Beyond the walks of the process that tries grammars, which end at the first "b".
    params = SamplingParams(
        temperature=0,
        max_tokens=60,
        logit_bias={token: 100},
        structured_outputs={"grammar": grammar},
    )
    engine = llm.engine
    engine.add_request("slow", None, [5, 6], params)
    for i in range(beside):
        engine.add_request(str(i), None, [5, 6], constrained(60, regex="[a-c]{60}"))
    outputs: dict[str, Any] = {}
    longest = 0.0
    while engine.has_unfinished():
        step = time.process_time()
        outputs |= {output.request_id: output for output in engine.step()}
        longest = max(longest, time.process_time() - step)
    assert "grammar takes too long" in outputs["slow"].error
    assert [len(outputs[str(i)].outputs[0].token_ids) for i in range(beside)] == [60] * beside
    assert longest < 60  # seconds of the processor; hours where nothing ends it


class Silent:
    """A tokenizer that tells no vocabulary."""


def test_a_tokenizer_or_model_that_cannot_be_constrained_is_told() -> None:
    wanted = StructuredOutputs(regex="a")
    with pytest.raises(RequestError, match="does not tell"):
        Grammars(Silent(), 10, (1,)).compile(wanted)
    with pytest.raises(RequestError, match="ends an output"):
        Grammars(Silent(), 10, ()).compile(wanted)


def test_without_xgrammar_the_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match="xgrammar is not installed"):
        Grammars(Silent(), 10, (1,)).compile(StructuredOutputs(regex="a"))


def test_special_tokens_are_never_text(llm: LLM) -> None:
    """`<|user|>` is a token of its own: a string of JSON must not hold it."""
    tokenizer, size = llm.get_tokenizer(), llm.engine.model_info.vocab_size
    grammars = Grammars(tokenizer, size, llm.engine.model_info.eos_token_ids)
    logits = torch.zeros(3, size)
    matcher = grammars.matcher(StructuredOutputs(regex=".*"))
    mask_logits(logits, [(1, matcher)])
    allowed = {t for t in range(size) if logits[1, t] == 0.0}
    special = set(tokenizer.all_special_ids)
    assert allowed & special == set(llm.engine.model_info.eos_token_ids)
    assert len(allowed) > 90
    assert bool((logits[[0, 2]] == 0.0).all())  # free rows are untouched


def test_masks_are_unpacked_bit_by_bit() -> None:
    mask = torch.tensor([[1 | 1 << 5, -1], [-(2**31), 0]], dtype=torch.int32)
    allowed = unpack(mask, 40)
    assert allowed[0].nonzero().flatten().tolist() == [0, 5, *range(32, 40)]
    assert allowed[1].nonzero().flatten().tolist() == [31]
