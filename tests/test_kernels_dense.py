"""The kernels of packed dense layers under many plans, against the reference, row by row."""

from dataclasses import replace

import pytest
import torch
from helpers_dense import Packed, make_packed
from helpers_lora import TOLERANCE, relative_error

from vexpert.kernels.dense_order import order_rows, reference_order
from vexpert.kernels.dense_shrink import DenseShrink
from vexpert.kernels.dense_tiles import DenseTile
from vexpert.ops.dense_plan import DensePlan, DenseShape, choose_dense_plan
from vexpert.ops.packed_linear import add_dense, find_factors, packed_linear
from vexpert.ops.types import PackedLora

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_dense_gpu.py does this")

RUNS = DenseShrink(True, 16, 16, 2, 16)
CHUNKS = DenseShrink(False, 32, 64, 1, 32)
PLANS = {
    "rows": DensePlan(DenseTile(16, 16, 32), RUNS, DenseTile(16, 16)),
    "groups": DensePlan(DenseTile(16, 32, 16, group=4), RUNS, DenseTile(16, 32, group=2)),
    "chunks": DensePlan(DenseTile(32, 16, 64, group=2), CHUNKS, DenseTile(32, 32, group=8)),
    "library": DensePlan(None, CHUNKS, DenseTile(64, 32)),
    "wide": DensePlan(None, CHUNKS, DenseTile(32, 16, num_stages=2, steps=2)),
    "inner": DensePlan(DenseTile(32, 16, 32, group=2), RUNS, DenseTile(16, 16), inner=True),
    "inner-wide": DensePlan(
        DenseTile(32, 32, 16), DenseShrink(True, 16, 32, 1, 32), DenseTile(16, 16), inner=True
    ),
    "runs": DensePlan(None, RUNS, DenseTile(16, 32, by_run=True)),
}


def run(case: Packed, plan: DensePlan, lora: PackedLora | None) -> torch.Tensor:
    order = order_rows(case.slots, case.num_slots)
    return packed_linear(case.x, case.weight, case.bias, lora, order, plan)


def assert_layer(case: Packed, plan: DensePlan) -> None:
    alone, out = run(case, plan, None), run(case, plan, case.lora())
    bound = TOLERANCE[case.x.dtype]
    assert relative_error(alone, case.reference(False)) < bound
    assert relative_error(out, case.reference(True)) < bound
    assert torch.equal(out[case.slots < 0], alone[case.slots < 0])
    assert not any(int(table.arrivals) for table in case.tables)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("rows", [1, 2, 21])
def test_plans(name: str, rows: int) -> None:
    plan = PLANS[name]
    if rows == 1 and not plan.shrink.by_run:
        plan = replace(plan, shrink=RUNS)
    assert_layer(make_packed(rows, 48, (48, 16, 24), bias=rows % 2 == 0), plan)


def test_many_rows() -> None:
    assert_layer(make_packed(200, 32, (32, 16)), PLANS["library"])
    assert_layer(make_packed(200, 32, (32, 16)), replace(PLANS["chunks"], shrink=CHUNKS))


@pytest.mark.parametrize("name", PLANS)
def test_odd_sizes_and_strides(name: str) -> None:
    """Nothing is a multiple of anything; x and the weight lie in other orders."""
    case = make_packed(9, depth=37, sizes=(21, 5, 18), bias=True, spread=True)
    assert_layer(case, PLANS[name])
    assert_layer(replace(case, x=case.x.t().contiguous().t()), PLANS[name])
    assert_layer(replace(case, weight=case.weight.t().contiguous().t()), PLANS[name])


@pytest.mark.parametrize("name", ["groups", "chunks", "wide", "runs"])
@pytest.mark.parametrize("rank", [40, 64, 130])
def test_ranks(name: str, rank: int) -> None:
    assert_layer(make_packed(5, 32, (32, 16), max_rank=rank), PLANS[name])


@pytest.mark.parametrize("name", ["groups", "runs"])
def test_float16(name: str) -> None:
    assert_layer(make_packed(9, 32, (32, 16), dtype=torch.float16), PLANS[name])


@pytest.mark.parametrize("name", ["groups", "wide", "runs"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_no_base_row_or_only_such(name: str, share: float) -> None:
    assert_layer(make_packed(6, 32, (32, 16), base_share=share), PLANS[name])


@pytest.mark.parametrize("name", PLANS)
def test_faults_are_seen(name: str) -> None:
    """A neighbour's adapter, a lost site, B without its scale."""
    case, bound = make_packed(6, 32, (16, 8)), 1e-3
    expected = case.reference(True)
    wrong_slots = replace(case, slots=(case.slots + 1) % case.num_slots)
    assert relative_error(run(wrong_slots, PLANS[name], wrong_slots.lora()), expected) > bound
    lost = make_packed(6, 32, (16, 8))
    lost.tables[1].packed.zero_()
    assert relative_error(run(lost, PLANS[name], lost.lora()), expected) > bound
    scaled = make_packed(6, 32, (16, 8))
    scaled.tables[0].arena.mul_(0.5)
    assert relative_error(run(scaled, PLANS[name], scaled.lora()), expected) > bound


def test_tables_that_are_not_evenly_spaced_go_one_by_one() -> None:
    case = make_packed(4, 32, (16, 8, 16))
    apart = [replace(table, packed=table.packed.clone()) for table in case.tables]
    lora = replace(case.lora(), tables=tuple(apart))
    assert len(find_factors(case.lora())) == 1
    assert len(find_factors(lora)) == 3
    for plan in PLANS.values():
        assert relative_error(run(case, plan, lora), case.reference(True)) < 1e-5


def test_delta_alone_changes_no_other_row_or_column() -> None:
    case = make_packed(14, 32, (16, 8, 16))
    wide = torch.randn(14, sum(case.sizes) + 8)
    wide[:, ::3] = -0.0
    before = wide.clone()
    y = wide[:, 4 : 4 + sum(case.sizes)]
    order = order_rows(case.slots, case.num_slots)
    add_dense(case.x, y, find_factors(case.lora()), order, PLANS["rows"])
    delta = case.reference(True) - case.reference(False)
    assert relative_error(y - before[:, 4:-4], delta) < 1e-5
    still = delta == 0
    assert torch.equal(torch.signbit(y[still]), torch.signbit(before[:, 4:-4][still]))
    assert torch.equal(wide[:, :4], before[:, :4])
    assert torch.equal(wide[:, -4:], before[:, -4:])


@pytest.mark.parametrize(("rows", "slots"), [(2, 1), (40, 3), (300, 20), (1100, 5)])
def test_order(rows: int, slots: int) -> None:
    torch.manual_seed(rows)
    given = torch.randint(-1, slots, (rows,))
    given[given == 1] = -7  # base too; and a slot without rows
    order = order_rows(given, slots)
    expected, runs = reference_order(given.tolist())
    assert order.row.tolist() == expected
    assert order.slot.tolist() == [max(int(given[row]), -1) for row in expected]
    assert order.row_run.tolist() == [
        runs.index(slot) if slot >= 0 else -1 for slot in given.tolist()
    ]
    assert order.run_slot.tolist() == runs + [-1] * (len(order.run_slot) - len(runs))
    active = int((given >= 0).sum())
    assert order.counts.tolist() == [active, len(runs)]
    for position in range(active):
        slot = int(order.slot[position])
        assert runs[int(order.run[position])] == slot
        its = [p for p in range(active) if int(order.slot[p]) == slot]
        assert (int(order.run_start[position]), int(order.run_end[position])) == (
            its[0],
            its[-1] + 1,
        )
        if position > 40:
            break


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_rows_has_a_plan(dtype: torch.dtype) -> None:
    for rows in (0, 1, 2, 7, 64, 129, 5000, 100_000):
        for columns in (8, 2048, 5120, 150_000):
            plans = [
                choose_dense_plan(DenseShape(rows, 2048, columns, dtype), adapters)
                for adapters in (0, 1, 8, 1000)
            ]
            assert all(plan.shrink.by_run or rows != 1 for plan in plans)
            products = {plan.linear and replace(plan.linear, group=1) for plan in plans[1:]}
            assert len(products) == 1  # a base row's result does not depend on the adapters


@pytest.mark.parametrize("rows", [1, 3])
def test_the_first_reader_of_an_order_is_an_ordinary_launch(rows: int) -> None:
    """A single row's slots too are written by a kernel of the step, which may still run."""
    order = order_rows(torch.zeros(rows, dtype=torch.int64), 2)
    assert [order.is_settled() for _ in range(3)] == [False, True, True]
