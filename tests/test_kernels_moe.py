"""The fused MoE kernels under every kind of plan, against the naive loop over pairs."""

from dataclasses import replace

import pytest
import torch
from helpers_lora import SlotSpec, make_table, relative_error
from helpers_moe import Flags, Layer, make_layer, naive

from vexpert.kernels import moe_order_chunks
from vexpert.kernels.activations import Activation, reference_activation
from vexpert.kernels.moe_delta import DeltaShape
from vexpert.kernels.moe_factors import PairFactors
from vexpert.kernels.moe_order import identity_order, order_pairs, reference_order
from vexpert.kernels.moe_order_chunks import order_many_pairs
from vexpert.kernels.moe_pieces import find_pieces
from vexpert.kernels.moe_product import TileShape
from vexpert.kernels.moe_runs import find_runs
from vexpert.kernels.moe_shrink import ShrinkShape
from vexpert.ops.activation import recognise
from vexpert.ops.fused_experts import fused_experts, site_factors
from vexpert.ops.moe_plan import BasePlan, DeltaPlan, LoraPlan, MoePlan, MoeShape, choose_plan
from vexpert.ops.types import ExpertsLora, ExpertsTensors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_ops_gpu.py runs these")

SMALL = TileShape(16, 16)
RUN = ShrinkShape(16, 2, 16)
CHUNK = ShrinkShape(16, 1, 32)
WIDE = ShrinkShape(32, 1, 32)
DELTA = DeltaShape(16, 16)
SHARED = DeltaShape(32, 32, share=3, programs=2)
GPT_OSS = Flags(is_transposed=True, is_interleaved=True, has_bias=True)
ALONE = BasePlan(True, 16, SMALL, SMALL, pdl=False)  # dependent launches need a GPU
ORDERED = BasePlan(False, 16, SMALL, SMALL, pdl=False)
# name -> flags, base plan, LoRA plan
PLANS = {
    "identity": (Flags(), ALONE, LoraPlan(RUN, RUN, False, 2)),
    "identity-prefetch": (GPT_OSS, ALONE, LoraPlan(RUN, RUN, False, 1, 1, True)),
    "rows": (Flags(), ORDERED, LoraPlan(RUN, RUN, False, 4, 2)),
    "rows-inner": (
        Flags(has_bias=True),
        BasePlan(False, 32, TileShape(16, 16, tail_m=16), SMALL, pdl=False),
        LoraPlan(RUN, CHUNK, False, 2, 1, True, inner=True),
    ),
    "rows-prefetch": (
        GPT_OSS,
        BasePlan(False, 32, TileShape(16, 16, tail_m=16), SMALL, pdl=False),
        LoraPlan(RUN, CHUNK, False, 2, 1, True),
    ),
    "runs": (
        Flags(),
        BasePlan(False, 32, TileShape(16, 16, tail_m=16, tma=True), SMALL, 16, pdl=False),
        LoraPlan(CHUNK, RUN, True, 1, 2),
    ),
    "runs-early": (
        Flags(has_gate=False),
        BasePlan(False, 32, SMALL, TileShape(16, 8, tail_m=16, tma=True), 64, pdl=False),
        LoraPlan(WIDE, WIDE, True, 2, 1, True, True),
    ),
    "delta": (
        Flags(),
        BasePlan(False, 32, SMALL, SMALL, 16, pdl=False),
        LoraPlan(RUN, RUN, True, 1, delta=DeltaPlan(16, DELTA, DELTA)),
    ),
    "delta-shared": (
        GPT_OSS,
        BasePlan(False, 32, SMALL, SMALL, pdl=False),
        LoraPlan(RUN, RUN, True, 1, delta=DeltaPlan(32, SHARED, DELTA)),
    ),
    "delta-scaled-input": (
        Flags(is_transposed=True, scale_input=True),
        ORDERED,
        LoraPlan(RUN, RUN, True, 1, delta=DeltaPlan(16, SHARED, SHARED)),
    ),
    "scaled-input": (
        Flags(is_transposed=True, scale_input=True),
        ORDERED,
        LoraPlan(RUN, RUN, True, 4),
    ),
}


def tensors(layer: Layer) -> ExpertsTensors:
    weights, flags = layer.weights, layer.flags
    gate_up, down = (
        w.transpose(1, 2) if flags.is_transposed else w for w in (weights.gate_up, weights.down)
    )
    return ExpertsTensors(
        gate_up,
        down,
        weights.gate_up_bias,
        weights.down_bias,
        Activation("silu" if flags.has_gate else "relu2"),
        flags.is_interleaved,
        flags.scale_input,
    )


def run(layer: Layer, plan: MoePlan, lora: ExpertsLora | None) -> torch.Tensor:
    step = (layer.hidden, layer.topk_ids, layer.topk_weights)
    return fused_experts(tensors(layer), *step, lora, plan)


def lora_of(layer: Layer, slots: torch.Tensor | None = None, which: str = "both") -> ExpertsLora:
    gate_up, down = zip(layer.sites, layer.tables, strict=True)
    return ExpertsLora(
        layer.slots if slots is None else slots,
        (0, 1, 2),
        gate_up if which != "down" else None,
        down if which != "gate_up" else None,
    )


# A block load takes whole tiles: rows behind a tile's end, unwritten ones too, are multiplied, and
# never stored. What lies there may overflow, and NumPy tells of it.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(9, 2, 8), (26, 2, 3)])
def test_plans(name: str, tokens: int, top_k: int, experts: int) -> None:
    flags, base, how = PLANS[name]
    if base.is_identity:
        tokens = min(tokens, 9)  # a program a pair, and each takes the interpreter a while
    layer = make_layer(tokens, top_k, experts, 8, flags, sentinel_share=0.1)
    plan = MoePlan(base, how)
    out, alone = run(layer, plan, lora_of(layer)), run(layer, plan, None)
    expected, expected_alone = naive(layer, True), naive(layer, False)
    assert relative_error(alone, expected_alone) < 1e-5
    assert relative_error(out - alone, expected - expected_alone) < 1e-5
    idle = layer.slots < 0
    assert torch.equal(out[idle], alone[idle])


def test_counts_of_arrivals_end_at_zero() -> None:
    """After a step without any tile too, or the next would not wait."""
    flags, base, how = PLANS["rows-inner"]
    layer = make_layer(5, 2, 4, 8, flags)
    plan, lora = MoePlan(base, how), lora_of(layer)
    nobody = replace(layer, topk_ids=torch.full_like(layer.topk_ids, -1))
    for given in (layer, nobody, layer):
        out = run(given, plan, lora)
        assert not any(int(table.arrivals) for table in layer.tables)
    assert relative_error(out, naive(layer, True)) < 1e-5


@pytest.mark.parametrize("name", ["rows", "delta-shared"])
@pytest.mark.parametrize("which", ["gate_up", "down"])
def test_one_product_adapted(which: str, name: str) -> None:
    flags, base, how = PLANS[name]
    layer = make_layer(9, 2, 8, 8, flags)
    out = run(layer, MoePlan(base, how), lora_of(layer, which=which))
    layer.tables[1 if which == "gate_up" else 0].packed.zero_()
    assert relative_error(out, naive(layer, True)) < 1e-5


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("rank", [3, 40, 65, 130])
@pytest.mark.parametrize("name", ["rows-prefetch", "runs-early", "delta-shared"])
def test_ranks_beyond_one_step_of_the_dot(name: str, rank: int) -> None:
    flags, base, how = PLANS[name]
    layer = make_layer(5, 2, 4, rank, flags)
    assert relative_error(run(layer, MoePlan(base, how), lora_of(layer)), naive(layer, True)) < 1e-5


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("rank", [24, 70])
@pytest.mark.parametrize("name", ["rows", "runs", "delta"])
@pytest.mark.parametrize("kind", ["one shrink", "gate alone"])
def test_a_slice_may_have_every_row_of_a(kind: str, name: str, rank: int) -> None:
    """Gate and up share A, or only one of them is adapted: B has as many rows as A."""
    flags, base, how = PLANS[name]
    layer = make_layer(6, 2, 3, rank, flags)
    ranks = (rank, 0) if kind == "gate alone" else (rank, rank)
    specs = [SlotSpec(ranks, one_shrink=kind == "one shrink") for _ in range(3)]
    table = make_table(layer.sites[0], specs)
    layer = replace(layer, tables=(table, layer.tables[1]))
    assert relative_error(run(layer, MoePlan(base, how), lora_of(layer)), naive(layer, True)) < 1e-5


def test_a_wrong_adapter_or_expert_is_seen() -> None:
    flags, base, how = PLANS["rows"]
    layer = make_layer(9, 2, 8, 8, flags)
    plan, expected = MoePlan(base, how), naive(layer, True)
    other = lora_of(layer, (layer.slots + 1) % 3)
    assert relative_error(run(layer, plan, other), expected) > 1e-2
    layer.topk_ids.add_(1).remainder_(8)
    assert relative_error(run(layer, plan, lora_of(layer)), expected) > 1e-2


ORDERS = [
    (1, 2, 4, 16),
    (40, 3, 8, 16),
    (100, 4, 20, 32),
    (64, 2, 512, 16),
    (33, 1, 1, 16),
    (300, 4, 5, 64),  # 75 chunks, more than are read at a time
]


@pytest.mark.parametrize(("tokens", "top_k", "experts", "block_m"), ORDERS)
def test_order(tokens: int, top_k: int, experts: int, block_m: int) -> None:
    layer = make_layer(tokens, top_k, experts, 4, sentinel_share=0.1)
    ids, lora = layer.topk_ids, lora_of(layer)
    slots = layer.slots.repeat_interleave(top_k).tolist()
    pairs, ends = reference_order(ids.view(-1).tolist(), slots, experts)
    one = order_pairs(ids, factors_of(lora, ids.numel()), experts, block_m)
    many = order_many_pairs(ids, factors_of(lora, ids.numel()), experts, block_m, chunk=16)
    for order in (one, many):
        assert order.pair.tolist() == pairs
    assert one.run_end.tolist() == ends
    count = int(one.num_tiles)
    assert count == int(many.num_tiles)
    for name in ("tile_expert", "tile_start", "tile_end"):
        assert torch.equal(getattr(one, name)[:count], getattr(many, name)[:count])
    for name in ("expert", "slot"):
        assert torch.equal(getattr(one, name), getattr(many, name))


def test_tokens_by_more_slots_than_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(100, 4, 20, 4)
    factors = factors_of(lora_of(layer), 400)
    counted = order_many_pairs(layer.topk_ids, factors, 20, 16, chunk=16)
    monkeypatch.setattr(moe_order_chunks, "MOST_BINS", 4)
    compared = order_many_pairs(layer.topk_ids, factors, 20, 16, chunk=16)
    assert torch.equal(counted.pair, compared.pair)


@pytest.mark.parametrize(("tokens", "top_k", "experts", "block_m"), ORDERS[1:3])
def test_pieces(tokens: int, top_k: int, experts: int, block_m: int) -> None:
    layer = make_layer(tokens, top_k, experts, 4, sentinel_share=0.1)
    ids, lora = layer.topk_ids, lora_of(layer)
    order = order_pairs(ids, factors_of(lora, ids.numel()), experts, block_m)
    runs, found = find_runs(order, 16, 3), find_pieces(order, 16)
    for tile in range(int(order.num_tiles)):
        at = range(tile * block_m, tile * block_m + int(runs.num_runs[tile]))
        pairs = [(int(runs.run_first[i]), int(runs.run_stop[i])) for i in at]
        want = [
            (p, min(p + 16, b), i)
            for i, (a, b) in zip(at, pairs, strict=True)
            for p in range(a, b, 16)
        ]
        count = int(found.count[tile])
        assert count == len(want)
        assert found.pending[:, tile].tolist() == [count, count]
        here = slice(tile * block_m, tile * block_m + count)
        assert list(zip(found.first[here].tolist(), found.stop[here].tolist(), strict=True)) == [
            (a, b) for a, b, _ in want
        ]
        run = [i for *_, i in want]
        assert torch.equal(found.rank[:, here], runs.run_rank[:, run])
        assert torch.equal(found.address[:, here], runs.run_address[:, run])


@pytest.mark.parametrize(("tokens", "top_k", "experts", "block_m"), ORDERS)
def test_runs(tokens: int, top_k: int, experts: int, block_m: int) -> None:
    layer = make_layer(tokens, top_k, experts, 4, sentinel_share=0.1)
    ids, lora = layer.topk_ids, lora_of(layer)
    order = order_pairs(ids, factors_of(lora, ids.numel()), experts, block_m)
    slot, by_position = order.slot.tolist(), order.factors
    found = find_runs(order, 16, 3)
    pieces = {}
    for tile in range(int(order.num_tiles)):
        start, end = int(order.tile_start[tile]), int(order.tile_end[tile])
        opens = [p for p in range(start, end) if p == start or slot[p] != slot[p - 1]]
        stops = [*opens[1:], end]
        runs = [(a, b) for a, b in zip(opens, stops, strict=True) if slot[a] >= 0]
        at = range(tile * block_m, tile * block_m + len(runs))
        assert int(found.num_runs[tile]) == len(runs)
        assert [(int(found.run_first[i]), int(found.run_stop[i])) for i in at] == runs
        first = [a for a, _ in runs]
        assert torch.equal(found.run_rank[:, at], by_position.rank[:, first])
        assert torch.equal(found.run_address[:, at], by_position.address[:, first])
        assert not found.run_rank[2:5, at.stop : (tile + 1) * block_m].any()
        pieces |= {p: min(p + 16, b) for a, b in runs for p in range(a, b, 16)}
    count = int(found.num_pieces)
    first = found.piece_first[:count].tolist()
    assert dict(zip(first, found.piece_stop[:count].tolist(), strict=True)) == pieces
    assert torch.equal(found.piece_rank[:, :count], by_position.rank[:, first])
    assert torch.equal(found.piece_address[:, :count], by_position.address[:, first])


def factors_of(lora: ExpertsLora, pairs: int) -> PairFactors:
    gate_up = site_factors(lora.gate_up, lora.most_rank(is_down=False))
    down = site_factors(lora.down, lora.most_rank(is_down=True))
    return PairFactors.empty(lora.slots, gate_up, down, pairs)


def test_identity_order_launches_nothing() -> None:
    assert identity_order(torch.tensor([[2, 0]]), None, 4, 16).num_pairs == 2


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu"])
def test_an_activation_is_recognised_by_what_it_computes(name: str) -> None:
    activation = Activation(name, 1.702, 7.0)
    interleaved = name == "clamped_swiglu"

    def activate(y: torch.Tensor) -> torch.Tensor:
        if not activation.has_gate:
            return reference_activation(activation, y, None)
        gate, up = (y[..., ::2], y[..., 1::2]) if interleaved else y.chunk(2, -1)
        return reference_activation(activation, gate, up)

    found = recognise(activate, activation.has_gate, interleaved, 24, torch.device("cpu"))
    assert found is not None
    assert found.name == name


def test_an_unknown_activation_is_none() -> None:
    device = torch.device("cpu")
    assert recognise(lambda y: torch.tanh(y.chunk(2, -1)[0]), True, False, 24, device) is None
    assert recognise(lambda y: y.chunk(2, -1)[0] * 1.01, True, False, 24, device) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_tokens_has_a_plan(dtype: torch.dtype) -> None:
    for tokens in (1, 2, 7, 64, 100, 513, 5000, 100_000):
        for experts, top_k in ((8, 2), (128, 8), (512, 10), (1, 1)):
            shape = MoeShape(tokens, top_k, experts, 2048, 768, dtype, True, False)
            for adapters in (0, 1, 8, 1000):
                plan = choose_plan(shape, adapters)
                assert not plan.base.is_identity or tokens == 1
                assert plan.lora.by_run or not plan.base.order_chunk
                shrinks = plan.lora.shrink, plan.lora.down_shrink
                assert not plan.lora.by_run or len({shrink.block_m for shrink in shrinks}) == 1
                assert not (plan.base.is_identity and plan.lora.by_run)
