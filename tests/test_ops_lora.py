"""The LoRA operations on the CPU: both backends and the classic path against the slow reference.

Triton runs in its interpreter, which cannot multiply bfloat16: that dtype is checked on a GPU
(test_ops_gpu.py).
"""

from dataclasses import replace

import pytest
import torch
from helpers_lora import TOLERANCE, Case, assert_delta, bits
from helpers_lora_cases import SHAPES, make_case, run, zeros_for

from vexpert.ops.backend import select_backend

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_ops_gpu.py runs these")

TORCH_PATHS = ("torch", "torch-classic")
PATHS = (*TORCH_PATHS, "numba", "triton")
FEW = ("mixed", "sentinels", "one-expert", "shared-a", "dense", "alike")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("path", TORCH_PATHS)
@pytest.mark.parametrize("name", SHAPES)
def test_torch_equals_reference(name: str, path: str, dtype: torch.dtype) -> None:
    case = make_case(name, dtype)
    y = zeros_for(case)
    run(path, case, y)
    assert_delta(y, case)


@pytest.mark.parametrize("path", ["numba", "triton"])
@pytest.mark.parametrize("name", SHAPES)
def test_compiled_kernels_equal_reference(name: str, path: str) -> None:
    case = make_case(name)
    y = zeros_for(case)
    run(path, case, y)
    assert_delta(y, case)


@pytest.mark.parametrize("path", ["triton", "triton-classic"])
@pytest.mark.parametrize("name", FEW)
def test_triton_in_half_precision_and_per_adapter(name: str, path: str) -> None:
    case = make_case(name, torch.float16)
    y = zeros_for(case)
    run(path, case, y)
    assert_delta(y, case)


def awkward_output(case: Case) -> torch.Tensor:
    """Rows of a larger matrix that hold -0.0, NaN and numbers: all must survive unless added to."""
    rows, out = case.slots.shape[0], case.site.out_features
    larger = torch.randn(rows + 2, out + 9, dtype=case.x.dtype)
    larger[:, ::5] = -0.0
    larger[case.unchanged_rows().nonzero().view(-1) + 1, 4] = float("nan")
    return larger[1:-1, 4 : 4 + out]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["mixed", "sentinels", "all-sentinels", "base-only", "dense"])
def test_other_rows_and_columns_are_untouched(name: str, path: str) -> None:
    case = make_case(name)
    y = awkward_output(case)
    larger = y._base
    assert larger is not None
    before = larger.clone()
    run(path, case, y)
    idle = case.unchanged_rows()
    inside = torch.zeros_like(larger, dtype=torch.bool)
    inside[1:-1, 4 : 4 + case.site.out_features] = ~idle[:, None]
    width = larger.shape[1]
    changed = (bits(larger) != bits(before)).view(-1, width, 4).any(2)
    assert not (changed & ~inside).any()
    delta = (y - before[1:-1, 4 : 4 + case.site.out_features])[~idle]
    assert torch.allclose(delta.double(), case.reference()[~idle], atol=1e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", FEW)
def test_two_runs_are_equal_bit_for_bit(name: str, path: str) -> None:
    case = make_case(name)
    first, second = zeros_for(case), zeros_for(case)
    run(path, case, first)
    run(path, case, second)
    assert torch.equal(bits(first), bits(second))


def wrong_adapter(case: Case) -> Case:
    """One active row uses another slot of the same ranks."""
    slots = case.slots.clone()
    row = int((slots >= 0).nonzero()[0])
    slots[row] = (slots[row] + 1) % case.num_slots
    return replace(case, slots=slots)


def wrong_expert(case: Case) -> Case:
    """One active row uses the next expert."""
    assert case.experts is not None
    experts = case.experts.clone()
    row = int((case.slots >= 0).nonzero()[0])
    experts[row] = (experts[row] + 1) % case.site.num_experts
    return replace(case, experts=experts)


def missing_scale(case: Case) -> Case:
    """Slot 0's B lacks a scale of 2 (alpha twice the rank)."""
    arena, table = case.table.arena.clone(), case.table
    start = int(table.b_offset[0, 0])
    count = case.site.num_experts * int(table.b_stride[0, 0])
    arena[start : start + count] *= 2
    return replace(case, table=replace(table, arena=arena))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("plant", [wrong_adapter, wrong_expert, missing_scale])
def test_a_planted_error_is_found(plant, path: str) -> None:
    right = make_case("t32-k2-e8-r8")
    right = replace(right, slots=right.slots.where(right.slots != 1, 2))  # equal ranks alone
    y = zeros_for(right)
    run(path, plant(right), y)
    with pytest.raises(AssertionError, match="relative error of the delta"):
        assert_delta(y, right)


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("case_name", ["mixed", "interleaved", "uneven-slices", "sentinels"])
def test_expand_adds_in_place_or_apart_and_heeds_the_mask(case_name: str, name: str) -> None:
    case = make_case(case_name)
    backend = select_backend(name, "cpu", torch.float32)
    routing = backend.route(case.slots, case.experts, case.site.num_experts, case.num_slots)
    h = backend.shrink(case.x, case.site, case.table, routing, case.x_rows)
    assert h.dtype == torch.float32
    assert h.shape == (case.slots.shape[0], case.site.max_rank)
    mask = torch.arange(case.slots.shape[0]) % 2 == 0
    masked = case.reference() * mask[:, None]
    y = torch.randn(zeros_for(case).shape)
    start = y.clone()
    apart = backend.expand(h, case.site, case.table, routing, y, False, mask)
    assert torch.equal(y, start)
    assert torch.allclose(apart.double(), masked, atol=1e-5)
    assert not apart[~mask].any()
    assert backend.expand(h, case.site, case.table, routing, y, add_output_mask=mask) is y
    assert torch.allclose((y - start).double(), masked, atol=1e-5)
    assert torch.equal(bits(y[~mask]), bits(start[~mask]))
    y = start.clone()
    backend.expand(h, case.site, case.table, routing, y)
    assert torch.allclose((y - start).double(), case.reference(), atol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_a_table_changed_in_place_takes_effect(path: str) -> None:
    """As when a slot is reused: the same table, other values, the same slots in the batch."""
    case, other = make_case("alike"), make_case("alike", seed=1)
    y = zeros_for(case)
    run(path, case, y)
    case.table.arena.copy_(other.table.arena)
    case.table.b_offset[0, 0] = case.table.b_offset[0, 1]
    y.zero_()
    run(path, case, y)
    assert_delta(y, case)


@pytest.mark.parametrize("path", PATHS)
def test_strided_input(path: str) -> None:
    """x is a view of a larger matrix, as one head's part of a projection is."""
    case = make_case("mixed")
    tokens, hidden = case.x.shape
    wide = torch.randn(tokens, hidden + 5)
    case = replace(case, x=wide[:, 2 : 2 + hidden])
    y = zeros_for(case)
    run(path, case, y)
    assert_delta(y, case)
