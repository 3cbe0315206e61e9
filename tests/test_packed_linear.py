"""Linears packed into one product: against dense rows, every way a step can ask for it."""

import pytest
import torch
from helpers_adapters import TargetBuilder, adapter, begin, canonical_delta
from torch import nn

from vexpert.errors import UnsupportedError
from vexpert.lora.layers import LoraLinear, LoraPackedLinear
from vexpert.lora.pack import pack
from vexpert.lora.pool import SlotPool
from vexpert.lora.site_extras import SiteExtra
from vexpert.lora.types import BatchView, LoraState, TargetMap
from vexpert.ops.backend import select_backend

CPU = torch.device("cpu")
DEPTH, SIZES = 24, {"q": 40, "k": 16, "v": 12}
SLOTS = [0, -1, 2, 1, 0, 2, -1, 0, 1, 3]
BACKENDS = ["torch", "numba", "triton"]


def make_targets() -> TargetMap:
    build = TargetBuilder()
    for path, size in SIZES.items():
        build.linear(path, DEPTH, size)
    return build.build()


TARGETS = make_targets()
ADAPTERS = [
    adapter(TARGETS, 0, 4),
    adapter(TARGETS, 1, 2, ("q", "v")),
    adapter(TARGETS, 2, 8, ("k",)),
    adapter(TARGETS, 3, 5),
]


class Served:
    """Three Linears with four adapters in slots 0 to 3, packed and as they were."""

    def __init__(self, backend: str, bias: bool = True, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        pool = SlotPool(TARGETS, 5, 1 << 20, CPU, dtype)
        for weights in ADAPTERS:
            pool.install(pack(weights, TARGETS, dtype))
        self.state = LoraState(tables=pool.tables)
        self.backend = select_backend(backend, CPU, dtype)
        linears = [nn.Linear(DEPTH, size, bias=bias).to(dtype) for size in SIZES.values()]
        self.weight = torch.cat([linear.weight.detach() for linear in linears])
        self.bias = torch.cat([linear.bias.detach() for linear in linears]) if bias else None
        self.linears = [
            LoraLinear.wrap(linear, TARGETS.targets[path], self.state, self.backend)  # type: ignore[arg-type]
            for path, linear in zip(SIZES, linears, strict=True)
        ]
        self.packed = LoraPackedLinear(self.linears, self.backend)  # type: ignore[arg-type]

    def base(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def expected(self, x: torch.Tensor, slots: list[int]) -> torch.Tensor:
        rows = self.base(x).double()
        for row, slot in enumerate(slots):
            if slot >= 0:
                rows[row] += torch.cat([delta_of(path, slot) @ x[row] for path in SIZES]).double()
        return rows


def delta_of(path: str, slot: int) -> torch.Tensor:
    site = TARGETS.targets[path].site  # type: ignore[union-attr]
    return canonical_delta(TARGETS, ADAPTERS[slot], site)[0]


def assert_rows(
    got: torch.Tensor, expected: torch.Tensor, base: torch.Tensor, slots: list[int]
) -> None:
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-5)
    idle = torch.tensor([slot < 0 for slot in slots])
    assert torch.equal(got[idle], base[idle])


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [True, False])
def test_mixed_batch(backend: str, bias: bool) -> None:
    served = Served(backend, bias)
    x = torch.randn(1, len(SLOTS), DEPTH)
    base = served.packed(x)
    assert base.shape == (1, len(SLOTS), 68)
    torch.testing.assert_close(base, served.base(x))
    begin(served.state, SLOTS)
    got = served.packed(x)
    expected = served.expected(x[0], SLOTS)
    assert_rows(got[0], expected, base[0], SLOTS)
    for part, own in zip(served.packed.parts(x), got.split(list(SIZES.values()), -1), strict=True):
        torch.testing.assert_close(part, own)
    wrong = served.expected(x[0], SLOTS[1:] + SLOTS[:1])
    with pytest.raises(AssertionError):  # a row that took its neighbour's adapter is seen
        assert_rows(got[0], wrong, base[0], SLOTS)


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["classic", "extra", "float64 input"])
def test_what_goes_site_by_site(backend: str, way: str) -> None:
    """The classic path, extras of one site, and inputs in another dtype than the arena's."""
    served = Served(backend)
    x = torch.randn(len(SLOTS), DEPTH)
    base = served.packed(x)
    view = begin(served.state, SLOTS)
    expected = served.expected(x, SLOTS)
    if way == "classic":
        view = BatchView(view.slots, view.logit_slots, view.active_slots, False)
        served.state.set_view(view)
    elif way == "extra":
        gain = torch.rand(1, SIZES["k"]) + 0.5
        served.state.extras = {TARGETS.targets["k"].site.index: [(3, SiteExtra(gain=gain))]}  # type: ignore[union-attr]
        expected[SLOTS.index(3), 40:56] *= gain[0]
    else:
        served.packed.weight, x = served.packed.weight.double(), x.double()
        assert served.packed.bias is not None
        served.packed.bias = served.packed.bias.double()
        base = served.packed.backend.packed_linear(
            x, served.packed.weight, served.packed.bias, None
        )
    assert_rows(served.packed(x), expected, base, SLOTS)


@torch.no_grad()
def test_parameters_become_views_under_their_names() -> None:
    served = Served("torch")
    start = 0
    for linear, size in zip(served.linears, SIZES.values(), strict=True):
        assert list(linear.state_dict()) == ["weight", "bias"]
        assert isinstance(linear.weight, nn.Parameter)
        assert linear.weight.data_ptr() == served.packed.weight[start].data_ptr()
        assert torch.equal(linear.weight, served.weight[start : start + size])
        start += size
    assert not list(served.packed.parameters())
    assert not list(served.packed.modules())[1:]
    x = torch.randn(3, DEPTH)
    begin(served.state, [0, 3, -1])
    both = torch.cat([linear(x) for linear in served.linears], 1)
    torch.testing.assert_close(served.packed(x), both)


@torch.no_grad()
def test_without_lora_plain_linears_are_packed() -> None:
    linears = [nn.Linear(DEPTH, size, bias=False) for size in (8, 16)]
    x = torch.randn(5, DEPTH)
    expected = torch.cat([linear(x) for linear in linears], 1)
    packed = LoraPackedLinear(linears, select_backend("torch", CPU, torch.float32))
    torch.testing.assert_close(packed(x), expected)


@pytest.mark.parametrize(
    ("linears", "reason"),
    [
        ([nn.Linear(8, 4), nn.Linear(9, 4)], "different sizes"),
        ([nn.Linear(8, 4), nn.Linear(8, 4, bias=False)], "bias"),
        ([nn.Linear(8, 4), nn.Linear(8, 4, dtype=torch.float64)], "dtype"),
        ([nn.Linear(8, 4), nn.Bilinear(8, 8, 4)], "more than a Linear"),
    ],
)
def test_what_cannot_be_packed_is_refused(linears: list[nn.Linear], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        LoraPackedLinear(linears, select_backend("torch", CPU, torch.float32))


def test_linears_with_and_without_adapters_are_refused() -> None:
    served = Served("torch")
    with pytest.raises(UnsupportedError, match="targets of adapters"):
        LoraPackedLinear([served.linears[0], nn.Linear(DEPTH, 4)], served.backend)  # type: ignore[list-item]
