"""Paged attention on a GPU: every mask and width, and graphs that follow lengths and tables."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_attention import Case, Sizes, make_case, moved, worst_row_error
from helpers_graphs import capture

from vexpert.kernels.paged_types import AttentionBatch
from vexpert.ops.attention import paged_attention, write_cache

pytestmark = pytest.mark.gpu

# Weights are rounded to the type of the values before the second product, and so is the output.
LIMITS = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 100},
    "chunk": {"chunk": 96},
    "everything": {"window": 300, "chunk": 256, "softcap": 5.0, "sinks": True},
}
DECODES = [(1, n) for n in (1, 15, 16, 17, 63, 64, 65, 255, 257, 1000, 4097)] + [(0, 40)]
MIXED = [(1, 9), (70, 70), (1, 1400), (0, 5), (130, 300), (2, 2), (1, 1), (222, 2222), (16, 64)]
QWEN = Sizes(4, 8, 128, 128, 16)
HEADS = [
    Sizes(2, 1, 64, 64, 16),
    Sizes(2, 7, 80, 96, 8),
    Sizes(1, 3, 112, 112, 16),
    Sizes(1, 20, 192, 128, 32),
    Sizes(2, 4, 256, 256, 16),
    Sizes(1, 2, 300, 400, 16),
]


def attend(case: Case, out: torch.Tensor | None = None) -> torch.Tensor:
    if out is None:
        out = case.query.new_zeros(*case.query.shape[:2], case.values.shape[2])
    call = (case.query, case.keys, case.values, case.batch)
    return paged_attention(*call, out=out, **case.options)


@pytest.mark.parametrize("lens", [DECODES, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_masks(dtype: torch.dtype, mask: str, lens: list[tuple[int, int]]) -> None:
    case = make_case(lens, QWEN, dtype, "cuda", **MASKS[mask])
    out = attend(case)
    assert worst_row_error(out, case.expected()) < LIMITS[dtype]
    assert torch.equal(attend(case), out)  # whichever program of a sequence came last


@pytest.mark.parametrize("lens", [DECODES, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("sizes", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_heads(dtype: torch.dtype, sizes: Sizes, lens: list[tuple[int, int]]) -> None:
    case = make_case(lens, sizes, dtype, "cuda", sinks=True)
    assert worst_row_error(attend(case), case.expected()) < LIMITS[dtype]


def test_a_graph_follows_lengths_and_tables() -> None:
    """One capture with a bound of 2000 keys; then other lengths, blocks, and padding."""
    bound, width = 2000, 130
    cases = [
        make_case([(1, n) for n in lens], QWEN, torch.bfloat16, "cuda", seed=seed)
        for seed, lens in enumerate([(5, 700, 64, 1), (1900, 1, 33, 300), (17, 2000, 16, 900)])
    ]
    rows = 4 * width * 16
    query, out = torch.empty_like(cases[0].query), torch.empty_like(cases[0].query)
    keys = torch.zeros(rows, 4, 128, dtype=query.dtype, device="cuda")
    static = Case(query, keys, keys.clone(), AttentionBatch(
        query_starts=torch.arange(5, device="cuda"),
        kv_lens=torch.ones(4, dtype=torch.int64, device="cuda"),
        block_tables=torch.zeros(4, width, dtype=torch.int64, device="cuda"),
        block_size=16,
        max_query_len=1,
        max_kv_len=bound,
    ), cases[0].options)  # fmt: skip

    def fresh() -> torch.Tensor:
        return attend(replace(static, batch=replace(static.batch, _arrivals={})), out)

    graph, _ = capture(fresh)
    for case in [*cases, moved(cases[1], 9)]:
        batch = static.batch
        batch.kv_lens.copy_(case.batch.kv_lens)
        batch.block_tables[:, : case.batch.block_tables.shape[1]] = case.batch.block_tables
        query.copy_(case.query)
        static.keys[: len(case.keys)], static.values[: len(case.values)] = case.keys, case.values
        graph.replay()
        assert worst_row_error(out, case.expected()) < LIMITS[torch.bfloat16]
    before = out.clone()
    static.batch.query_starts.copy_(torch.tensor([0, 1, 2, 2, 2]))  # the last two are padding
    out.fill_(7.0)
    graph.replay()
    assert torch.equal(out[:2], before[:2])
    assert (out[2:] == 0.0).all()


def test_write_cache_in_a_graph() -> None:
    key = torch.randn(6, 4, 128, device="cuda", dtype=torch.bfloat16)
    value, rows = torch.randn_like(key), torch.tensor([3, -1, 7, 0, -1, 5], device="cuda")
    keys, values = (torch.zeros(9, 4, 128, device="cuda", dtype=key.dtype) for _ in range(2))
    graph, _ = capture(lambda: write_cache(key, value, rows, keys, values))
    key[2, 1, 5], value[0, 0, 0] = float("nan"), float("inf")
    rows.copy_(torch.tensor([1, 2, 8, -1, 4, -1]))
    keys.zero_(), values.zero_()
    graph.replay()
    for given, cache in ((key, keys), (value, values)):
        want = torch.zeros_like(cache)
        want[rows[rows >= 0]] = torch.nan_to_num(given[rows >= 0], posinf=0.0, neginf=0.0)
        assert torch.equal(cache, want)
