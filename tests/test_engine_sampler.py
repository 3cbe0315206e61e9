"""The sampler: exact sets, distributions, penalties against the plain formula, seeds, logprobs."""

import math

import pytest
import torch

from vexpert.engine import logit_adjust
from vexpert.engine.logit_adjust import apply_min_p, keep_top
from vexpert.engine.logprobs import token_logprobs
from vexpert.engine.sampler import Sampler
from vexpert.engine.sampler_rows import SamplerRows
from vexpert.engine.sampler_state import SamplerState
from vexpert.engine.sampling_params import SamplingParams

VOCAB = 40
EOS = (1,)
INF = float("inf")


def state(prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **options: object):
    row = SamplerState(SamplingParams(max_tokens=None, **options), list(prompt), EOS)
    for token in output:
        row.observe(token)
    return row


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def truncate(logits: torch.Tensor, rows: list[SamplerState]) -> torch.Tensor:
    seen = SamplerRows(rows, logits.device)
    if seen.min_p is not None:
        logits = apply_min_p(logits, seen.min_p)
    return keep_top(logits, seen.limits) if len(seen.ranked) == len(rows) else logits


def kept(logits: torch.Tensor, **options: object) -> set[int]:
    masked = truncate(logits[None], [state(**options)])[0]
    assert torch.equal(masked[masked > -INF], logits[masked > -INF])
    return {i for i, value in enumerate(masked.tolist()) if value > -INF}


def naive_set(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    """Token by token, in plain Python: min-p, then top-k, then top-p of what is left."""
    probs = logits.double().softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    order = [token for token in order if probs[token] >= min_p * max(probs)]
    order = order[: top_k or len(order)]
    total, mass, result = sum(probs[token] for token in order), 0.0, set()
    for token in order:
        if mass >= top_p * total:
            break
        result.add(token)
        mass += probs[token]
    return result


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 500},
        {"top_p": 0.5},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"top_k": 5, "top_p": 0.7},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_truncation_keeps_the_exact_set(options: dict[str, float], seed: int) -> None:
    logits = random_logits(1, seed)[0]
    assert kept(logits, **options) == naive_set(logits, **options)


def test_truncation_of_a_mixed_batch_equals_row_by_row() -> None:
    logits = random_logits(4)
    rows = [
        state(top_k=3),
        state(top_p=0.4),
        state(top_p=0.9, min_p=0.3),
        state(top_k=6, top_p=0.6),
    ]
    alone = [truncate(logits[i : i + 1], [rows[i]]) for i in range(4)]
    assert torch.equal(truncate(logits, rows), torch.cat(alone))


@pytest.mark.parametrize("top_p", [0.3, 0.95])
def test_sorting_few_candidates_gives_what_sorting_all_gives(
    monkeypatch: pytest.MonkeyPatch, top_p: float
) -> None:
    logits = random_logits(3)
    rows = [state(top_p=top_p), state(top_k=2, top_p=0.8), state(top_k=60, top_p=top_p)]
    everything = truncate(logits, rows)
    monkeypatch.setattr(logit_adjust, "FIRST_WIDTH", 6)  # enough for 0.3, not for 0.95
    assert torch.equal(truncate(logits, rows), everything)


def test_equal_tokens_at_the_border_are_taken_in_order_of_id() -> None:
    logits = torch.tensor([1.0, 3.0, 1.0, 1.0, 1.0])
    assert kept(logits, top_k=3) == {0, 1, 2}
    assert kept(torch.zeros(4), top_p=0.5) == {0, 1}
    assert kept(torch.zeros(4), top_k=1) == {0}


def draw_many(logits: torch.Tensor, count: int, **options: object) -> torch.Tensor:
    sampler = Sampler(seed=3)
    rows = [state(**options)] * 500
    batch = logits.expand(500, -1)
    tokens = [token for _ in range(count // 500) for token in sampler.sample(batch, rows).token_ids]
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1]).double()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 6},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.3, "min_p": 0.1},
    ],
)
def test_draws_follow_the_distribution(options: dict[str, float]) -> None:
    logits = random_logits(1, 7)[0, :12]
    count = 20_000
    seen = draw_many(logits, count, **options)
    scaled = logits.double() / options["temperature"]
    limits = {name: value for name, value in options.items() if name != "temperature"}
    probs = torch.zeros(12, dtype=torch.float64)
    allowed = sorted(naive_set(scaled, **limits))
    probs[allowed] = scaled[allowed].softmax(-1)
    assert seen[probs == 0].sum() == 0
    expected = count * probs[allowed]
    chi_square = ((seen[allowed] - expected) ** 2 / expected).sum().item()
    freedom = len(allowed) - 1
    # A right sampler exceeds this with probability below 1e-4; the seed is fixed.
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 8


def test_the_chi_square_bound_sees_a_wrong_temperature() -> None:
    logits = random_logits(1, 7)[0, :12]
    seen = draw_many(logits, 20_000, temperature=1.1)
    expected = 20_000 * logits.double().softmax(-1)
    assert ((seen - expected) ** 2 / expected).sum() > 11 + 4 * math.sqrt(22) + 8


def naive_adjusted(logits: torch.Tensor, row: SamplerState, prompt, output) -> torch.Tensor:
    params, values = row.params, logits.tolist()
    for token, bias in params.logit_bias.items():
        values[token] += bias
    for token in range(len(values)):
        if token in prompt or token in output:
            penalty = params.repetition_penalty
            values[token] = (
                values[token] / penalty if values[token] > 0 else values[token] * penalty
            )
        if token in output:
            values[token] -= params.frequency_penalty * output.count(token)
            values[token] -= params.presence_penalty
    return torch.tensor(values)


def test_penalties_and_biases_equal_the_plain_formula() -> None:
    cases = [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 0.9},
        {"frequency_penalty": -1.1},
        {"logit_bias": {4: 5.0, 9: -100.0}},
        {
            "repetition_penalty": 0.6,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.7,
            "logit_bias": {3: 1.5},
        },
        {},
    ]
    prompt, output = (2, 3, 3, 9), (4, 4, 4, 9, 20)
    rows = [state(prompt, output, **case) for case in cases]
    logits = random_logits(len(rows))
    before = logits.clone()
    adjusted = Sampler(0)._adjust(logits, rows)
    for got, raw, row in zip(adjusted, logits, rows, strict=True):
        torch.testing.assert_close(got, naive_adjusted(raw, row, prompt, output))
    assert torch.equal(logits, before)
    greedy = [state(prompt, output, temperature=0, **case) for case in cases]
    assert Sampler(0).sample(logits, greedy).token_ids == adjusted.argmax(-1).tolist()


def test_token_counts_grow_without_losing_anything() -> None:
    output = tuple(i * 7 % 300 for i in range(1000))
    row = state((5, 5), output, frequency_penalty=1.0, repetition_penalty=1.1)
    counts = row.token_counts
    seen = dict(zip(counts.tokens[: counts.size], counts.counts[: counts.size], strict=True))
    assert seen == {token: output.count(token) for token in {5, *output}}


def test_min_tokens_masks_eos_and_stop_tokens_until_reached() -> None:
    row = state(temperature=0, min_tokens=2, stop_token_ids=[5], logit_bias={5: 3.0})
    logits = torch.zeros(1, VOCAB)
    logits[0, 1], logits[0, 5], logits[0, 7] = 9.0, 8.0, 1.0
    chosen = []
    for _ in range(3):
        chosen += Sampler(0).sample(logits, [row]).token_ids
        row.observe(chosen[-1])
    assert chosen == [7, 7, 5]


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    logits = random_logits(6)

    def tokens(neighbours: int, place: int) -> list[int]:
        rows = [state(temperature=0.9, top_p=0.9) for _ in range(neighbours)]
        rows[1::2] = [state(temperature=0) for _ in rows[1::2]]
        rows.insert(place, state(temperature=1.5, seed=42))
        batch = logits[1 : neighbours + 1]
        batch = torch.cat([batch[:place], logits[:1], batch[place:]])
        sampler = Sampler(neighbours)
        return [sampler.sample(batch, rows).token_ids[place] for _ in range(20)]

    alone = tokens(0, 0)
    assert len(set(alone)) > 3
    assert tokens(3, 2) == tokens(5, 0) == tokens(4, 4) == alone


def test_completions_of_one_seed_differ() -> None:
    params = SamplingParams(seed=1, temperature=2.0)
    logits = torch.zeros(1, VOCAB)
    draws = []
    for index in range(3):
        row = SamplerState(params, [], EOS, index)
        draws.append([Sampler(0).sample(logits, [row]).token_ids[0] for _ in range(10)])
    assert draws[0] != draws[1] != draws[2] != draws[0]


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**64 - 1])
def test_extreme_seeds_work(seed: int) -> None:
    row = SamplerState(SamplingParams(seed=seed), [], EOS, index=5)
    assert 0 <= Sampler(0).sample(torch.zeros(1, 4), [row]).token_ids[0] < 4


def test_a_masked_token_is_never_drawn_at_the_ends_of_the_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.tensor([[-INF, 0.0, -INF, 0.0, -INF]])
    row = state()
    for u in (0.0, 0.5, 1.0 - 2**-50):
        uniform = torch.tensor([u], dtype=torch.float64)
        monkeypatch.setattr(Sampler, "_uniforms", lambda self, rows, u=uniform: u)
        assert Sampler(0).sample(logits, [row]).token_ids[0] in (1, 3)


def test_greedy_takes_the_first_of_equals() -> None:
    assert Sampler(0).sample(torch.zeros(2, 5), [state(temperature=0)] * 2).token_ids == [0, 0]


def test_logprobs_are_raw_and_ranked() -> None:
    logits = random_logits(3)
    rows = [
        state(temperature=0, logprobs=3, logit_bias={30: 100.0}),
        state(temperature=0),
        state(temperature=0, logprobs=-1),
    ]
    sampled = Sampler(0).sample(logits, rows)
    expected = logits.double().log_softmax(-1)
    assert sampled.logprobs[1] is None
    chosen, *top = sampled.logprobs[0].entries
    rank = int((expected[0] > expected[0, 30]).sum()) + 1
    assert (chosen[0], chosen[2]) == (30, rank)
    assert chosen[1] == pytest.approx(expected[0, 30].item(), abs=1e-5)
    order = expected[0].argsort(descending=True)[:3].tolist()
    assert [entry[0] for entry in top] == order
    assert [entry[2] for entry in top] == [1, 2, 3]
    everything = sampled.logprobs[2].entries
    assert sorted(entry[0] for entry in everything) == list(range(VOCAB))
    assert sum(math.exp(entry[1]) for entry in everything) == pytest.approx(1.0, abs=1e-5)


def test_equal_tokens_share_a_rank() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    entries = token_logprobs(logits, torch.tensor([2]), [4])[0].entries
    assert {token: rank for token, _, rank in entries} == {0: 1, 1: 2, 2: 2, 3: 4}
    assert entries[0][0] == 2
    assert len(token_logprobs(logits, torch.tensor([3]), [0])[0].entries) == 1
