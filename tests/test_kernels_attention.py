"""Paged attention kernels in Triton's interpreter, against float64; GPU tests: test_ops_gpu_*."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_attention import Case, Sizes, make_case, worst_row_error

from vexpert.errors import UnsupportedError
from vexpert.kernels.cache_write import reference_write_cache
from vexpert.kernels.cache_write import write_cache as launch_write
from vexpert.kernels.paged_decode import DecodeShape, count_splits, paged_decode
from vexpert.kernels.paged_prefill import PrefillShape, paged_prefill
from vexpert.kernels.paged_types import Scores
from vexpert.ops.attention import paged_attention, write_cache

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_attention.py does it")

LIMIT = 1e-5  # float32 sums in another order: see TOLERANCE in helpers_lora.py
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 6},
    "window-1": {"window": 1},
    "chunk": {"chunk": 5},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "everything": {"window": 9, "chunk": 16, "softcap": 3.0, "sinks": True},
}
# around the edges of blocks (4), of steps (16) and of runs (16)
DECODES = [(1, n) for n in (1, 3, 4, 5, 15, 16, 17, 31, 33, 65)]
MIXED = [(1, 9), (7, 7), (1, 40), (0, 5), (13, 30), (2, 2), (1, 1), (22, 22)]
SPLIT = DecodeShape(16, 16, 64, num_stages=1)
WHOLE = DecodeShape(32, 1000, 1, num_stages=1)


def scores_of(case: Case) -> Scores:
    return Scores(**case.options)


def decoded(case: Case, shape: DecodeShape) -> torch.Tensor:
    out = case.query.new_zeros(*case.query.shape[:2], case.values.shape[2])
    call = (case.query, case.keys, case.values, case.batch, scores_of(case), out)
    paged_decode(*call, shape)
    return out


def prefilled(case: Case, block_m: int = 32, block_n: int = 16) -> torch.Tensor:
    out = case.query.new_zeros(*case.query.shape[:2], case.values.shape[2])
    call = (case.query, case.keys, case.values, case.batch, scores_of(case), out)
    paged_prefill(*call, PrefillShape(block_m, block_n, num_stages=1))
    return out


@pytest.mark.parametrize("shape", [SPLIT, WHOLE], ids=["split", "whole"])
@pytest.mark.parametrize("mask", MASKS)
def test_decode(mask: str, shape: DecodeShape) -> None:
    case = make_case(DECODES, **MASKS[mask])
    assert worst_row_error(decoded(case, shape), case.expected()) < LIMIT
    assert all(not counts.any() for counts in case.batch._arrivals.values())


@pytest.mark.parametrize("mask", MASKS)
def test_prefill_mixed_with_decodes(mask: str) -> None:
    case = make_case(MIXED, **MASKS[mask])
    assert worst_row_error(prefilled(case), case.expected()) < LIMIT


HEADS = [
    Sizes(1, 1, 64, 64),
    Sizes(2, 2, 80, 80, 16),
    Sizes(1, 4, 96, 96),
    Sizes(1, 5, 112, 48, 8),
    Sizes(2, 7, 10, 24),
    Sizes(1, 8, 192, 128, 32),
    Sizes(1, 8, 128, 256, 16),
    Sizes(1, 20, 16, 16),
    Sizes(1, 71, 8, 8),
]


@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_heads(sizes: Sizes) -> None:
    case = make_case([(1, 37), (1, 3)], sizes, sinks=True, softcap=5.0)
    assert worst_row_error(decoded(case, SPLIT), case.expected()) < LIMIT
    case = make_case([(9, 20), (1, 6), (3, 3)], sizes, sinks=True)
    assert worst_row_error(prefilled(case), case.expected()) < LIMIT


def test_many_sequences_of_a_prefill() -> None:
    """More than are looked through at a time to find a tile's."""
    case = make_case([(n % 3, 3 + n % 4) for n in range(135)], Sizes(1, 1))
    assert worst_row_error(prefilled(case), case.expected()) < LIMIT


def test_padding_of_a_mixed_step_is_left_as_it_is() -> None:
    """Sequences without query rows, the first too, and rows behind the last sequence."""
    lens = [(3, 20), (0, 7), (1, 33)]
    case = make_case([(0, 4), *lens, (0, 9)], Sizes(spare_rows=5))
    out = torch.full((*case.query.shape[:2], 12), 7.0)
    done = paged_attention(case.query, case.keys, case.values, case.batch, out=out, **case.options)
    assert done is out
    assert worst_row_error(out[:4], case.expected()[:4]) < LIMIT
    assert (out[4:] == 7.0).all()


def test_padding_of_a_decode_step_becomes_zero() -> None:
    """The last sequences, without query rows, and their rows; rows beyond them stay."""
    case = make_case([(1, 20), (1, 33), (0, 7), (0, 1)], Sizes(spare_rows=5))
    out = torch.full((*case.query.shape[:2], 12), 7.0)
    paged_attention(case.query, case.keys, case.values, case.batch, out=out, **case.options)
    assert worst_row_error(out[:2], case.expected()[:2]) < LIMIT
    assert (out[2:4] == 0.0).all()
    assert (out[4:] == 7.0).all()


def test_a_long_context_in_a_mixed_step_is_split() -> None:
    case = make_case([(1, 1030), (4, 9), (1, 3)], Sizes(1, 2, block_size=16))
    out = paged_attention(case.query, case.keys, case.values, case.batch, **case.options)
    assert worst_row_error(out, case.expected()) < LIMIT
    assert case.batch._arrivals


def test_a_bound_far_above_the_lengths_changes_nothing() -> None:
    case = make_case(DECODES, Sizes(1, 2))
    far = replace(case, batch=replace(case.batch, max_kv_len=100_000, _arrivals={}))
    assert worst_row_error(decoded(far, SPLIT), case.expected()) < LIMIT


def test_splits_fill_the_device_but_not_more() -> None:
    shape = DecodeShape(64, 256, 264)
    assert count_splits(shape, 4, 200) == 1
    assert count_splits(shape, 4, 1000) == 4
    assert count_splits(shape, 4, 1_000_000) == 64
    assert count_splits(shape, 100, 1_000_000) == 3
    assert count_splits(shape, 512, 1_000_000) == 1


# Another sequence's blocks end earlier, and behind their ends is NaN; NumPy tells of it.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("lens", [DECODES, MIXED], ids=["decode", "mixed"])
def test_wrong_blocks_and_masks_are_seen(lens: list[tuple[int, int]]) -> None:
    case = make_case(lens[-5:], Sizes(1, 2), window=6)
    run = (lambda c: decoded(c, SPLIT)) if lens is DECODES else prefilled
    want = case.expected()
    for options in ({"window": 7}, {"window": 5}, {"window": None}, {"softcap": 9.0}):
        assert worst_row_error(run(replace(case, options=case.options | options)), want) > 1e-3
    tables = case.batch.block_tables.roll(1, 0)
    other = replace(case, batch=replace(case.batch, block_tables=tables))
    assert not worst_row_error(run(other), want) < 1e-2
    lens_too_long = replace(case, batch=replace(case.batch, kv_lens=case.batch.kv_lens + 1))
    assert not worst_row_error(run(lens_too_long), want) < 1e-2


def test_float16() -> None:
    case = make_case(DECODES, dtype=torch.float16, sinks=True)
    assert worst_row_error(decoded(case, SPLIT), case.expected()) < 3e-3
    case = make_case(MIXED, dtype=torch.float16, sinks=True)
    assert worst_row_error(prefilled(case), case.expected()) < 3e-3


@pytest.mark.parametrize(("heads", "d", "dv"), [(2, 12, 12), (3, 80, 48), (4, 300, 16)])
def test_write_cache(heads: int, d: int, dv: int) -> None:
    fused = torch.randn(5, heads * (d + dv) + 3)
    key = fused[:, : heads * d].view(5, heads, d)
    value = fused[:, heads * d : heads * (d + dv)].unflatten(1, (heads, dv))
    fused[1, 0], fused[2, 5], fused[3, -4] = float("nan"), float("inf"), float("-inf")
    rows = torch.tensor([7, 2, -1, 0, 5])
    caches = [(torch.ones(9, heads, d), torch.ones(9, heads, dv)) for _ in range(3)]
    reference_write_cache(key, value, rows, *caches[0])
    launch_write(key, value, rows, *caches[1])
    # as transformers passes them: [Hkv, T, d]
    turned, other = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (key, value))
    write_cache(turned, other, rows, *caches[2])
    for cache in caches:
        assert torch.equal(cache[0], caches[0][0])
        assert torch.equal(cache[1], caches[0][1])
        assert all(torch.isfinite(part).all() for part in cache)
    assert torch.equal(caches[0][0][7], key[0])


def test_what_cannot_run_is_refused() -> None:
    case = make_case([(1, 3)], dtype=torch.bfloat16)
    call = (case.query, case.keys, case.values, case.batch)
    with pytest.raises(UnsupportedError, match=r"bfloat16 on cpu: it computes in .*float32"):
        paged_attention(*call, **case.options)
    with pytest.raises(UnsupportedError, match="differ"):
        paged_attention(case.query.float(), *call[1:], **case.options)
    case = make_case([(1, 3)], Sizes(1, 1, 520, 8))
    with pytest.raises(UnsupportedError, match="at most 512"):
        paged_attention(case.query, case.keys, case.values, case.batch, **case.options)
