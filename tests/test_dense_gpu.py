"""Packed dense layers on a GPU: the plans as they are, every dtype, graphs whose slots change."""

from dataclasses import replace

import pytest
import torch
from helpers_dense import Packed, make_packed
from helpers_graphs import capture
from helpers_lora import TOLERANCE, bits, relative_error

from vexpert.kernels.common import can_use_pdl
from vexpert.kernels.dense_factors import DenseDelta
from vexpert.kernels.norms import Norm
from vexpert.kernels.rms_norm import add_rms_norm
from vexpert.kernels.rope_arguments import Heads, Rope
from vexpert.kernels.rope_tiles import rope_tiles
from vexpert.kernels.rope_write import rope_write
from vexpert.ops.backend import select_backend
from vexpert.ops.packed_linear import MOST_DEFERRED

pytestmark = pytest.mark.gpu
ROWS = (1, 2, 8, 16, 17, 32, 33, 100, 128, 200, 700, 3000)


def make(rows: int, dtype: torch.dtype, **options: object) -> Packed:
    given = {"depth": 512, "sizes": (256, 64, 48), "bias": rows % 2 == 0, "align": 8} | options
    return make_packed(rows, dtype=dtype, device="cuda", **given)  # type: ignore[arg-type]


def run(case: Packed, with_lora: bool) -> torch.Tensor:
    backend = select_backend("triton", "cuda", case.x.dtype)
    return backend.packed_linear(case.x, case.weight, case.bias, case.lora() if with_lora else None)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("rank", [16, 64, 100])
@pytest.mark.parametrize("rows", ROWS)
def test_equals_reference(rows: int, rank: int, dtype: torch.dtype) -> None:
    case = make(rows, dtype, max_rank=rank)
    base, out = run(case, False), run(case, True)
    assert relative_error(base, case.reference(False)) < TOLERANCE[dtype]
    assert relative_error(out, case.reference(True)) < TOLERANCE[dtype]
    idle = case.slots < 0
    lost = replace(case, slots=torch.full_like(case.slots, -1))
    if rows > 1:  # the same product, other adapters beside them; -0.0 equals 0.0
        assert torch.equal(out[idle], run(lost, True)[idle])
    other = replace(case, slots=(case.slots + 1) % case.num_slots)
    if rows > 1:  # a neighbour's adapter is seen
        assert relative_error(run(other, True), case.reference(True)) > 3 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_odd_sizes_and_strides(rows: int, dtype: torch.dtype) -> None:
    case = make(rows, dtype, depth=37, sizes=(21, 5, 50), align=1, spread=True)
    for given in (case, replace(case, weight=case.weight.t().contiguous().t())):
        assert relative_error(run(given, True), case.reference(True)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("rows", ROWS)
def test_a_norm_adds_what_is_left_to_it(rows: int, rank: int, dtype: torch.dtype) -> None:
    case = make(rows, dtype, sizes=(256,), max_rank=rank)
    backend = select_backend("triton", "cuda", dtype)
    y, rest = backend.deferred_linear(case.x, case.weight, case.bias, case.lora())
    assert (rest is None) == (rows > MOST_DEFERRED)
    norm, zero = Norm(None, 256, 1e-6, "plain"), torch.zeros_like(y)
    for pdl in (False, can_use_pdl(y.device)):
        total, _ = add_rms_norm(y, zero, norm, 1.0, pdl, rest)
        assert relative_error(total, case.reference(True)) < TOLERANCE[dtype]
        assert torch.equal(total[case.slots < 0], y[case.slots < 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [16, 64])
def test_a_rotation_adds_what_is_left_to_it(rank: int, dtype: torch.dtype) -> None:
    """Of q, k and v of more than 4,096 rows, as the packaged plans have it."""
    heads, rows, sizes = Heads(30, 5, 128), 4500, (30 * 128, 5 * 128, 5 * 128)
    case = make(rows, dtype, depth=128, sizes=sizes, max_rank=rank)
    backend, lora = select_backend("triton", "cuda", dtype), case.lora()
    y, rest = backend.deferred_linear(case.x, case.weight, case.bias, lora, tiles=True)
    assert rest is not None
    assert rest.tile is not None
    angles = torch.linspace(0, 6, rows * 128, device="cuda").view(rows, 128).to(dtype)
    given, places = (angles.cos(), angles.sin()), torch.arange(rows, device="cuda")

    def rotated(y: torch.Tensor, rest: DenseDelta | None) -> torch.Tensor:
        q, k, v = y.split(sizes, 1)
        cache = torch.zeros(2, rows, 5, 128, dtype=dtype, device="cuda")
        how = heads, Rope(128), given, places, (cache[0], cache[1])
        out = rope_write(q, k, v, *how) if rest is None else rope_tiles(q, k, v, *how, rest)
        return torch.cat([out.flatten(1), *(part.flatten(1) for part in cache)], 1)

    got, want = rotated(y, rest), rotated(case.reference(True).to(dtype), None)
    for ours, whole in zip(got.split(sizes, 1), want.split(sizes, 1), strict=True):
        assert relative_error(ours, whole) < 2 * TOLERANCE[dtype]
    assert relative_error(rotated(y, None), want) > 1e-2
    idle, nobody = case.slots < 0, replace(rest, slots=torch.full_like(case.slots, -1))
    assert torch.equal(got[idle], rotated(y, nobody)[idle])


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_no_launch_waits_for_another(rows: int) -> None:
    """Programs of a launch wait for others of it, thousands of times; counts end at zero."""
    case = make(rows, torch.bfloat16)
    first = run(case, True)
    for _ in range(3000):
        y = run(case, True)
    assert torch.equal(y, first)
    assert all(int(table.arrivals) == 0 for table in case.tables)


@pytest.mark.parametrize("rows", [1, 8, 32, 128, 1000])
def test_a_graph_follows_new_slots_tables_and_inputs(rows: int) -> None:
    """Nothing of the capture is remembered; replays are equal bit for bit."""
    case, dtype = make(rows, torch.bfloat16), torch.bfloat16
    graph, y = capture(lambda: run(case, True))
    for turn in range(1, 4):
        case.x.copy_(torch.randn_like(case.x))
        case.slots.copy_(torch.randint(-1, case.num_slots, (rows,), device="cuda"))
        if turn == 3:  # an adapter leaves its slot
            for table in case.tables:
                table.packed[:, 0] = 0
        graph.replay()
        first = y.clone()
        assert relative_error(first, case.reference(True)) < TOLERANCE[dtype]
        graph.replay()
        assert torch.equal(bits(first), bits(y))
