"""Mask kinds, and the index arrays of a step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_bidirectional_overlay,
    sliding_window_causal_mask_function,
)

from vexpert.models.masks import CAUSAL, MaskKind, UnknownMask, identify
from vexpert.models.plan import StepPlan
from vexpert.models.types import StepInput


@pytest.mark.parametrize(
    ("function", "size", "kind"),
    [
        (causal_mask_function, None, CAUSAL),
        (sliding_window_causal_mask_function(1), 1, MaskKind(window=1)),
        (sliding_window_causal_mask_function(7), 7, MaskKind(window=7)),
        (chunked_causal_mask_function(6, torch.zeros(1, dtype=torch.int64)), 6, MaskKind(chunk=6)),
    ],
)
def test_known_masks(function: Callable[..., Any], size: int | None, kind: MaskKind) -> None:
    assert identify(function, size) == kind


@pytest.mark.parametrize(
    ("function", "size"),
    [
        (sliding_window_bidirectional_overlay(7), 7),
        (sliding_window_causal_mask_function(6), 7),
        (lambda b, h, q, k: k >= 0, None),
        (lambda b, h, q, k: k < q, None),
    ],
)
def test_other_masks(function: Callable[..., Any], size: int | None) -> None:
    assert isinstance(identify(function, size), UnknownMask)


def step_of(query_lens: list[int], context_lens: list[int], block_size: int) -> StepInput:
    """Sequence i owns blocks 100 i, 100 i + 1, ..."""
    positions = [p for q, c in zip(query_lens, context_lens, strict=True) for p in range(c - q, c)]
    width = -(-max(context_lens) // block_size)
    tables = torch.arange(width) + 100 * torch.arange(len(query_lens))[:, None]
    rows = torch.arange(len(positions))
    return StepInput(
        token_ids=rows,
        positions=torch.tensor(positions),
        query_lens=tuple(query_lens),
        context_lens=tuple(context_lens),
        block_tables=tables,
        cache_rows=rows,
        logit_rows=rows,
        lora=None,
    )


def test_decodes_share_a_group_and_chunks_have_their_own() -> None:
    plan = StepPlan(step_of([1, 20, 1, 20, 3, 1], [9, 20, 5, 40, 3, 30], 4), 4)
    assert [(group.q, group.sequences) for group in plan.groups] == [
        (1, (0, 2, 5)),
        (20, (1,)),
        (20, (3,)),
        (3, (4,)),
    ]
    rows = plan.groups[0].rows
    assert isinstance(rows, torch.Tensor)
    assert rows.tolist() == [0, 21, 45]
    assert plan.groups[1].rows == slice(1, 21)


def test_decodes_alone_are_one_slice() -> None:
    (group,) = StepPlan(step_of([1, 1, 1], [9, 5, 30], 4), 4).groups
    assert group.rows == slice(0, 3)


@pytest.mark.parametrize("kind", [CAUSAL, MaskKind(window=6), MaskKind(chunk=5)])
def test_masks_hold_exactly_the_allowed_keys(kind: MaskKind) -> None:
    query_lens, context_lens, size = [1, 12, 1, 2], [9, 30, 23, 7], 4
    plan = StepPlan(step_of(query_lens, context_lens, size), size)
    for group, keys in zip(plan.groups, plan.keys(kind), strict=True):
        blocks = keys.blocks.view(len(group.sequences), -1)
        for i, sequence in enumerate(group.sequences):
            end = context_lens[sequence]
            for j in range(group.q):
                query = end - group.q + j
                places = [
                    (int(blocks[i, column // size]) - 100 * sequence) * size + column % size
                    for column in keys.mask[i, j].nonzero().flatten().tolist()
                ]
                want = [
                    key
                    for key in range(end)
                    if bool(kind.allowed(torch.tensor(query), torch.tensor(key)))
                ]
                assert places == want


def test_a_window_reads_its_last_blocks_only() -> None:
    plan = StepPlan(step_of([1, 1], [4000, 4003], 16), 16)
    (keys,) = plan.keys(MaskKind(window=32))
    assert keys.length <= 48


def test_masks_are_repeated_for_the_heads_of_a_product() -> None:
    plan = StepPlan(step_of([1, 12, 1], [3, 30, 6], 4), 4)
    decodes, chunk = plan.head_masks(CAUSAL, (3, 1))
    keys = plan.keys(CAUSAL)
    assert decodes.shape == (2, 1, 3, keys[0].length)
    assert all(torch.equal(decodes[:, 0, i], keys[0].mask[:, 0]) for i in range(3))
    assert torch.equal(chunk, keys[1].mask[:, None])


def test_a_plan_takes_a_batch_of_its_own() -> None:
    step = step_of([1, 2, 1], [3, 2, 6], 4)
    plan = StepPlan(step, 4)
    made = plan.attention_batch
    assert plan.attention_batch is made
    assert made.query_starts.tolist() == [0, 1, 3, 4]
    assert made.kv_lens.tolist() == [3, 2, 6]
    assert (made.max_query_len, made.max_kv_len) == (2, 6)
    other = StepPlan(step, 4)
    other.attention_batch = made
    assert other.attention_batch is made
