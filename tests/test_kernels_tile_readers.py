"""Prompts whose adapters' last product is left to tiles of the kernel that reads their output."""

from dataclasses import replace

import pytest
import torch
from helpers_dense import Packed, make_packed
from helpers_lora import relative_error

from vexpert.kernels.dense_factors import DenseDelta, ReaderTile
from vexpert.kernels.dense_order import order_rows
from vexpert.kernels.dense_shrink import DenseShrink
from vexpert.kernels.dense_tiles import DenseTile
from vexpert.kernels.norms import Norm
from vexpert.kernels.rope_arguments import Heads, Rope
from vexpert.kernels.rope_tiles import can_tile, rope_tiles
from vexpert.kernels.rope_write import reference_rotate, rope_write
from vexpert.ops import packed_linear as layer
from vexpert.ops.dense_plan import DensePlan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")

WIDTH, HEADS, KV_HEADS = 16, 2, 1
SIZES = (HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH)
PLAN = DensePlan(None, DenseShrink(False, 16, 16, 2, 16), DenseTile(16, 16))
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "MOST_DEFERRED", 0)


def slots_of_step() -> torch.Tensor:
    """Decode rows of mixed adapters, then two prompts, base rows, and a prompt's last chunk."""
    decodes = torch.tensor([3, -1, 5])
    lengths = torch.tensor([17, 9, 4, 2])
    return torch.cat([decodes, torch.tensor([4, 1, -1, 0]).repeat_interleave(lengths)])


def make_step(rank: int, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Packed:
    slots = slots_of_step()
    case = make_packed(len(slots), 16, sizes, max_rank=rank, bias=True, dtype=dtype)
    return replace(case, slots=slots)


def deferred(case: Packed, tile: ReaderTile) -> tuple[torch.Tensor, DenseDelta]:
    order = order_rows(case.slots, case.num_slots)
    plan = replace(PLAN, reader=tile)
    given = case.x, case.weight, case.bias, case.lora(), order, plan
    y, rest = layer.deferred_linear(*given, tiles=True)
    assert rest is not None
    assert rest.tile == tile
    return y, rest


def test_without_tiles_it_is_added_at_once() -> None:
    """So it is of ranks above the plan's bound."""
    case = make_step(16, (32,))
    order = order_rows(case.slots, case.num_slots)
    given = case.x, case.weight, case.bias, case.lora(), order
    for most_rank, tiles in ((64, False), (15, True)):
        plan = replace(PLAN, reader=ReaderTile(16, most_rank=most_rank))
        y, rest = layer.deferred_linear(*given, plan, tiles)
        assert rest is None
        assert relative_error(y, case.reference(True)) < 1e-5


def norm_of(width: int) -> Norm:
    return Norm(torch.rand(width) + 0.5, width, 1e-5, "rounded")


ROPES = [
    (Rope(WIDTH), True, 16, ReaderTile(16, heads=2)),
    (Rope(8), True, 5, ReaderTile(32, heads=1)),
    (Rope(WIDTH, interleaved=True), False, 70, ReaderTile(32, heads=4, most_rank=128)),
    (Rope(0), True, 3, ReaderTile(16, heads=2)),
]


def angles_of(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.linspace(0, 6, len(given) * WIDTH).view(-1, WIDTH)
    return angles.cos().to(given.dtype), angles.sin().to(given.dtype)


def rotate(
    given: torch.Tensor, how: tuple[Heads, Rope], rows: torch.Tensor, rest: DenseDelta
) -> Outputs:
    """Queries, and the cache after it."""
    cache = [torch.zeros(90, KV_HEADS, WIDTH, dtype=given.dtype) for _ in range(2)]
    both = cache[0], cache[1]
    q, k, v = given.split(SIZES, 1)
    all_of_it = q, k, v, *how, angles_of(given), rows, both
    if rest.tile is None:
        return rope_write(*all_of_it, rest=rest), *both
    return rope_tiles(*all_of_it, rest), *both


def expected(given: torch.Tensor, how: tuple[Heads, Rope], rows: torch.Tensor) -> Outputs:
    """The same in PyTorch, without LoRA."""
    heads, rope = how
    q, k, v = (part.view(len(given), -1, WIDTH) for part in given.float().split(SIZES, 1))
    angles = angles_of(given)
    cache = [torch.zeros(90, KV_HEADS, WIDTH) for _ in range(2)]
    there = rows >= 0
    cache[0][rows[there]] = reference_rotate(k, heads.k_norm, rope, angles)[there]
    cache[1][rows[there]] = v[there]
    return reference_rotate(q, heads.q_norm, rope, angles), cache[0], cache[1]


@pytest.mark.parametrize(("rope", "has_norm", "rank", "tile"), ROPES)
def test_heads(rope: Rope, has_norm: bool, rank: int, tile: ReaderTile) -> None:
    case = make_step(rank, SIZES)
    y, rest = deferred(case, tile)
    norms = (norm_of(WIDTH), norm_of(WIDTH)) if has_norm else (None, None)
    how = Heads(HEADS, KV_HEADS, WIDTH, *norms), rope
    rows = torch.randperm(90)[: len(y)]
    rows[7] = -1  # a token without a place
    got = rotate(y, how, rows, rest)
    whole, alone = (expected(made, how, rows) for made in (case.reference(True), y))
    for ours, want, without in zip(got, whole, alone, strict=True):
        assert relative_error(ours, want) < 1e-5
        assert relative_error(without, want) > 1e-2


def test_norms_of_all_heads_are_not_tiled() -> None:
    heads = Heads(HEADS, KV_HEADS, WIDTH, norm_of(HEADS * WIDTH), norm_of(KV_HEADS * WIDTH))
    assert not can_tile(heads)


def test_float16_rounds_as_row_by_row() -> None:
    case = make_step(16, SIZES, torch.float16)
    y, rest = deferred(case, ReaderTile(16, heads=2))
    how = Heads(HEADS, KV_HEADS, WIDTH), Rope(0)
    places = torch.arange(len(y))
    got, want = (rotate(y, how, places, given) for given in (rest, replace(rest, tile=None)))
    for ours, theirs in zip(got, want, strict=True):
        assert (ours != theirs).double().mean() < 0.01  # sums in another order
        assert relative_error(ours.float(), theirs.float()) < 1e-3


def test_what_is_not_finite_stays_with_its_rows() -> None:
    case = make_step(16, SIZES)
    y, rest = deferred(case, ReaderTile(16))
    table, how = case.tables[0], (Heads(HEADS, KV_HEADS, WIDTH), Rope(0))
    want = rotate(y, how, torch.arange(len(y)), rest)[0]
    broken = 4
    table.arena[int(table.b_offset[0, broken]) :][: SIZES[0]] = float("nan")
    rest.h[:, case.slots < 0] = float("nan")  # rows that nobody wrote
    got = rotate(y, how, torch.arange(len(y)), rest)[0]
    mine = case.slots == broken
    assert got[mine].isnan().all()
    assert torch.equal(got[~mine], want[~mine])


def test_faults_are_seen() -> None:
    """A neighbour's adapter, and A of another scale."""
    case, how = make_step(16, SIZES), (Heads(HEADS, KV_HEADS, WIDTH), Rope(0))

    def out(given: Packed) -> torch.Tensor:
        y, rest = deferred(given, ReaderTile(16, heads=2))
        return rotate(y, how, torch.arange(len(y)), rest)[0].flatten(1)

    want = case.reference(True)[:, : case.sizes[0]]
    assert relative_error(out(case), want) < 1e-5
    neighbours = torch.where(case.slots < 0, case.slots, (case.slots + 1) % case.num_slots)
    assert relative_error(out(replace(case, slots=neighbours)), want) > 1e-2
    case.tables[0].arena.mul_(0.9)
    assert relative_error(out(case), want) > 1e-2
