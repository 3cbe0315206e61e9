"""The pieces of each tile's runs: positions of one slot and expert, at most PIECE of them.

A piece begins at each p of a run from `first` to `stop` where (p - first) % PIECE == 0, and stops
at the smaller one of p + PIECE and `stop`. Base runs have none. They are what `moe_delta` takes one
after another, tile by tile, beside the base product that waits for a tile's pieces to be done.

| array | shape | holds |
|---|---|---|
| count | [max_tiles] int32 | pieces of each tile |
| pending | [2, max_tiles] int32 | of them, those not done yet: gate_up, down |
| first, stop | [max_tiles * BLOCK_M] int32 | their positions; a tile's from tile * BLOCK_M on |
| address, rank | [.., max_tiles * BLOCK_M] | `moe_factors` |
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import pdl_options, pdl_release, pdl_wait
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.moe_factors import factor_arguments, factor_options, store_sites
from vexpert.kernels.moe_order import PairOrder
from vexpert.kernels.moe_runs import place_of_tile, runs_of_tile


@dataclass(frozen=True)
class TilePieces:
    """The arrays above."""

    count: torch.Tensor
    pending: torch.Tensor
    first: torch.Tensor
    stop: torch.Tensor
    address: torch.Tensor  # [5, max_tiles * BLOCK_M] int64
    rank: torch.Tensor  # [8, max_tiles * BLOCK_M] int32
    piece: int


@direct_launch
@triton.jit
def _pieces_kernel(
    slot_at, tile_expert, tile_start, tile_end, num_tiles,
    count_at, pending, first_at, stop_at, address, rank_at,
    up_table, down_table, num_slots, max_tiles,
    GATE_SLICES: tl.constexpr, HAS_UP: tl.constexpr, HAS_DOWN: tl.constexpr,
    PIECE: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_release(PDL)
    tile = tl.program_id(0)
    expert, start, end, exists = place_of_tile(tile, tile_expert, tile_start, tile_end, num_tiles)
    if not exists:
        return
    position, mine, slot, first, run_stop = runs_of_tile(slot_at, start, end, BLOCK_M)
    opens = mine & (slot >= 0) & ((position - first) % PIECE == 0)
    piece = tile * BLOCK_M + tl.cumsum(opens.to(tl.int32), 0) - 1
    count = tl.sum(opens.to(tl.int32), 0)
    tl.store(count_at + tile, count)
    tl.store(pending + tile, count)
    tl.store(pending + max_tiles + tile, count)
    tl.store(first_at + piece, position, mask=opens)
    tl.store(stop_at + piece, tl.minimum(position + PIECE, run_stop), mask=opens)
    max_pieces = max_tiles * BLOCK_M
    store_sites(
        piece, slot, expert, opens, opens, address, rank_at, max_pieces, num_slots,
        up_table, down_table, GATE_SLICES, HAS_UP, HAS_DOWN,
    )  # fmt: skip


def find_pieces(order: PairOrder, piece: int, pdl: bool = False) -> TilePieces:
    """All arrays of the table above, of an order that has factors and is no identity.

    piece: positions of a piece at most; pdl: may start before the launch before it has ended.
    Reference: `tests/test_kernels_moe.py: test_pieces`.
    """
    factors = order.factors
    assert factors is not None
    assert not order.is_identity
    tiles = order.max_tiles
    most = tiles * order.block_m

    found = TilePieces(
        count=order.ints(tiles),
        pending=order.ints(2, tiles),
        first=order.ints(most),
        stop=order.ints(most),
        address=order.ints(5, most, dtype=torch.int64),
        rank=order.ints(8, most),
        piece=piece,
    )
    _pieces_kernel[(tiles,)](
        order.slot, order.tile_expert, order.tile_start, order.tile_end, order.num_tiles,
        found.count, found.pending, found.first, found.stop, found.address, found.rank,
        *factor_arguments(factors, order.slot)[2:], factors.num_slots, tiles,
        **factor_options(factors), PIECE=piece, BLOCK_M=order.block_m,
        num_warps=max(1, order.block_m // 32), **pdl_options(pdl),
    )  # fmt: skip
    return found
