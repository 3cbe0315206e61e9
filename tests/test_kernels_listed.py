"""Deltas of pieces that are one list over all tiles, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from helpers_lora import relative_error
from helpers_moe import Layer, make_layer, naive
from test_kernels_moe import PLANS, WAITING_IN_INTERPRETER, lora_of, run

from vexpert.kernels import moe_delta
from vexpert.kernels.moe_delta import _find_item
from vexpert.ops.moe_plan import MoePlan

pytestmark = WAITING_IN_INTERPRETER
LISTED = [name for name in PLANS if name.startswith("delta-listed")]


@triton.jit
def _items(count_at, tile_at, piece_at, TILES: tl.constexpr):
    count = tl.load(count_at + tl.arange(0, TILES))
    tile, piece = _find_item(tl.program_id(0), count, tl.cumsum(count, 0), 100)
    tl.store(tile_at + tl.program_id(0), tile)
    tl.store(piece_at + tl.program_id(0), piece)


@pytest.mark.parametrize("counts", [[3, 1, 2, 4], [0, 0, 5, 0, 1, 0, 0, 2], [1, 0]])
def test_every_piece_is_one_item_in_the_order_of_tiles(counts: list[int]) -> None:
    wanted = [(tile, 100 * tile + i) for tile, count in enumerate(counts) for i in range(count)]
    tile, piece = torch.full((2, len(wanted)), -9, dtype=torch.int32)
    held = torch.tensor(counts, dtype=torch.int32)
    _items[(len(wanted),)](held, tile, piece, TILES=len(counts))
    assert list(zip(tile.tolist(), piece.tolist(), strict=True)) == wanted


def error(layer: Layer, name: str) -> float:
    _, base, how = PLANS[name]
    return relative_error(run(layer, MoePlan(base, how), lora_of(layer)), naive(layer, True))


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("slots", ["mixed", "one", "some", "base"])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(71, 1, 1), (5, 2, 40), (1, 2, 3)])
def test_one_expert_takes_all_and_most_are_empty(
    tokens: int, top_k: int, experts: int, slots: str, name: str
) -> None:
    layer = make_layer(tokens, top_k, experts, 8, PLANS[name][0])
    token = torch.arange(tokens)
    chosen = {
        "mixed": layer.slots,
        "one": token * 0,
        "some": torch.where((token > 33) & (token < 40), 1, -1),  # tiles before and after have none
        "base": token * 0 - 1,
    }
    assert error(replace(layer, slots=chosen[slots]), name) < 1e-5


@pytest.mark.parametrize("rank", [3, 40, 65])
@pytest.mark.parametrize("name", LISTED)
def test_ranks(rank: int, name: str) -> None:
    assert error(make_layer(7, 2, 4, rank, PLANS[name][0], sentinel_share=0.2), name) < 1e-5


def test_more_tiles_than_are_listed_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(26, 2, 3, 8, PLANS["delta-listed"][0])
    launched: list[str] = []
    shared = moe_delta._delta_kernel

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            launched.append("shared")
            return shared[grid]

    monkeypatch.setattr(moe_delta, "_delta_kernel", Noted())
    assert error(layer, "delta-listed") < 1e-5
    assert launched == []
    monkeypatch.setattr(moe_delta, "MOST_LISTED", 1)
    assert error(layer, "delta-listed") < 1e-5
    assert launched == ["shared", "shared"]


@pytest.mark.parametrize("name", LISTED)
def test_a_wrong_adapter_is_seen(name: str) -> None:
    layer = make_layer(19, 2, 3, 8, PLANS[name][0])
    _, base, how = PLANS[name]
    other = lora_of(layer, (layer.slots + 1) % 3)
    assert relative_error(run(layer, MoePlan(base, how), other), naive(layer, True)) > 1e-2
