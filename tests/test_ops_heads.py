"""Deltas of latent attention's expanding Linear, head by head, against float64.

On a machine with a GPU the Triton kernel runs there; else in its interpreter, which cannot multiply
bfloat16.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from helpers_lora import TOLERANCE, SlotSpec, bits, make_site, make_table, relative_error

from vexpert.kernels.dense_factors import HeadColumns
from vexpert.kernels.head_lora import MOST_BY_RUN
from vexpert.ops.backend import select_backend
from vexpert.ops.reference import reference_head_delta
from vexpert.ops.types import LoraSite, PackedLora, SiteTable

HAS_GPU = torch.cuda.is_available()
CPU = ("torch", "numba")
INTERPRETED = pytest.param(
    "triton", marks=pytest.mark.skipif(HAS_GPU, reason="the case on a GPU runs it")
)
ON_GPU = pytest.param("triton on a GPU", marks=pytest.mark.gpu)
# ranks of the slots, None: an empty slot, 0: an adapter without this site; 70 is two steps of 64
RANKS: tuple[int | None, ...] = (3, None, 16, 0, 70, 1)
SIZES = [
    (HeadColumns(3, 12, 10), 24),
    (HeadColumns(4, 16, 32), 40),
    (HeadColumns(1, 5, 7), 9),
    (HeadColumns(2, 64, 130), 144),  # more columns than one tile has
]
SLOTS = {
    "mixed": [4, -1, 0, 2, 3, 0, 4, -1, 5, 2, 2, 0, 0, -1],
    "one row": [2],
    "one base row": [-1],
    "base alone": [-1, -1, -1],
    "no factors": [3, 3],
    "long runs": [0] * 19 + [2] * 33 + [-1] * 4 + [0] * 2,
    "tiles": [(7 * i) % 5 - 1 for i in range(MOST_BY_RUN + 9)],
    "a tile of base rows": [-1] * 200 + [4] * 101,
}


@dataclass(frozen=True)
class Case:
    """Inputs of one call; the reference reads nothing else."""

    site: LoraSite
    table: SiteTable
    columns: HeadColumns
    slots: torch.Tensor  # [T] int64
    of_keys: bool
    x: torch.Tensor  # [T, H, *]

    def reference(self) -> torch.Tensor:
        given = self.x, self.site, self.table, self.slots, self.columns, self.of_keys
        return reference_head_delta(*given)


def make_case(
    of_keys: bool,
    slots: str = "mixed",
    size: tuple[HeadColumns, int] = SIZES[0],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    """x is a part of wider rows that lie head by head, as queries come."""
    columns, latents = size
    site = make_site(1, latents, columns.heads * columns.width, max_lora_rank=70)
    specs = [None if rank is None else SlotSpec((rank,)) for rank in RANKS]
    table = make_table(site, specs, dtype, device)
    width = columns.key if of_keys else latents
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(columns.heads, len(SLOTS[slots]), width + 3, generator=generator)
    x = wide.to(device, dtype).transpose(0, 1)[..., :width]
    return Case(site, table, columns, torch.tensor(SLOTS[slots], device=device), of_keys, x)


def device_of(path: str) -> str:
    return "cuda" if path == "triton on a GPU" else "cpu"


def run(path: str, case: Case, y: torch.Tensor) -> None:
    backend = select_backend(path.split()[0], y.device, y.dtype)
    routing = backend.route(case.slots, None, 1, len(RANKS))
    active = tuple(sorted({slot for slot in case.slots.tolist() if slot >= 0}))
    lora = PackedLora((case.site,), (case.table,), routing, active)
    backend.add_by_head(case.x, y, lora, case.columns, case.of_keys)


def zeros_for(case: Case) -> torch.Tensor:
    """A result's place among the columns of larger rows."""
    width = case.site.in_features if case.of_keys else case.columns.value
    rows, heads = case.x.shape[:2]
    return case.x.new_zeros(rows, heads, width + 2)[..., 1:-1]


def error(path: str, case: Case) -> float:
    y = zeros_for(case)
    run(path, case, y)
    return relative_error(y, case.reference())


@pytest.mark.parametrize("of_keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("path", [*CPU, INTERPRETED, ON_GPU])
@pytest.mark.parametrize("slots", SLOTS)
def test_rows_of_any_adapters(slots: str, path: str, of_keys: bool) -> None:
    case = make_case(of_keys, slots, device=device_of(path))
    assert error(path, case) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("of_keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("path", [*CPU, INTERPRETED, ON_GPU])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size: tuple[HeadColumns, int], path: str, of_keys: bool) -> None:
    case = make_case(of_keys, size=size, device=device_of(path))
    assert error(path, case) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("of_keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize(
    ("path", "dtype"),
    [
        ("torch", torch.bfloat16),
        ("torch", torch.float16),
        pytest.param("triton", torch.float16, marks=INTERPRETED.marks),
        pytest.param("triton on a GPU", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("triton on a GPU", torch.float16, marks=pytest.mark.gpu),
    ],
)
def test_half_precision(path: str, dtype: torch.dtype, of_keys: bool) -> None:
    case = make_case(of_keys, size=SIZES[3], dtype=dtype, device=device_of(path))
    assert error(path, case) < TOLERANCE[dtype]


@pytest.mark.parametrize("path", [*CPU, INTERPRETED, ON_GPU])
@pytest.mark.parametrize("slots", ["mixed", "tiles"])
def test_other_rows_and_columns_are_untouched(slots: str, path: str) -> None:
    """-0.0 and NaN too, bit for bit."""
    case = make_case(False, slots, device=device_of(path))
    place = zeros_for(case)
    larger = place._base
    assert larger is not None
    larger[...] = -0.0
    ranks = torch.tensor([rank or 0 for rank in RANKS], device=case.slots.device)
    idle = (case.slots < 0) | (ranks[case.slots] == 0)
    larger[idle, :, 3] = float("nan")
    before = larger.clone()
    run(path, case, place)
    after = larger.clone()
    assert relative_error(place[~idle], case.reference()[~idle]) < 1e-5
    after[~idle, :, 1:-1] = before[~idle, :, 1:-1]
    assert torch.equal(bits(after), bits(before))


@pytest.mark.parametrize("path", ["torch", INTERPRETED])
@pytest.mark.parametrize("of_keys", [True, False], ids=["keys", "values"])
def test_a_wrong_slot_or_head_is_seen(of_keys: bool, path: str) -> None:
    case = make_case(of_keys)
    for wrong in (
        replace(case, slots=torch.where(case.slots == 2, 0, case.slots)),
        replace(case, x=case.x.roll(1, 1)),  # rows of the head before
    ):
        y = zeros_for(case)
        run(path, wrong, y)
        assert relative_error(y, case.reference()) > 1e-2
