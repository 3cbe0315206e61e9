"""Dense layers whose adapters' last product is left to the kernel that reads their output."""

from dataclasses import replace

import pytest
import torch
from helpers_dense import Packed, make_packed
from helpers_lora import relative_error

from vexpert.kernels.dense_factors import DenseDelta
from vexpert.kernels.dense_order import order_rows
from vexpert.kernels.dense_shrink import DenseShrink
from vexpert.kernels.dense_tiles import DenseTile
from vexpert.kernels.norm_router import Router, Scratch, norm_router
from vexpert.kernels.norms import Norm
from vexpert.kernels.rms_norm import add_rms_norm
from vexpert.kernels.rope_arguments import Heads, Rope
from vexpert.kernels.rope_write import rope_write
from vexpert.kernels.router_topk import Choice
from vexpert.ops.dense_plan import DensePlan
from vexpert.ops.packed_linear import deferred_linear, packed_linear

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")

SHRINK = DenseShrink(True, 16, 16, 2, 16)
EXPAND = DenseTile(16, 16)
PLANS = {
    "few": DensePlan(None, SHRINK, EXPAND, few_rows=7),
    "inner": DensePlan(DenseTile(32, 16, 32), SHRINK, EXPAND, inner=True),
    "library": DensePlan(None, SHRINK, EXPAND),
}
WIDTH, HEADS, KV_HEADS = 16, 3, 1
SIZES = (HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH)


def deferred(case: Packed, name: str) -> tuple[torch.Tensor, DenseDelta]:
    order = order_rows(case.slots, case.num_slots)
    y, rest = deferred_linear(case.x, case.weight, case.bias, case.lora(), order, PLANS[name])
    assert rest is not None
    assert relative_error(y, case.reference(False)) < 1e-5
    return y, rest


def heads_of(kind: str) -> Heads:
    def norm(heads: int) -> Norm | None:
        width = {"none": 0, "head": WIDTH, "all": heads * WIDTH}[kind]
        return Norm(torch.rand(width) + 0.5, width, 1e-5, "rounded") if width else None

    return Heads(HEADS, KV_HEADS, WIDTH, norm(HEADS), norm(KV_HEADS))


ROPES = [
    (Rope(WIDTH), "head", 16),
    (Rope(8), "all", 5),
    (Rope(WIDTH, interleaved=True), "none", 70),
    (Rope(0), "none", 3),
]
# Every plan with two of them.
CASES = [(name, *ROPES[(i + j) % len(ROPES)]) for i, name in enumerate(PLANS) for j in (0, 2)]


@pytest.mark.parametrize(("name", "rope", "kind", "rank"), CASES)
def test_heads(name: str, rope: Rope, kind: str, rank: int) -> None:
    case = make_packed(7, 32, SIZES, max_rank=rank, bias=True)
    y, rest = deferred(case, name)
    heads, angles, rows = heads_of(kind), torch.rand(7, WIDTH) * 6, torch.randperm(20)[:7]

    def rotate(given: torch.Tensor, left: DenseDelta | None) -> tuple[torch.Tensor, ...]:
        cache = torch.zeros(20, KV_HEADS, WIDTH), torch.zeros(20, KV_HEADS, WIDTH)
        q, k, v = given.split(SIZES, 1)
        how = heads, rope, (angles.cos(), angles.sin()), rows, cache
        return rope_write(q, k, v, *how, rest=left), *cache

    got, alone = rotate(y, rest), rotate(y, None)
    for ours, want in zip(got, rotate(case.reference(True), None), strict=True):
        assert relative_error(ours, want) < 1e-5
    assert relative_error(alone[0], got[0]) > 1e-2
    idle = case.slots < 0
    assert torch.equal(got[0][idle], alone[0][idle])
    assert torch.equal(got[1][rows[idle]], alone[1][rows[idle]])


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("rank", [5, 40])
def test_norms(name: str, rank: int) -> None:
    case = make_packed(7, 37, (48,), max_rank=rank, bias=True)
    y, rest = deferred(case, name)
    whole = case.reference(True).float()
    norm, residual = Norm(torch.rand(48) + 0.5, 48, 1e-5, "rounded"), torch.randn(7, 48)
    want = add_rms_norm(whole, residual, norm)
    got = add_rms_norm(y, residual, norm, rest=rest)
    alone = add_rms_norm(y, residual, norm)
    choice = Choice("softmax", 2)
    router = Router(torch.randn(8, 48), None, choice, None, False, torch.float32)
    scratch = Scratch.empty(8, torch.device("cpu"))
    routed = norm_router(y, residual, norm, 1.0, router, scratch, rest=rest)
    expected = norm_router(whole, residual, norm, 1.0, router, scratch)
    for ours, without, reference in zip(got, alone, want, strict=True):
        assert relative_error(ours, reference) < 1e-5
        assert relative_error(without, reference) > 1e-2
        assert torch.equal(ours[case.slots < 0], without[case.slots < 0])
    for ours, reference in zip(routed, expected, strict=True):
        assert relative_error(ours.float(), reference.float()) < 1e-5


@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_without_adapters(rows: int) -> None:
    case, plan = make_packed(rows, 37, (32, 16, 8), bias=rows == 3), PLANS["few"]
    y = packed_linear(case.x, case.weight, case.bias, None, None, plan)
    assert relative_error(y, case.reference(False)) < 1e-5


@pytest.mark.parametrize("name", PLANS)
def test_faults_are_seen(name: str) -> None:
    """A neighbour's adapter, and A of another scale."""
    case = make_packed(6, 32, (48,), base_share=0.0)
    norm, residual = Norm(None, 48, 1e-5, "plain"), torch.zeros(6, 48)

    def out(given: Packed) -> torch.Tensor:
        y, rest = deferred(given, name)
        return add_rms_norm(y, residual, norm, rest=rest)[0]

    want = case.reference(True)
    assert relative_error(out(case), want) < 1e-5
    neighbours = replace(case, slots=(case.slots + 1) % case.num_slots)
    assert relative_error(out(neighbours), want) > 1e-2
    case.tables[0].arena.mul_(0.9)
    assert relative_error(out(case), want) > 1e-2
