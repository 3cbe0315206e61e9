"""LoRA-aware layers against dense per-row references; base rows bit for bit; no view, no work."""

from collections.abc import Callable

import pytest
import torch
from helpers_adapters import (
    EXPERTS,
    HIDDEN,
    INNER,
    VOCAB,
    CountingBackend,
    adapter,
    begin,
    canonical_delta,
    tiny_targets,
)
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from vexpert.errors import UnsupportedError
from vexpert.lora.layers import LoraEmbedding, LoraLinear, LoraLmHead, experts_hooks
from vexpert.lora.pack import pack
from vexpert.lora.pool import SlotPool
from vexpert.lora.types import EmbeddingTarget, ExpertsTarget, LinearTarget, LoraState
from vexpert.moe.runner import MoeRunner
from vexpert.moe.types import ExpertWeights, PairRows
from vexpert.ops.types import LoraSite

CPU = torch.device("cpu")
TARGETS = tiny_targets()
ADAPTERS = [
    adapter(TARGETS, 0, 4, kind="fused"),
    adapter(TARGETS, 1, 2, ("experts", "alternating", "ungated"), "gate_up"),
    adapter(TARGETS, 2, 8, ("q", "embed", "head", "experts"), "down"),
]
SLOTS = [0, -1, 2, 1, 0, 2, -1, 0]


class Served:
    """A state with three adapters in slots 0, 1, 2 and a counting backend."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        pool = SlotPool(TARGETS, 4, 1 << 20, CPU, dtype)
        for weights in ADAPTERS:
            pool.install(pack(weights, TARGETS, dtype))
        self.state = LoraState(tables=pool.tables)
        self.backend = CountingBackend()

    def linear(self, bias: bool = True) -> tuple[nn.Linear, nn.Module]:
        torch.manual_seed(0)
        base, target = nn.Linear(HIDDEN, 24, bias=bias), TARGETS.targets["q"]
        assert isinstance(target, LinearTarget)
        return base, LoraLinear.wrap(base, target, self.state, self.backend)


def delta_of(site: LoraSite, slot: int, expert: int = 0) -> torch.Tensor:
    return canonical_delta(TARGETS, ADAPTERS[slot], site)[expert]


def add_rows(
    y: torch.Tensor, x: torch.Tensor, site: LoraSite, slots: list[int], experts: list[int]
) -> torch.Tensor:
    """The reference: row by row, dense."""
    rows = y.clone()
    for row, (slot, expert) in enumerate(zip(slots, experts, strict=True)):
        if slot >= 0 and 0 <= expert < site.num_experts:
            rows[row] += delta_of(site, slot, expert) @ x[row]
    return rows


def assert_mixed(got: torch.Tensor, expected: torch.Tensor, base: torch.Tensor) -> None:
    """Close to the reference; rows of base exactly as without LoRA; others really changed."""
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    rows = torch.tensor([slot < 0 for slot in SLOTS])
    assert torch.equal(got[rows], base[rows])
    assert (got[~rows] - base[~rows]).abs().amax() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("shape", [(8, HIDDEN), (1, 8, HIDDEN), (2, 4, HIDDEN)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_mixed_batch(shape: tuple[int, ...], bias: bool) -> None:
    served = Served()
    base, layer = served.linear(bias)
    begin(served.state, SLOTS)
    x = torch.randn(shape)
    y, rows = base(x), x.reshape(8, HIDDEN)
    site = TARGETS.targets["q"].site  # type: ignore[union-attr]
    expected = add_rows(y.reshape(8, 24), rows, site, SLOTS, [0] * 8)
    got = layer(x)
    assert got.shape == y.shape
    assert_mixed(got.reshape(8, 24), expected, y.reshape(8, 24))
    wrong = add_rows(y.reshape(8, 24), rows, site, SLOTS[1:] + SLOTS[:1], [0] * 8)
    with pytest.raises(AssertionError):  # a row that took its neighbour's adapter is seen
        assert_mixed(got.reshape(8, 24), wrong, y.reshape(8, 24))


@torch.no_grad()
def test_linear_reads_rows_that_are_not_contiguous() -> None:
    served = Served()
    base, layer = served.linear()
    begin(served.state, SLOTS)
    x = torch.randn(HIDDEN, 8).t()
    site = TARGETS.targets["q"].site  # type: ignore[union-attr]
    assert_mixed(layer(x), add_rows(base(x), x, site, SLOTS, [0] * 8), base(x))


def test_linear_keeps_the_modules_parameters() -> None:
    base, layer = Served().linear()
    assert isinstance(layer, nn.Linear)
    assert layer.weight is base.weight
    assert layer.bias is base.bias
    assert (layer.in_features, layer.out_features) == (HIDDEN, 24)
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_linear_of_another_class_is_refused() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    served, target = Served(), TARGETS.targets["q"]
    assert isinstance(target, LinearTarget)
    with pytest.raises(UnsupportedError, match="Doubled"):
        LoraLinear.wrap(Doubled(HIDDEN, 24), target, served.state, served.backend)


class CountOps(TorchDispatchMode):
    """Names of the tensor operations run while entered."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def ops_of(call: Callable[[], object]) -> list[str]:
    with CountOps() as count, torch.no_grad():
        call()
    return count.names


@pytest.mark.parametrize("slots", [None, [-1] * 8, [1, -1, 1, 1, -1, -1, 1, 1]])
def test_no_view_or_no_adapted_site_means_no_extra_operation(slots: list[int] | None) -> None:
    served = Served()
    base, layer = served.linear()
    if slots:
        begin(served.state, slots)  # slot 1 does not adapt q
    x = torch.randn(8, HIDDEN)
    assert ops_of(lambda: layer(x)) == ops_of(lambda: base(x))
    assert torch.equal(layer(x), base(x))
    assert served.backend.routes == 0


def test_one_routing_serves_all_dense_layers_of_a_step() -> None:
    served = Served()
    _, layer = served.linear()
    x = torch.randn(8, HIDDEN)
    with torch.no_grad():
        for _ in range(2):
            begin(served.state, SLOTS)
            for _ in range(3):
                layer(x)
    assert served.backend.routes == 2
    assert served.backend.applied == ["q"] * 6


@torch.no_grad()
def test_lm_head_uses_the_slots_of_the_sampled_rows() -> None:
    served, target = Served(), TARGETS.targets["head"]
    assert isinstance(target, LinearTarget)
    base = nn.Linear(HIDDEN, VOCAB, bias=False)
    head = LoraLmHead.wrap(base, target, served.state, served.backend)
    _, layer = served.linear()
    begin(served.state, [0, -1], logit_slots=SLOTS)
    layer(torch.randn(2, HIDDEN))  # the tokens' routing must not be the logits'
    x = torch.randn(8, HIDDEN)
    assert_mixed(head(x), add_rows(base(x), x, target.site, SLOTS, [0] * 8), base(x))
    with pytest.raises(UnsupportedError, match="do not fit 8 rows"):
        head(x[:7])


@torch.no_grad()
def test_embedding_mixed_batch() -> None:
    served, target = Served(), TARGETS.targets["embed"]
    assert isinstance(target, EmbeddingTarget)
    base = nn.Embedding(VOCAB, HIDDEN, padding_idx=3)
    layer = LoraEmbedding.wrap(base, target, served.state, served.backend)
    assert layer.weight is base.weight
    ids = torch.tensor([[3, 0, 19, 7, 7, 1, 2, 19]])
    assert torch.equal(layer(ids), base(ids))
    begin(served.state, SLOTS)
    slots = [slot if slot != 1 else -1 for slot in SLOTS]  # 1 does not adapt it
    ones = torch.ones(8, 1)
    expected = add_rows(base(ids)[0], ones, target.site, slots, ids[0].tolist())
    assert_mixed(layer(ids)[0], expected, base(ids)[0])


def test_embedding_that_scales_is_refused() -> None:
    class Scaled(nn.Embedding):
        pass

    served, target = Served(), TARGETS.targets["embed"]
    assert isinstance(target, EmbeddingTarget)
    with pytest.raises(UnsupportedError, match="Scaled"):
        LoraEmbedding.wrap(Scaled(VOCAB, HIDDEN), target, served.state, served.backend)


def pairs(order: list[int]) -> PairRows:
    """Two experts per token, some sentinels, in any order."""
    token = torch.tensor([row // 2 for row in range(16)])
    expert = torch.tensor([0, 3, 1, 2, 2, 2, -1, 0, 3, EXPERTS, 1, 0, 2, 3, 0, 1])
    return PairRows(token[order], expert[order])


@torch.no_grad()
@pytest.mark.parametrize("path", ["experts", "alternating", "ungated"])
@pytest.mark.parametrize("virtual", [True, False])
def test_experts_hooks_add_both_products(path: str, virtual: bool) -> None:
    served, target = Served(), TARGETS.targets[path]
    assert isinstance(target, ExpertsTarget)
    hooks_now = experts_hooks(target, served.state, served.backend)
    assert hooks_now() is None
    view = begin(served.state, SLOTS)
    object.__setattr__(view, "use_virtual_experts", virtual)
    hooks = hooks_now()
    assert hooks is not None
    assert hooks.after_gate_up is not None
    assert hooks.after_down is not None
    rows = pairs([5, 0, 1, 2, 3, 4, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6])
    slots = [SLOTS[token] for token in rows.token.tolist()]
    x, h = torch.randn(8, HIDDEN), torch.randn(16, INNER)
    up, down = torch.randn(16, target.gate_up.out_features), torch.randn(16, HIDDEN)
    experts = rows.expert.tolist()
    want_up = add_rows(up, x[rows.token], target.gate_up, slots, experts)
    want_down = add_rows(down, h, target.down, slots, experts)
    before = up.clone()
    hooks.after_gate_up(x, rows.token, up, rows)
    hooks.after_down(h, None, down, rows)
    torch.testing.assert_close(up, want_up, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(down, want_down, atol=1e-4, rtol=1e-5)
    still = [row for row in range(16) if slots[row] < 0 or experts[row] not in range(EXPERTS)]
    assert torch.equal(up[still], before[still])
    assert served.backend.routes == (1 if virtual else 0)
    assert len(served.backend.classic) == (0 if virtual else 2)


@torch.no_grad()
@pytest.mark.parametrize("path", ["experts", "alternating"])
def test_the_moe_runner_with_hooks_equals_merged_weights(path: str) -> None:
    served, target = Served(), TARGETS.targets[path]
    assert isinstance(target, ExpertsTarget)
    torch.manual_seed(0)
    gate_up, down = torch.randn(EXPERTS, 2 * INNER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER)

    def activate(y: torch.Tensor) -> torch.Tensor:
        if target.is_interleaved:
            return functional.silu(y[:, 0::2]) * y[:, 1::2]
        return functional.silu(y[:, :INNER]) * y[:, INNER:]

    def runner(slot: int) -> MoeRunner:
        deltas = [
            canonical_delta(TARGETS, ADAPTERS[slot], site) if slot >= 0 else 0.0
            for site in (target.gate_up, target.down)
        ]
        weights = ExpertWeights(
            *(gate_up + deltas[0], down + deltas[1], None, None, False, True),
            *(target.is_interleaved, False, activate, EXPERTS, HIDDEN, INNER),
        )
        return MoeRunner(weights, served.backend)

    x, weight = torch.randn(8, HIDDEN), torch.rand(8, 2)
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(8)])
    begin(served.state, SLOTS)
    hooks = experts_hooks(target, served.state, served.backend)()
    mixed = runner(-1)(x, ids, weight, hooks)
    assert served.backend.routes == 1
    for row, slot in enumerate(SLOTS):
        merged = runner(slot)(x, ids, weight)[row]
        error = (mixed[row] - merged).norm() / merged.norm()
        assert error < 1e-5 if slot >= 0 else error == 0


def test_experts_hooks_are_only_those_an_active_slot_needs() -> None:
    served, target = Served(), TARGETS.targets["experts"]
    assert isinstance(target, ExpertsTarget)
    hooks_now = experts_hooks(target, served.state, served.backend)
    begin(served.state, [1, -1])
    hooks = hooks_now()
    assert hooks is not None
    assert hooks.after_down is None
    begin(served.state, [2, -1])
    hooks = hooks_now()
    assert hooks is not None
    assert hooks.after_gate_up is None
    begin(served.state, [3])  # an empty slot
    assert hooks_now() is None


@torch.no_grad()
def test_layers_of_experts_do_not_share_their_routing() -> None:
    served = Served()
    begin(served.state, [0] * 8)
    for path in ("experts", "alternating"):
        target = TARGETS.targets[path]
        assert isinstance(target, ExpertsTarget)
        hooks = experts_hooks(target, served.state, served.backend)()
        assert hooks is not None
        assert hooks.after_down is not None
        for rows in (pairs(list(range(16))), pairs(list(range(15, -1, -1)))):
            h, y = torch.randn(16, INNER), torch.zeros(16, HIDDEN)
            hooks.after_down(h, None, y, rows)
            expected = add_rows(y * 0, h, target.down, [0] * 16, rows.expert.tolist())
            torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-5)
    assert served.backend.routes == 4


@torch.no_grad()
def test_an_activation_of_another_dtype_keeps_its_base_rows() -> None:
    served = Served(torch.bfloat16)
    base, layer = served.linear()
    begin(served.state, SLOTS)
    x = torch.randn(8, HIDDEN)
    got, y = layer(x), base(x)
    assert got.dtype == torch.float32
    rows = [row for row in range(8) if SLOTS[row] < 0]
    assert torch.equal(got[rows], y[rows])
    site = TARGETS.targets["q"].site  # type: ignore[union-attr]
    delta = add_rows(y, x, site, SLOTS, [0] * 8) - y
    assert ((got - y) - delta).norm() / delta.norm() < 1e-2
