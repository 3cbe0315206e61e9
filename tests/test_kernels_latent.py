"""Attention kernels in latent mode against float64: on a GPU, or in Triton's interpreter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_attention import Case, make_latent_case, moved, worst_row_error
from helpers_graphs import capture

from vexpert.kernels.paged_decode import DecodeShape, paged_decode
from vexpert.kernels.paged_prefill import PrefillShape, paged_prefill
from vexpert.kernels.paged_types import AttentionBatch, Scores
from vexpert.ops.attention import latent_attention, write_cache

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the tests on a GPU do it")
LIMIT = 1e-5  # float32 sums in another order
# Weights are rounded to the type of the latents before the second product, and so is the output.
LIMITS = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: LIMIT}
MASKS: dict[str, dict[str, Any]] = {"causal": {}, "window": {"window": 6}, "chunk": {"chunk": 5}}
# around the edges of blocks (4), of steps (16) and of runs (16)
DECODES = [(1, n) for n in (1, 3, 4, 5, 15, 16, 17, 31, 33, 65)]
MIXED = [(1, 9), (7, 7), (1, 40), (0, 5), (13, 30), (2, 2), (1, 1), (22, 22)]
SPLIT = DecodeShape(16, 16, 64, num_stages=1)
WHOLE = DecodeShape(32, 1000, 1, num_stages=1)
CHUNKS = PrefillShape(32, 16, num_stages=1)
HEADS = [(1, 24, 8), (5, 16, 6), (16, 40, 16), (20, 9, 3), (71, 8, 2)]  # heads, rank, rotary


def run(case: Case, shape: DecodeShape | PrefillShape) -> torch.Tensor:
    out = case.query.new_zeros(*case.query.shape[:2], case.width)
    call = case.query, case.keys, case.values, case.batch, Scores(**case.options), out
    if isinstance(shape, DecodeShape):
        paged_decode(*call, shape, case.rotary)
    else:
        paged_prefill(*call, shape, rotary=case.rotary)
    return out


def attend(case: Case, out: torch.Tensor | None = None) -> torch.Tensor:
    assert case.rotary is not None
    if out is None:
        out = case.query.new_zeros(*case.query.shape[:2], case.width)
    call = case.query, case.rotary, case.keys, case.values, case.batch
    return latent_attention(*call, out=out, **case.options)


@interpreted
@pytest.mark.parametrize("shape", [SPLIT, WHOLE], ids=["split", "whole"])
@pytest.mark.parametrize("mask", MASKS)
def test_decode(mask: str, shape: DecodeShape) -> None:
    case = make_latent_case(DECODES, **MASKS[mask])
    assert worst_row_error(run(case, shape), case.expected()) < LIMIT
    assert all(not counts.any() for counts in case.batch._arrivals.values())


@interpreted
@pytest.mark.parametrize("mask", MASKS)
def test_prefill_mixed_with_decodes(mask: str) -> None:
    case = make_latent_case(MIXED, **MASKS[mask])
    assert worst_row_error(run(case, CHUNKS), case.expected()) < LIMIT


@interpreted
@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_heads(sizes: tuple[int, int, int]) -> None:
    case = make_latent_case([(1, 37), (1, 3)], *sizes)
    assert worst_row_error(run(case, SPLIT), case.expected()) < LIMIT
    case = make_latent_case([(9, 20), (1, 6), (3, 3)], *sizes)
    assert worst_row_error(run(case, CHUNKS), case.expected()) < LIMIT


@interpreted
def test_a_long_context_in_a_mixed_step_is_split() -> None:
    case = make_latent_case([(1, 1030), (4, 9), (1, 3)], 2, block_size=16)
    assert worst_row_error(attend(case), case.expected()) < LIMIT
    assert case.batch._arrivals


@interpreted
def test_padding_of_a_decode_step_becomes_zero() -> None:
    """The last sequences, without query rows, and their rows; rows beyond them stay."""
    case = make_latent_case([(1, 20), (1, 33), (0, 7), (0, 1)], spare_rows=5)
    out = torch.full((*case.query.shape[:2], case.width), 7.0)
    attend(case, out)
    assert worst_row_error(out[:2], case.expected()[:2]) < LIMIT
    assert (out[2:4] == 0.0).all()
    assert (out[4:] == 7.0).all()


@interpreted
def test_the_cache_is_written_where_both_parts_lie_side_by_side() -> None:
    both = torch.zeros(9, 1, 10)
    keys, values = torch.split(both, [7, 3], 2)
    key, value = torch.randn(3, 1, 7), torch.randn(3, 1, 3)
    key[1, 0, 2], value[2, 0, 0] = float("nan"), float("inf")
    write_cache(key, value, torch.tensor([4, 0, -1]), keys, values)
    want = torch.zeros(9, 1, 10)
    want[4], want[0] = torch.cat((key[0], value[0]), 1), torch.cat((key[1], value[1]), 1)
    assert torch.equal(both, torch.nan_to_num(want))


@interpreted
@pytest.mark.parametrize("shape", [SPLIT, CHUNKS], ids=["decode", "prefill"])
def test_a_missing_part_or_another_heads_is_seen(shape: DecodeShape | PrefillShape) -> None:
    case = make_latent_case(DECODES[4:], window=6)
    want = case.expected()
    assert case.rotary is not None
    for wrong in (
        replace(case, rotary=0 * case.rotary),
        replace(case, rotary=case.rotary.roll(1, 1)),
        replace(case, query=case.query.roll(1, 1)),
        replace(case, options=case.options | {"window": 7}),
    ):
        assert worst_row_error(run(wrong, shape), want) > 1e-3


GPU_DECODES = [(1, n) for n in (1, 15, 16, 17, 63, 64, 65, 255, 257, 1000, 4097)] + [(0, 40)]
GPU_MIXED = [(1, 9), (70, 70), (1, 1400), (0, 5), (130, 300), (2, 2), (1, 1), (222, 2222)]


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [GPU_DECODES, GPU_MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("heads", [16, 20, 32, 128])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_gpu(dtype: torch.dtype, heads: int, lens: list[tuple[int, int]]) -> None:
    case = make_latent_case(lens, heads, 512, 64, 16, dtype=dtype, device="cuda")
    out = attend(case)
    assert worst_row_error(out, case.expected()) < LIMITS[dtype]
    assert torch.equal(attend(case), out)  # whichever program of a sequence came last


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [GPU_DECODES, GPU_MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("sizes", [*HEADS, (40, 256, 32)], ids=str)
def test_gpu_sizes(sizes: tuple[int, int, int], lens: list[tuple[int, int]]) -> None:
    case = make_latent_case(lens, *sizes, 16, dtype=torch.bfloat16, device="cuda", window=100)
    assert worst_row_error(attend(case), case.expected()) < LIMITS[torch.bfloat16]


@pytest.mark.gpu
def test_gpu_graph_follows_lengths_and_tables() -> None:
    """One capture with a bound of 2000 keys; then other lengths and blocks."""
    width, limit = 130, LIMITS[torch.bfloat16]
    given: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    cases = [
        make_latent_case([(1, n) for n in lens], 16, 512, 64, 16, seed=seed, **given)
        for seed, lens in enumerate([(5, 700, 64, 1), (1900, 1, 33, 300), (17, 2000, 16, 900)])
    ]
    both = torch.zeros(4 * width * 16, 1, 576, **given)
    keys, values = torch.split(both, [512, 64], 2)
    query, out = torch.zeros(4, 16, 512, **given), torch.zeros(4, 16, 512, **given)
    rotary = torch.zeros(4, 16, 64, **given)
    static = Case(query, keys, values, AttentionBatch(
        query_starts=torch.arange(5, device="cuda"),
        kv_lens=torch.ones(4, dtype=torch.int64, device="cuda"),
        block_tables=torch.zeros(4, width, dtype=torch.int64, device="cuda"),
        block_size=16,
        max_query_len=1,
        max_kv_len=2000,
    ), cases[0].options, rotary)  # fmt: skip

    def fresh() -> torch.Tensor:
        return attend(replace(static, batch=replace(static.batch, _arrivals={})), out)

    graph, _ = capture(fresh)
    for case in [*cases, moved(cases[1], 9)]:
        batch = static.batch
        batch.kv_lens.copy_(case.batch.kv_lens)
        batch.block_tables[:, : case.batch.block_tables.shape[1]] = case.batch.block_tables
        query.copy_(case.query)
        assert case.rotary is not None
        rotary.copy_(case.rotary)
        keys[: len(case.keys)], values[: len(case.values)] = case.keys, case.values
        graph.replay()
        assert worst_row_error(out, case.expected()) < limit
