"""Grouping rows by virtual expert: every active row once, in a group of its own virtual expert."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vexpert.kernels.blocks import Blocks, make_blocks, reference_blocks, virtual_keys
from vexpert.ops.torch_routing import arrange, route

EXPERTS, SLOTS = 5, 3
PAIRS = st.lists(st.tuples(st.integers(-1, SLOTS - 1), st.integers(-2, EXPERTS + 1)), max_size=120)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def columns(pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    slots = torch.tensor([slot for slot, _ in pairs], dtype=torch.int64)
    experts = torch.tensor([expert for _, expert in pairs], dtype=torch.int64)
    return slots, experts


def expected_keys(pairs: list[tuple[int, int]]) -> list[int]:
    return [
        slot * EXPERTS + expert if slot >= 0 and 0 <= expert < EXPERTS else SLOTS * EXPERTS
        for slot, expert in pairs
    ]


def listed(blocks: Blocks) -> list[tuple[int, list[int]]]:
    """What a kernel's programs see."""
    key, order = blocks.key.tolist(), blocks.order.tolist()
    seen = []
    for start in blocks.block_start[: int(blocks.num_blocks)].tolist():
        stop = start
        while stop < len(key) and stop - start < blocks.block_m and key[stop] == key[start]:
            stop += 1
        seen.append((key[start], order[start:stop]))
    return seen


@settings(max_examples=60, deadline=None)
@given(PAIRS)
def test_blocks_hold_every_active_row_once(pairs: list[tuple[int, int]]) -> None:
    slots, experts = (column.to(DEVICE) for column in columns(pairs))
    keys = virtual_keys(slots, experts, EXPERTS, SLOTS)
    assert keys.tolist() == expected_keys(pairs)
    blocks = make_blocks(keys, EXPERTS, SLOTS * EXPERTS)
    assert int(blocks.num_blocks) <= blocks.max_blocks
    assert listed(blocks) == reference_blocks(keys.tolist(), SLOTS * EXPERTS, blocks.block_m)


@settings(max_examples=60, deadline=None)
@given(PAIRS, st.integers(1, 6))
def test_segments_and_rest_hold_every_active_row_once(
    pairs: list[tuple[int, int]], min_rows: int
) -> None:
    routing = route(*columns(pairs), EXPERTS)
    segments, rest = routing.split(min_rows)
    keys = expected_keys(pairs)
    found: dict[int, int] = {}
    for segment in segments:
        assert len(segment.rows) >= min_rows
        found |= dict.fromkeys(segment.rows.tolist(), segment.slot * EXPERTS + segment.expert)
    for row, slot, expert in zip(
        rest.rows.tolist(), rest.slots.tolist(), rest.experts.tolist(), strict=True
    ):
        found[row] = slot * EXPERTS + expert
    total = sum(len(segment.rows) for segment in segments) + len(rest.rows)
    assert total == len(found)
    assert found == {row: key for row, key in enumerate(keys) if key < SLOTS * EXPERTS}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.integers(-2, EXPERTS + 1)] * 3), max_size=20))
def test_an_arrangement_holds_every_local_pair_once(ids: list[tuple[int, ...]]) -> None:
    topk_ids = torch.tensor(ids, dtype=torch.int64).reshape(len(ids), 3)
    pairs = arrange(topk_ids, EXPERTS)
    flat = topk_ids.reshape(-1).tolist()
    local = [pair for pair, expert in enumerate(flat) if 0 <= expert < EXPERTS]
    assert sorted(pairs.pair.tolist()) == local
    assert pairs.expert.tolist() == sorted(flat[pair] for pair in local)
    assert [flat[pair] for pair in pairs.pair.tolist()] == pairs.expert.tolist()
    assert pairs.token.tolist() == [pair // 3 for pair in pairs.pair.tolist()]
    assert [pairs.pair.tolist()[row] for row in pairs.position.tolist()] == local


def test_no_array_has_one_element_per_virtual_expert() -> None:
    keys = virtual_keys(torch.tensor([63, 0]), torch.tensor([511, 7]), 512, 64)
    blocks = make_blocks(keys, 512, 64 * 512)
    tensors = (blocks.key, blocks.order, blocks.block_start, blocks.num_blocks)
    assert max(tensor.numel() for tensor in tensors) <= 2
    assert blocks.key.tolist() == [7, 63 * 512 + 511]


@pytest.mark.parametrize("rows", [0, 1])
def test_nothing_active(rows: int) -> None:
    blocks = make_blocks(torch.full((rows,), 15), EXPERTS, SLOTS * EXPERTS)
    assert int(blocks.num_blocks) == 0
