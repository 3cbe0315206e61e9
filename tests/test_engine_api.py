"""Engine: what requests may ask, how they end, and what is reported."""

import math

import pytest
import torch
from helpers_engine import EOS, VOCAB, FakeModel, greedy, make_engine, manager_of, run_all, run_one

from vexpert.engine.engine import Engine
from vexpert.engine.outputs import RequestOutput
from vexpert.engine.sampling_params import SamplingParams
from vexpert.errors import AdapterError, AdapterNotFoundError, RequestError

PROMPT = [5, 9, 13, 20, 31]


def free_run(count: int = 12, **options: object) -> list[int]:
    """Tokens that the greedy base model gives after PROMPT when nothing stops it."""
    return run_one(make_engine(), PROMPT, greedy(count, **options)).outputs[0].token_ids


def ending(params: SamplingParams, **options: object) -> tuple[int, str | None, int | str | None]:
    completion = run_one(make_engine(**options), PROMPT, params).outputs[0]
    return len(completion.token_ids), completion.finish_reason, completion.stop_reason


def test_max_tokens_ends_with_length() -> None:
    assert ending(greedy(1)) == (1, "length", None)
    assert ending(greedy(7)) == (7, "length", None)


def test_the_context_ends_with_length() -> None:
    assert ending(greedy(None), max_model_len=16) == (11, "length", None)
    assert ending(greedy(500), max_model_len=16) == (11, "length", None)


def test_a_stop_token_ends_and_is_not_text() -> None:
    tokens = free_run()
    token = tokens[4]
    at = tokens.index(token)
    engine = make_engine()
    output = run_one(engine, PROMPT, greedy(12, stop_token_ids=[token])).outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", token)
    assert output.token_ids == tokens[: at + 1]
    assert output.text == engine.tokenizer.decode(tokens[:at])
    kept = greedy(12, stop_token_ids=[token], include_stop_str_in_output=True)
    assert run_one(engine, PROMPT, kept).outputs[0].text == engine.tokenizer.decode(
        tokens[: at + 1]
    )


def test_eos_ends_unless_ignored() -> None:
    bias = {EOS: 100.0}
    assert ending(greedy(5, logit_bias=bias, ignore_eos=False)) == (1, "stop", None)
    assert ending(greedy(5, logit_bias=bias)) == (5, "length", None)
    late = greedy(5, logit_bias=bias, ignore_eos=False, min_tokens=3)
    assert ending(late) == (4, "stop", None)


def test_a_stop_string_over_two_tokens() -> None:
    tokens = free_run()
    engine = make_engine()
    text = engine.tokenizer.decode(tokens)
    stop = text[5:8]  # tokens are two letters long
    at = text.index(stop)
    output = run_one(engine, PROMPT, greedy(12, stop=[stop])).outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == text[:at]
    assert output.token_ids == tokens[: (at + 3 + 1) // 2]


def test_a_stop_string_does_not_count_before_min_tokens() -> None:
    engine = make_engine()
    text = engine.tokenizer.decode(free_run(12, min_tokens=4))
    output = run_one(engine, PROMPT, greedy(12, stop=[text[:2]], min_tokens=4)).outputs[0]
    assert len(output.token_ids) > 4


def test_streamed_text_never_goes_back() -> None:
    engine = make_engine()
    full = engine.tokenizer.decode(free_run())
    engine.add_request("a", "p", PROMPT, greedy(12, stop=[full[9:13]]))
    shown = [""]
    while engine.has_unfinished():
        for output in engine.step():
            assert output.outputs[0].text.startswith(shown[-1])
            shown.append(output.outputs[0].text)
            assert output.prompt == "p"
    assert shown[-1] == full[: full.index(full[9:13])]


def naive_row(engine: Engine, tokens: list[int]) -> list[float]:
    """Log-probabilities after `tokens`, from a request of its own."""
    params = greedy(1, logprobs=-1)
    row = run_one(engine, tokens, params).outputs[0].logprobs[0]
    return [row[token].logprob for token in range(VOCAB)]


@pytest.mark.parametrize("adapter", [None, "red"])
@pytest.mark.parametrize("budget", [3, 32])
def test_prompt_logprobs_keep_all_rows(budget: int, adapter: str | None) -> None:
    prompt = [(7 * i) % 60 + 2 for i in range(19)]
    engine = make_engine(max_num_batched_tokens=budget)
    run_one(engine, prompt, greedy(2), adapter)  # the whole prompt is now in the prefix cache
    output = run_one(engine, prompt, greedy(2, prompt_logprobs=2, n=2), adapter)
    rows = output.prompt_logprobs
    assert output.num_cached_tokens == 0
    assert len(rows) == len(prompt)
    assert rows[0] is None
    for i in range(1, len(prompt)):
        plain = make_engine()
        full = run_one(plain, prompt[:i], greedy(1, logprobs=-1), adapter).outputs[0].logprobs[0]
        best = sorted(full, key=lambda token: -full[token].logprob)[:2]
        assert set(rows[i]) == {prompt[i], *best}
        assert next(iter(rows[i])) == prompt[i]
        for token, entry in rows[i].items():
            assert entry.logprob == pytest.approx(full[token].logprob)
            assert entry.rank == full[token].rank
            assert entry.decoded_token == plain.tokenizer.decode([token])


def test_prompt_logprobs_survive_preemption() -> None:
    prompt = [(11 * i) % 60 + 2 for i in range(24)]
    params = greedy(20, prompt_logprobs=0)
    expected = run_one(make_engine(), prompt, params).prompt_logprobs
    engine = make_engine(num_blocks=16, max_num_batched_tokens=6)
    for number in range(3):
        engine.add_request(str(number), None, prompt[: 20 + number], params)
    done = run_all(engine)
    assert engine.stats().preemptions > 0
    for number in range(3):
        assert done[str(number)].prompt_logprobs == expected[: 20 + number]


def test_logprobs_of_the_output() -> None:
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=6, logprobs=2, ignore_eos=True)
    output = run_one(make_engine(), PROMPT, params).outputs[0]
    assert len(output.logprobs) == 6
    total = 0.0
    for i, (token, row) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        full = naive_row(make_engine(), PROMPT + output.token_ids[:i])
        assert row[token].logprob == pytest.approx(full[token])
        assert row[token].rank == 1 + sum(value > full[token] for value in full)
        assert {1, 2} <= {entry.rank for entry in row.values()}
        total += full[token]
    assert output.cumulative_logprob == pytest.approx(total)
    assert math.isfinite(total)


def test_n_completions_share_the_prompt() -> None:
    engine = make_engine()
    prompt = [(5 * i) % 60 + 2 for i in range(21)]
    params = SamplingParams(n=4, seed=1, temperature=1.5, max_tokens=5, ignore_eos=True)
    output = run_one(engine, prompt, params)
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    assert engine.stats().prefix_hit_tokens == 3 * 20
    assert output.num_cached_tokens == 0
    single = SamplingParams(seed=3, temperature=1.5, max_tokens=5, ignore_eos=True)
    assert run_one(engine, prompt, single).outputs[0].token_ids == output.outputs[2].token_ids


def test_greedy_n_gives_equal_completions() -> None:
    output = run_one(make_engine(num_blocks=16), PROMPT, greedy(9, n=3), "red")
    assert len({tuple(c.token_ids) for c in output.outputs}) == 1


@pytest.mark.parametrize(
    ("tokens", "params", "words"),
    [
        ([], {}, "empty"),
        ([VOCAB], {}, f"0 to {VOCAB - 1}"),
        ([-1], {}, "-1"),
        (["a"], {}, "integers"),
        ([3] * 64, {}, "64 tokens.*at most 63"),
        ([3], {"logprobs": VOCAB + 1}, "vocabulary has 64"),
        ([3], {"prompt_logprobs": VOCAB + 1}, "vocabulary has 64"),
        ([3], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ([3], {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing(
    tokens: list[int], params: dict[str, object], words: str
) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match=words):
        engine.add_request("bad", None, tokens, greedy(4, **params), "red")
    assert not engine.has_unfinished()
    manager_of(engine).check_idle()
    run_one(engine, [3] * 63, greedy(4))


@pytest.mark.parametrize(
    "options", [{"logprobs": -2}, {"prompt_logprobs": -2}, {"seed": 2**64}, {"seed": -(2**63) - 1}]
)
def test_bad_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        SamplingParams(**options)


def test_an_id_in_use_and_an_unknown_adapter_are_refused() -> None:
    engine = make_engine()
    engine.add_request("a", None, PROMPT, greedy())
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request("a", None, PROMPT, greedy())
    with pytest.raises(AdapterNotFoundError, match="violet"):
        engine.add_request("b", None, PROMPT, greedy(), "violet")
    assert list(run_all(engine)) == ["a"]
    engine.add_request("a", None, PROMPT, greedy())  # a finished id is free again
    run_all(engine)


def test_abort_in_every_state() -> None:
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=4)
    assert not engine.abort("unknown")
    engine.add_request("running", None, PROMPT, greedy(n=2), "red")
    engine.add_request("waiting", None, PROMPT, greedy(), "green")
    engine.step()  # a part of the first prompt
    stats = engine.stats()
    assert (stats.num_running, stats.running_adapters) == (1, ("red",))
    assert (stats.num_waiting, stats.waiting_adapters) == (2, ("green", "red"))
    assert engine.abort("waiting")
    assert engine.abort("running")
    assert not engine.has_unfinished()
    engine.check_integrity()
    manager_of(engine).check_idle()
    assert engine.step() == []
    assert engine.stats().kv_blocks_used == 0


def test_a_prompt_counts_once_it_is_processed() -> None:
    engine = make_engine()
    engine.add_request("left", None, PROMPT, greedy(3))
    assert engine.stats().prompt_tokens == 0
    engine.abort("left")
    engine.add_request("n", None, PROMPT, greedy(3, n=2, temperature=1.0))
    run_all(engine)
    assert engine.stats().prompt_tokens == len(PROMPT)


def test_stop_tokens_are_not_compared_one_by_one() -> None:
    compared = 0

    class Watched(int):
        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == other

    others = sorted(set(range(VOCAB)) - set(free_run()) - {EOS})
    params = greedy(12, stop_token_ids=[Watched(token) for token in others])
    assert run_one(make_engine(), PROMPT, params).outputs[0].token_ids == free_run()
    assert compared < len(others)


def test_stats_count() -> None:
    engine = make_engine()
    run_one(engine, PROMPT, greedy(3), "red")
    run_one(engine, PROMPT, greedy(3), "red")
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.steps) == (10, 6, 6)
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (10, 4)
    assert (stats.kv_blocks_total, stats.kv_blocks_used, stats.max_loras) == (64, 0, 2)


def test_base_steps_have_no_view_and_mixed_steps_name_active_slots() -> None:
    engine = make_engine()
    model = engine._runner._model
    assert isinstance(model, FakeModel)
    model.record = True
    for number, adapter in enumerate([None, "red", None, "green"]):
        engine.add_request(str(number), None, PROMPT[: number + 1], greedy(2 + 2 * (number == 0)))
        if adapter is not None:
            engine.abort(str(number))
            engine.add_request(str(number), None, PROMPT[: number + 1], greedy(2), adapter)
    run_all(engine)
    mixed, last = model.steps[0], model.steps[-1]
    assert mixed.lora.active_slots == (0, 1)
    assert mixed.lora.slots.tolist() == [-1, 0, 0, -1, -1, -1, 1, 1, 1, 1]
    assert mixed.lora.logit_slots.tolist() == [-1, 0, -1, 1]
    assert last.lora is None
    for name in ("token_ids", "positions", "cache_rows", "block_tables", "logit_rows"):
        assert getattr(mixed, name).dtype == torch.int64


def test_an_engine_without_adapters_says_so() -> None:
    engine = make_engine()
    plain = Engine(
        type(engine.config)(enable_lora=False, kv_cache_memory=8192),
        model=engine._runner._model,
        tokenizer=engine.tokenizer,
    )
    assert plain.adapters() == []
    assert plain.stats().max_loras == 0
    with pytest.raises(AdapterError, match="enable_lora=False"):
        plain.load_adapter("red", "red")
    with pytest.raises(AdapterNotFoundError, match="enable_lora=False"):
        plain.add_request("a", None, PROMPT, greedy(), "red")
    with pytest.raises(AdapterNotFoundError, match="enable_lora=False"):
        plain.unload_adapter("red")
    plain.add_request("a", None, PROMPT, greedy())
    outputs: list[RequestOutput] = []
    while plain.has_unfinished():
        outputs += plain.step()
    assert outputs[-1].outputs[0].token_ids == free_run(8)


def test_a_step_with_nothing_to_run_is_empty() -> None:
    engine = make_engine(num_slots=1)
    manager = manager_of(engine)
    other = manager.resolve("green")
    manager.hold(other)
    manager.acquire(other)  # as if a copy under way kept the only slot
    engine.add_request("a", None, PROMPT, greedy(), "red")
    assert engine.step() == []
    assert engine.has_unfinished()
    manager.release(other)
    manager.drop(other)
    assert run_all(engine)["a"].finished


def test_a_request_that_cannot_be_built_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def broken(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(engine, "_new_sequence", broken)
    with pytest.raises(MemoryError):
        engine.add_request("one", None, PROMPT, greedy(2), "red")
    assert not engine.has_unfinished()
    manager_of(engine).check_idle()


def test_requests_of_an_adapter_that_fails_end_with_its_reason_and_others_go_on() -> None:
    engine = make_engine()
    manager = manager_of(engine)
    engine.add_request("good", None, [5, 6, 7], greedy(4), "green")
    engine.add_request("bad", None, [5, 6, 7], greedy(4, n=2), "red")
    manager.ended = {manager.resolve("red"): "adapter 'red': its files cannot be read"}
    last = run_all(engine)
    assert last["bad"].finished
    assert last["bad"].error == "adapter 'red': its files cannot be read"
    assert [part.finish_reason for part in last["bad"].outputs] == ["abort", "abort"]
    assert last["good"].error is None
    assert len(last["good"].outputs[0].token_ids) == 4


def test_an_adapter_on_its_way_holds_up_nobody_and_is_prefetched() -> None:
    engine = make_engine(num_slots=2, max_num_seqs=2)
    manager = manager_of(engine)
    red = manager.resolve("red")
    manager.coming = {red}
    engine.add_request("slow", None, [5, 6, 7], greedy(2), "red")
    for index in range(100):
        engine.add_request(str(index), None, [5, 6, 7], greedy(2), ("green", "blue")[index % 2])
    finished = set()
    while len(finished) < 100:
        finished |= {output.request_id for output in engine.step() if output.finished}
        assert manager.prefetched[:1] == [red]
        engine.check_integrity()
    (slow,) = engine.scheduler.waiting
    assert slow.times_passed == 0
    manager.coming = set()
    assert run_all(engine)["slow"].finished


def test_the_cap_on_requests_of_one_adapter_holds() -> None:
    engine = make_engine(max_requests_per_lora=2)
    for index in range(6):
        engine.add_request(str(index), None, [5, 6, 7], greedy(3), "red")
    engine.add_request("other", None, [5, 6, 7], greedy(3), "green")
    first = {output.request_id for output in engine.step()}
    assert first == {"0", "1", "other"}
    while engine.has_unfinished():
        assert engine.stats().running_by_adapter.get("red", 0) <= 2
        engine.step()
        engine.check_integrity()
