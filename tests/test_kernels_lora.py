"""Each Triton kernel against the slow reference in its own file."""

import pytest
import torch
from helpers_lora import Case, bits, relative_error
from helpers_lora_cases import make_case

from vexpert.kernels import combine as combine_file
from vexpert.kernels import lora_expand as expand_file
from vexpert.kernels import lora_shrink as shrink_file
from vexpert.kernels.blocks import Blocks, choose_block_m, make_blocks, virtual_keys
from vexpert.kernels.grouped_gemm import grouped_gemm
from vexpert.ops import reference
from vexpert.ops.triton_backend import slice_runs
from vexpert.ops.types import OutputSlice

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_ops_gpu.py runs these")


def blocks_of(case: Case) -> tuple[Blocks, torch.Tensor]:
    """Blocks of a case, and its experts with zeros for a dense layer."""
    experts = torch.zeros_like(case.slots) if case.experts is None else case.experts
    count = case.site.num_experts
    keys = virtual_keys(case.slots, experts, count, case.num_slots)
    return make_blocks(keys, count, count * case.num_slots), experts


@pytest.mark.parametrize("name", ["mixed", "deep", "dense", "odd-ranks"])
def test_shrink(name: str) -> None:
    case = make_case(name)
    blocks, experts = blocks_of(case)
    table = case.table
    factors = (case.x, case.x_rows, table.arena, table.rank, table.a_offset, table.a_stride)
    h = shrink_file.lora_shrink(*factors, blocks, case.site.max_rank)
    expected = shrink_file.reference_shrink(*factors, case.slots, experts, case.site.max_rank)
    used = torch.arange(case.site.max_rank) < table.rank[case.slots.clamp(0)][:, None]
    used &= (case.slots >= 0)[:, None]
    assert relative_error(h[used], expected[used]) < 1e-6


def test_the_deep_case_is_split() -> None:
    case = make_case("deep")
    assert shrink_file.choose_splits(blocks_of(case)[0].max_blocks, case.site.in_features) > 1


@pytest.mark.parametrize("name", ["mixed", "interleaved", "uneven-slices"])
def test_expand(name: str) -> None:
    case = make_case(name)
    blocks, experts = blocks_of(case)
    table = case.table
    h = torch.randn(case.slots.shape[0], case.site.max_rank)
    columns = (table.slice_rank, table.slice_column, table.b_offset, table.b_stride)
    out = case.site.out_features
    y = torch.zeros(h.shape[0], out)
    expected = torch.zeros(h.shape[0], out, dtype=torch.float64)
    for run in slice_runs(case.site.slices):
        expand_file.lora_expand(h, table.arena, columns, blocks, run, None, y, add=True)
        expected += expand_file.reference_expand(
            h, table.arena, columns, case.slots, experts, run, out
        )
    assert relative_error(y, expected) < 1e-6


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_grouped_gemm(has_bias: bool, is_transposed: bool) -> None:
    torch.manual_seed(0)
    experts = torch.randint(-1, 6, (21,))  # 5 is a sentinel too
    x, x_rows = torch.randn(7, 37), torch.arange(21) // 3
    weight = torch.randn(5, 37, 19) if is_transposed else torch.randn(5, 19, 37)
    bias = torch.randn(5, 19) if has_bias else None
    blocks = make_blocks(virtual_keys(None, experts, 5, 1), 5, 5)
    view = weight.transpose(1, 2) if is_transposed else weight
    y = grouped_gemm(x, x_rows, view, bias, blocks)
    expected = reference.grouped_gemm(x, x_rows, weight, bias, experts, is_transposed)
    local = (experts >= 0) & (experts < 5)
    assert relative_error(y[local], expected[local]) < 1e-6


@pytest.mark.parametrize("has_weights", [False, True])
def test_combine(has_weights: bool) -> None:
    torch.manual_seed(0)
    experts = torch.randint(-1, 6, (12,))
    y, weights = torch.randn(12, 19), torch.rand(4, 3) if has_weights else None
    y[(experts < 0) | (experts >= 5)] = float("nan")
    out = combine_file.combine(y, experts, weights, 5, 3)
    expected = combine_file.reference_combine(y, experts, weights, 5, 3)
    assert relative_error(out, expected) < 1e-6
    assert torch.equal(bits(out), bits(combine_file.combine(y, experts, weights, 5, 3)))


def test_block_sizes_follow_the_rows_of_a_key() -> None:
    assert choose_block_m(128, 32768) == 16
    assert choose_block_m(4096, 128) == 32
    assert choose_block_m(32768, 128) == 64


def test_evenly_spaced_slices_are_one_launch() -> None:
    assert len(slice_runs((OutputSlice(0, 8), OutputSlice(8, 8)))) == 1
    assert len(slice_runs((OutputSlice(0, 8, 2), OutputSlice(1, 8, 2)))) == 1
    assert len(slice_runs((OutputSlice(0, 8), OutputSlice(8, 4)))) == 2
