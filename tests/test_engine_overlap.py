"""Steps committed while the next one runs give what steps in order give."""

import random
from typing import Any

import pytest
import torch
from helpers_engine import EOS, EagerCapturer, greedy, make_engine, manager_of, run_all
from helpers_graphs import WAYS_TO_SERVE
from helpers_mixed import alone, facts, random_work, together

from vexpert.engine import flight
from vexpert.engine.engine import Engine
from vexpert.engine.sampler import Sampling
from vexpert.engine.sampling_params import SamplingParams

PROMPT = [5, 9, 2, 30, 7, 8]
NAN = float("nan")
CASES = WAYS_TO_SERVE | {"two at a time": {"max_num_seqs": 2}}


def overlapped(graphs: bool = True, **options: Any) -> Engine:
    return make_engine(capturer=EagerCapturer() if graphs else None, overlap=True, **options)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_overlapped_steps_give_what_steps_in_order_give(name: str, graphs: bool) -> None:
    rng = random.Random(f"{name} {graphs}")
    work = random_work(rng, 14)
    engine = overlapped(graphs, **CASES[name])
    assert together(engine, work, rng) == alone(work)
    if name == "few blocks":
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("seed", range(3))
def test_aborts_of_requests_with_a_step_under_way(seed: int) -> None:
    rng = random.Random(seed)
    work = random_work(rng, 16)
    engine = overlapped(num_blocks=24, max_num_batched_tokens=9)
    for number, (tokens, params, adapter) in enumerate(work):
        engine.add_request(str(number), None, tokens, params, adapter)
    victims = set(rng.sample(range(16), 6))
    last, order = {}, sorted(victims)
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id not in last or not last[output.request_id].finished
            last[output.request_id] = output
        if order and rng.random() < 0.4:
            victim = str(order.pop(0))
            done = victim in last and last[victim].finished
            assert engine.abort(victim) is not done
        engine.check_integrity()
    manager_of(engine).check_idle()
    expected = alone(work)
    for number in set(range(16)) - victims:
        assert facts(last[str(number)]) == expected[number]


def log_order(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """ "begin" for each forward pass, "wait" each time the host waits for tokens."""
    events: list[str] = []
    forward, wait = engine.model.raw_logits, Sampling.wait

    def watched_forward(step: Any) -> torch.Tensor:
        events.append("begin")
        return forward(step)

    def watched_wait(self: Sampling) -> Any:
        events.append("wait")
        return wait(self)

    monkeypatch.setattr(engine.model, "raw_logits", watched_forward)
    monkeypatch.setattr(Sampling, "wait", watched_wait)
    return events


def test_the_next_step_begins_before_the_tokens_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = overlapped(graphs=False)
    events = log_order(engine, monkeypatch)
    engine.add_request("a", None, PROMPT, greedy(4), "red")
    run_all(engine)
    assert events == ["begin", "begin", "wait", "begin", "wait", "begin", "wait", "wait"]
    in_order = make_engine()
    events = log_order(in_order, monkeypatch)
    in_order.add_request("a", None, PROMPT, greedy(4), "red")
    run_all(in_order)
    assert events == ["begin", "wait"] * 4


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.5},
        {"logit_bias": {7: 1.0}},
        {"min_tokens": 4},
    ],
)
def test_rows_that_need_the_last_token_wait_for_it(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = overlapped(graphs=False)
    events = log_order(engine, monkeypatch)
    engine.add_request("a", None, PROMPT, greedy(4, **options))
    run_all(engine)
    assert events == ["begin", "wait"] * 4


def test_a_sequence_that_ends_by_length_has_no_step_too_many() -> None:
    for tokens in (1, 2, 7):
        engine = overlapped()
        for index in range(3):
            engine.add_request(str(index), None, [*PROMPT, index], greedy(tokens))
        run_all(engine)
        assert engine.stats().steps == tokens
        assert engine._flight is None
    engine = overlapped(max_model_len=10)
    engine.add_request("a", None, PROMPT, greedy(100))
    output = run_all(engine)["a"].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (4, "length")
    assert engine.stats().steps == 4
    assert engine._flight is None


def test_a_stop_found_late_discards_one_token() -> None:
    engine = make_engine()
    engine.add_request("a", None, PROMPT, greedy(9))
    tokens = run_all(engine)["a"].outputs[0].token_ids
    stop = tokens[4]
    first = tokens.index(stop)
    late = overlapped()
    late.add_request("a", None, PROMPT, greedy(9, stop_token_ids=[stop]))
    output = run_all(late)["a"].outputs[0]
    assert (output.token_ids, output.finish_reason) == (tokens[: first + 1], "stop")
    assert late.stats().generation_tokens == first + 1
    late.step()  # the step that was under way when the request ended
    late.check_integrity()
    assert late.stats().steps == first + 2
    assert late.stats().kv_blocks_used == 0


def test_eos_ends_too() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, logit_bias={EOS: 3.0})
    results = []
    for engine in (make_engine(), overlapped()):
        for index in range(4):
            engine.add_request(str(index), None, [*PROMPT, index], params)
        results.append({name: facts(output) for name, output in run_all(engine).items()})
    assert results[0] == results[1]


def test_prefixes_are_shared_as_early_as_in_order() -> None:
    hits = []
    for engine in (make_engine(), overlapped()):
        params = SamplingParams(n=3, temperature=0.0, max_tokens=6, ignore_eos=True)
        engine.add_request("a", None, PROMPT * 3, params, "red")
        run_all(engine)
        engine.add_request("b", None, PROMPT * 4, params, "red")
        run_all(engine)
        hits.append(engine.stats().prefix_hit_tokens)
    assert hits[0] == hits[1] > 0


def test_a_row_without_a_token_fails_alone_and_the_step_after_it_is_harmless() -> None:
    engine = overlapped()
    forward, manager = engine.model.raw_logits, manager_of(engine)

    def poisoned(step: Any) -> torch.Tensor:
        logits = forward(step)
        if step.lora is not None:
            bad = torch.tensor(
                [manager.slot_content(s) == manager.content[manager.current["blue"]]
                 for s in step.lora.logit_slots.tolist()]
            )  # fmt: skip
            logits = logits.clone()
            logits[bad] = NAN
        return logits

    engine.model.raw_logits = poisoned  # type: ignore[method-assign]
    for index, name in enumerate(["red", "blue", None]):
        engine.add_request(str(index), None, [*PROMPT, index], greedy(5), name)
    outputs = run_all(engine)
    assert outputs["1"].error is not None
    assert "blue" in outputs["1"].error
    for index, name in ((0, "red"), (2, None)):
        other = make_engine()
        other.add_request("x", None, [*PROMPT, index], greedy(5), name)
        assert facts(outputs[str(index)]) == facts(run_all(other)["x"])


def test_adapters_that_end_with_a_step_under_way() -> None:
    engine = overlapped()
    engine.add_request("a", None, PROMPT, greedy(9), "red")
    engine.add_request("b", None, PROMPT, greedy(9))
    engine.step(), engine.step()
    manager = manager_of(engine)
    manager.ended = {manager.current["red"]: "gone"}
    outputs = run_all(engine)
    assert (outputs["a"].error, outputs["b"].error) == ("gone", None)
    assert len(outputs["b"].outputs[0].token_ids) == 9


def test_planted_overlap_where_a_row_needs_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "may_overlap", lambda *args: True)
    monkeypatch.setattr("vexpert.engine.engine.may_overlap", lambda *args: True)
    rng = random.Random(2)
    work = [(PROMPT, greedy(12, repetition_penalty=1.6, frequency_penalty=0.9), None)]
    assert together(overlapped(), work, rng) != alone(work)
