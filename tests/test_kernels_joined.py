"""Shrinks in the loop of the product that expands them, in Triton's interpreter."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from helpers_lora import SlotSpec, make_table, relative_error
from helpers_moe import Layer, make_layer, naive
from test_kernels_moe import PLANS, WAITING_IN_INTERPRETER, lora_of, run

from vexpert.kernels.moe_joined import MOST_JOINED, place_of_program
from vexpert.ops.moe_plan import MoePlan

pytestmark = WAITING_IN_INTERPRETER
AHEAD = [name for name in PLANS if name.startswith("ahead")]


@triton.jit
def _places(tile_at, block_at, blocks, AHEAD: tl.constexpr):
    tile, block = place_of_program(tl.program_id(0), blocks, AHEAD)
    tl.store(tile_at + tl.program_id(0), tile)
    tl.store(block_at + tl.program_id(0), block)


@pytest.mark.parametrize(("tiles", "blocks", "ahead"), [(7, 3, 2), (2, 4, 5), (5, 1, 3), (1, 6, 1)])
def test_every_block_has_one_program_and_the_first_comes_first(
    tiles: int, blocks: int, ahead: int
) -> None:
    programs = ahead + tiles * blocks
    tile, block = torch.full((2, programs), -9, dtype=torch.int32)
    _places[(programs,)](tile, block, blocks, AHEAD=ahead)
    places = [(t, b) for t, b in zip(tile.tolist(), block.tolist(), strict=True) if b >= 0]
    assert Counter(places) == Counter((t, b) for t in range(tiles) for b in range(blocks))
    for t in range(tiles):
        first = places.index((t, 0))
        assert all(places.index((t, b)) > first for b in range(1, blocks))
        others = [places.index((t - ahead, b)) for b in range(1, blocks) if t >= ahead]
        assert all(first > other for other in others)  # no earlier than that


def error(layer: Layer, name: str) -> float:
    _, base, how = PLANS[name]
    return relative_error(run(layer, MoePlan(base, how), lora_of(layer)), naive(layer, True))


@pytest.mark.parametrize("name", AHEAD)
@pytest.mark.parametrize("slots", ["mixed", "one", "half base", "base"])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(71, 1, 1), (5, 2, 40)])
def test_one_expert_takes_all_and_most_are_empty(
    tokens: int, top_k: int, experts: int, slots: str, name: str
) -> None:
    layer = make_layer(tokens, top_k, experts, 8, PLANS[name][0])
    token = torch.arange(tokens)
    chosen = {
        "mixed": layer.slots,
        "one": token * 0,
        "half base": token % 2 - 1,
        "base": token * 0 - 1,
    }
    assert error(replace(layer, slots=chosen[slots]), name) < 1e-5


@pytest.mark.parametrize("ranks", [(5, 5), (3, 11), (16, 0), (16, 16)])
@pytest.mark.parametrize("one_shrink", [False, True])
def test_ranks_of_slices(ranks: tuple[int, int], one_shrink: bool) -> None:
    """Also gate alone, and gate and up that share A."""
    layer = make_layer(21, 2, 3, 16, PLANS["ahead"][0], sentinel_share=0.1)
    specs = [SlotSpec(ranks, one_shrink), SlotSpec((2, 7)), None]
    table = make_table(layer.sites[0], specs)
    assert error(replace(layer, tables=(table, layer.tables[1])), "ahead") < 1e-5


@pytest.mark.parametrize("rank", [17, 40])
def test_more_ranks_than_fit_have_a_launch_of_their_own(rank: int) -> None:
    assert rank > MOST_JOINED
    layer = make_layer(6, 2, 4, rank, PLANS["ahead"][0])
    assert error(layer, "ahead") < 1e-5


def test_sums_of_base_rows_are_the_same_bits() -> None:
    layer = make_layer(40, 2, 3, 8, PLANS["ahead"][0])
    base, how = PLANS["ahead"][1:]
    alone = run(layer, MoePlan(base, how), None)
    out = run(layer, MoePlan(base, how), lora_of(layer))
    idle = layer.slots < 0
    assert idle.any()
    assert torch.equal(out[idle], alone[idle])
    assert not torch.equal(out, alone)


def test_each_product_alone() -> None:
    base, how = PLANS["ahead"][1:]
    for which, other in (("gate_up", 1), ("down", 0)):
        layer = make_layer(19, 2, 3, 8, PLANS["ahead"][0])
        out = run(layer, MoePlan(base, how), lora_of(layer, which=which))
        layer.tables[other].packed.zero_()
        assert relative_error(out, naive(layer, True)) < 1e-5


@pytest.mark.parametrize("name", AHEAD)
def test_a_wrong_adapter_is_seen(name: str) -> None:
    layer = make_layer(19, 2, 3, 8, PLANS[name][0])
    _, base, how = PLANS[name]
    other = lora_of(layer, (layer.slots + 1) % 3)
    assert relative_error(run(layer, MoePlan(base, how), other), naive(layer, True)) > 1e-2
