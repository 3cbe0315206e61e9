"""Engines whose steps choose tokens by kernels give what those without give."""

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from helpers_engine import EagerCapturer, FakeManager, greedy, make_engine, run_all
from helpers_mixed import alone, facts, random_work, together

from vexpert.engine import boot, engine, grammar, sampler
from vexpert.engine.engine import Engine
from vexpert.engine.grammar import Matcher
from vexpert.engine.graph_buffers import GraphBuffers
from vexpert.engine.host_copy import Landing, Largest
from vexpert.engine.sampler import NO_TOKEN, Sampler
from vexpert.engine.sampler_state import SamplerState
from vexpert.engine.sampling_params import SamplingParams
from vexpert.lora.types import BatchView, LoraSignature

PROMPT = [5, 9, 2, 30, 7, 8]
MIXTURES: list[list[dict[str, Any]]] = [
    [{"temperature": 0.0}] * 3,
    [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.0}],
    [{"temperature": 0.9, "top_k": 4, "seed": 1}, {"temperature": 1.2, "min_p": 0.1, "seed": 2}],
    [{"temperature": 0.0, "logit_bias": {3: 9.0}}, {"temperature": 0.0}],
    [{"temperature": 0.0, "logit_bias": {3: 9.0}}, {"temperature": 1.0, "seed": 5}],
    [{"temperature": 1.0, "seed": 5, "logit_bias": {3: 9.0}}],
    [
        {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {9: -1.0, 3: 2.0}},
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 8, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    ],
    [{"temperature": 0.0, "min_tokens": 5}, {"temperature": 0.7, "seed": 4, "min_tokens": 2}],
    [{"temperature": 0.0, "logprobs": 2}, {"temperature": 1.0, "seed": 6, "logprobs": 3}],
]


def view_of_later_slots(
    self: FakeManager, slots: torch.Tensor, logit_slots: torch.Tensor, active: tuple[int, ...]
) -> BatchView | None:
    """The step itself brings the slots to the device; the fake model compares them then."""
    signature = LoraSignature((16,), len(active))
    return BatchView(slots, logit_slots, active, True, signature) if active else None


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines use kernels, on whatever device."""
    for module, made in ((boot, GraphBuffers), (engine, Sampler)):
        chosen = functools.partial(made, use_kernels=True)
        monkeypatch.setattr(module, made.__name__, chosen)
    monkeypatch.setattr(FakeManager, "batch_view", view_of_later_slots)


def captured(**options: Any) -> Engine:
    made = make_engine(capturer=EagerCapturer(), overlap=True, **options)
    graphs = made._runner._graphs
    assert graphs is not None
    graphs._share = 1.0
    return made


@pytest.mark.usefixtures("kernels")
def test_mixed_work() -> None:
    rng = random.Random(4)
    work = random_work(rng, 4)
    assert together(captured(num_blocks=30), work, rng) == alone(work)


def serve(served: Engine) -> list[Any]:
    """Greedy tokens for the base model and adapters that come later, whose graphs are new."""
    for index, name in enumerate((None, "red", None, "blue")):
        served.add_request(str(index), None, [*PROMPT, index], greedy(9 - index), name)
        served.step(), served.step()
    return [facts(output) for _, output in sorted(run_all(served).items())]


@pytest.mark.usefixtures("kernels")
def test_greedy_tokens_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    want = serve(make_engine())
    known = []
    begin = Sampler.begin

    def watched(self: Sampler, logits: torch.Tensor, rows: Any, largest: Any = None) -> Any:
        sampling = begin(self, logits, rows, largest)
        known.append(largest is not None and sampling.tokens is largest.tokens)
        return sampling

    monkeypatch.setattr(Sampler, "begin", watched)
    assert serve(captured()) == want
    assert sum(known) >= 5  # prompts are steps of another kind


@pytest.mark.usefixtures("kernels")
def test_planted_captures_that_lose_the_last_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def only_the_turn(self: GraphBuffers) -> Iterator[None]:
        assert self._mailbox is not None
        before = self._mailbox.turn.clone()
        yield
        self._mailbox.turn.copy_(before)

    want = serve(make_engine())
    monkeypatch.setattr(GraphBuffers, "rehearsal", only_the_turn)
    assert serve(captured()) != want


@pytest.mark.usefixtures("kernels")
def test_planted_captures_that_count_as_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphBuffers, "rehearsal", lambda self: nullcontext())
    with pytest.raises(AssertionError):  # the fake model gets rows of another step
        serve(captured())


@pytest.mark.parametrize("options", MIXTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_sampler_with_kernels(
    options: list[dict[str, Any]], dtype: torch.dtype, in_place: bool
) -> None:
    logits = (torch.randn(len(options), 70, generator=torch.Generator().manual_seed(1)) * 2).to(
        dtype
    )
    logits[0, [9, 60]] = 8.0
    results = []
    for use_kernels in (False, True):
        rows = [SamplerState(SamplingParams(**each), [], (1,)) for each in options]
        chooser = Sampler(0, use_kernels)
        largest = None
        if use_kernels and in_place:
            tokens = logits.float().argmax(-1)
            largest = Largest(tokens, Landing([tokens.clone()], None))
        given = logits.clone() if use_kernels else logits.float()
        sampling = chooser.begin(given, rows, largest)
        if largest is not None:
            assert sampling.tokens is largest.tokens
        results.append(sampling.wait())
        assert torch.equal(given.float(), logits.float())
    assert results[0] == results[1]


def test_rows_without_a_token() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    logits[0], logits[1, 3], logits[2, 49] = -torch.inf, torch.nan, torch.inf
    rows = [SamplerState(SamplingParams(temperature=0.0), [], (1,)) for _ in range(4)]
    got = Sampler(0, use_kernels=True).sample(logits, rows).token_ids
    assert got == [NO_TOKEN] * 3 + [int(logits[3].argmax())]


class FixedMatcher(Matcher):
    """Allows the same tokens always."""

    def __init__(self, allowed: list[int]) -> None:
        self.allowed = allowed


def fill_fixed(matchers: list[FixedMatcher], vocab_size: int) -> torch.Tensor:
    masks = torch.zeros(len(matchers), 3, dtype=torch.int64)
    for mask, matcher in zip(masks, matchers, strict=True):
        for token in matcher.allowed:
            mask[token // 32] |= 1 << token % 32
    return masks.to(torch.int32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_grammars(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (grammar, sampler):
        monkeypatch.setattr(module, "fill_mask", fill_fixed)
    logits = torch.randn(4, 70, generator=torch.Generator().manual_seed(3)).bfloat16()
    allowed = [None, [31, 64, 69], [], [7]]
    results = []
    for use_kernels in (False, True):
        rows = []
        for seed, tokens in enumerate(allowed):
            matcher = None if tokens is None else FixedMatcher(tokens)
            params = SamplingParams(temperature=temperature, seed=seed, logit_bias={7: -0.5})
            rows.append(SamplerState(params, [], (1,), matcher=matcher))
        results.append(Sampler(0, use_kernels).sample(logits.float(), rows).token_ids)
    assert results[0] == results[1]
    assert results[1][1] in (31, 64, 69)
    assert results[1][2:] == [NO_TOKEN, 7]
