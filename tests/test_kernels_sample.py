"""The sampling kernel draws what the sampler draws on a CPU, for every option and mixture."""

import pytest
import torch

from vexpert.engine.sampler import NO_TOKEN, Sampler
from vexpert.engine.sampler_rows import SamplerRows
from vexpert.engine.sampler_state import SamplerState
from vexpert.engine.sampling_params import SamplingParams
from vexpert.kernels.sample import BLOCK, sample

INF, NAN = float("inf"), float("nan")
OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_k": 5000},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 3.0, "top_p": 0.97},
    {"temperature": 1.0, "top_k": 12, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 60, "top_p": 0.9, "min_p": 0.02},
]


def states(options: list[dict[str, float]]) -> list[SamplerState]:
    return [SamplerState(SamplingParams(**each), [], (1,)) for each in options]


def make_logits(kind: str, rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator) * 2
    if kind == "ties":  # few values, both zeros among them
        logits = logits.round().clamp(-2, 2)
    if kind == "masked":
        logits[:, ::3] = -INF
    return logits


def draw(
    logits: torch.Tensor, options: list[dict[str, float]], u: torch.Tensor, device: str
) -> tuple[list[int], list[int]]:
    """Tokens of the CPU's sampler, and of the kernel."""
    rows = SamplerRows(states(options), torch.device("cpu"))
    sampler = Sampler(0)
    sampler._uniforms = lambda rows: u  # type: ignore[method-assign]
    expected = sampler._draw(logits, rows)
    there = SamplerRows(rows.states, torch.device(device))
    index = torch.arange(len(options), device=device)
    block = BLOCK if device == "cuda" else 128
    got = torch.empty_like(index)
    sample(logits.to(device), index, there.sample_limits, u.to(device), got, block)
    return expected.tolist(), got.tolist()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["random", "ties", "masked"])
def test_the_same_tokens_for_the_same_uniforms(kind: str, device: str) -> None:
    on_gpu = device == "cuda"
    logits = make_logits(kind, len(OPTIONS), 9000 if on_gpu else 150)
    last = 1 - 2.0**-50
    many = torch.linspace(0, last, 400, dtype=torch.float64).tolist()
    for u in many if on_gpu else (0.37, last):
        uniforms = torch.full((len(OPTIONS),), u, dtype=torch.float64)
        expected, got = draw(logits, OPTIONS, uniforms, device)
        # Sums in another order: at a border between two tokens the other one may be drawn.
        assert sum(a != b for a, b in zip(got, expected, strict=True)) <= on_gpu, u


def test_equal_logits_are_kept_in_order_of_their_ids() -> None:
    logits = torch.zeros(3, 200)
    options = [{"top_k": 3}, {"top_p": 0.05}, {"top_k": 100, "top_p": 0.5}]
    last = torch.full((3,), 1 - 2.0**-50, dtype=torch.float64)
    assert draw(logits, options, last, "cpu")[1] == [2, 9, 49]


@pytest.mark.parametrize("options", OPTIONS[::3])
def test_rows_that_are_no_distribution_have_no_token(options: dict[str, float]) -> None:
    logits = make_logits("random", 5, 90)
    logits[1, 80], logits[2, 3], logits[3] = NAN, INF, -INF
    uniforms = torch.full((5,), 0.4, dtype=torch.float64)
    expected, got = draw(logits, [options] * 5, uniforms, "cpu")
    assert got == expected
    assert [token == NO_TOKEN for token in got] == [False, True, True, True, False]


def test_only_the_asked_rows_are_drawn_in_their_order() -> None:
    logits = make_logits("random", 6, 90)[:, :70]  # rows further apart than they are long
    limits = SamplerRows(states([{"top_k": 4}] * 3), torch.device("cpu")).sample_limits
    uniforms = torch.tensor([0.2, 0.6, 0.9], dtype=torch.float64)
    index = torch.tensor([5, 0, 3])
    got = torch.full((6,), 77)
    sample(logits, index, limits, uniforms, got, block=32)
    for place, row in enumerate(index.tolist()):
        one = draw(logits[row : row + 1], [{"top_k": 4}], uniforms[place : place + 1], "cpu")
        assert got[row] == one[0][0]
    assert got[[1, 2, 4]].tolist() == [77] * 3
