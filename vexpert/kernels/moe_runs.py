"""The runs of each tile, where (expert, slot) changes, base runs left out; and where factors lie.

A run of a tile start <= p < end begins at each p where
  slot[p] >= 0 and (p == start or slot[p] != slot[p - 1])
and stops where the next one, or base rows, begin, or the tile ends.

A tile's LoRA takes its runs one group after another; a shrink takes the *pieces* of runs, of at
most PIECE positions, from one list over all tiles. Its order differs from launch to launch; what is
computed does not depend on it.

| array | shape | holds |
|---|---|---|
| num_runs | [max_tiles] int32 | runs of each tile |
| run_first, run_stop | [max_tiles, BLOCK_M] int32 | their positions, cut at the tile's end |
| run_address, run_rank | [.., max_tiles * BLOCK_M] | `moe_factors`; rank 0 beyond the last run |
| num_pieces | [1] int32 | pieces that exist |
| piece_first, piece_stop | [max_pieces] int32 | their positions |
| piece_address, piece_rank | [.., max_pieces] | `moe_factors` |
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import pdl_options, pdl_release, pdl_wait
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.moe_factors import factor_arguments, factor_options, store_sites
from vexpert.kernels.moe_order import PairOrder


@dataclass(frozen=True)
class TileRuns:
    """The arrays above."""

    num_runs: torch.Tensor
    run_first: torch.Tensor
    run_stop: torch.Tensor
    run_address: torch.Tensor  # [5, max_tiles * BLOCK_M] int64
    run_rank: torch.Tensor  # [8, max_tiles * BLOCK_M] int32
    num_pieces: torch.Tensor
    piece_first: torch.Tensor
    piece_stop: torch.Tensor
    piece_address: torch.Tensor  # [5, max_pieces] int64
    piece_rank: torch.Tensor  # [8, max_pieces] int32
    piece: int
    programs: int  # that a shrink starts; each takes every so many pieces


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def place_of_tile(tile, tile_expert, tile_start, tile_end, num_tiles):
    """(expert, first position, end, whether it exists)."""
    # One wait: what lies behind the last tile is read, and dropped.
    expert = tl.load(tile_expert + tile)
    start = tl.load(tile_start + tile)
    end = tl.load(tile_end + tile)
    return expert, start, end, tile < tl.load(num_tiles)


@triton.jit
def runs_of_tile(slot_at, start, end, BLOCK_M: tl.constexpr):
    """(position, whether it is the tile's, slot, its run's first position and stop) of each row."""
    row = tl.arange(0, BLOCK_M)
    position = start + row
    mine = position < end
    has_next = (position + 1 < end) & (row + 1 < BLOCK_M)
    slot = tl.load(slot_at + position, mask=mine, other=-1)
    before = tl.load(slot_at + position - 1, mask=mine & (row > 0), other=-2)
    after = tl.load(slot_at + position + 1, mask=has_next, other=-2)
    first = tl.associative_scan(tl.where(slot != before, position, start), 0, _larger)
    last = tl.where(slot != after, position + 1, 1 << 30)
    return position, mine, slot, first, tl.associative_scan(last, 0, _smaller, reverse=True)


@direct_launch
@triton.jit
def _runs_kernel(
    slot_at, tile_expert, tile_start, tile_end, num_tiles,
    num_runs, run_first, run_stop, run_address, run_rank,
    num_pieces, piece_first, piece_stop, piece_address, piece_rank,
    up_table, down_table, num_slots, max_runs, max_pieces,
    GATE_SLICES: tl.constexpr, HAS_UP: tl.constexpr, HAS_DOWN: tl.constexpr,
    PIECE: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_release(PDL)
    tile = tl.program_id(0)
    expert, start, end, exists = place_of_tile(tile, tile_expert, tile_start, tile_end, num_tiles)
    if not exists:
        return
    position, mine, slot, first, stop = runs_of_tile(slot_at, start, end, BLOCK_M)
    active = mine & (slot >= 0)
    opens = active & (position == first)
    run = tile * BLOCK_M + tl.cumsum(opens.to(tl.int32), 0) - 1
    count = tl.sum(opens.to(tl.int32), 0)
    tl.store(num_runs + tile, count)
    tl.store(run_first + run, first, mask=opens)
    tl.store(run_stop + run, stop, mask=opens)
    for line in tl.static_range(2, 5):
        behind = position - start >= count
        tl.store(run_rank + line * max_runs + tile * BLOCK_M + position - start, 0, mask=behind)
    store_sites(
        run, slot, expert, opens, opens, run_address, run_rank, max_runs, num_slots,
        up_table, down_table, GATE_SLICES, HAS_UP, HAS_DOWN,
    )  # fmt: skip
    cuts = active & ((position - first) % PIECE == 0)
    piece = tl.cumsum(cuts.to(tl.int32), 0) - 1
    piece += tl.atomic_add(num_pieces, tl.sum(cuts.to(tl.int32), 0))
    tl.store(piece_first + piece, position, mask=cuts)
    tl.store(piece_stop + piece, tl.minimum(position + PIECE, stop), mask=cuts)
    store_sites(
        piece, slot, expert, cuts, cuts, piece_address, piece_rank, max_pieces, num_slots,
        up_table, down_table, GATE_SLICES, HAS_UP, HAS_DOWN,
    )  # fmt: skip


def find_runs(order: PairOrder, piece: int, adapters: int, pdl: bool = False) -> TileRuns:
    """All arrays of the table above, of an order that has factors and is no identity.

    piece: positions of a piece at most; adapters: about how many the step has; pdl: may start
    before the launch before it has ended. Counts in `order.num_pieces`, which was 0. Reference:
    `tests/test_kernels_moe.py: test_runs`.
    """
    factors = order.factors
    assert factors is not None
    assert not order.is_identity
    tiles, max_pieces = order.max_tiles, order.num_pairs
    max_runs = tiles * order.block_m

    # A run has at most one piece that is not full, and one more for each end of a tile in it.
    expected = max_pieces // piece + min(order.num_experts * max(1, adapters) + tiles, max_pieces)
    found = TileRuns(
        num_runs=order.ints(tiles),
        run_first=order.ints(max_runs),
        run_stop=order.ints(max_runs),
        run_address=order.ints(5, max_runs, dtype=torch.int64),
        run_rank=order.ints(8, max_runs),
        num_pieces=order.num_pieces,
        piece_first=order.ints(max_pieces),
        piece_stop=order.ints(max_pieces),
        piece_address=order.ints(5, max_pieces, dtype=torch.int64),
        piece_rank=order.ints(8, max_pieces),
        piece=piece,
        programs=min(expected, max_pieces),
    )
    _runs_kernel[(tiles,)](
        order.slot, order.tile_expert, order.tile_start, order.tile_end, order.num_tiles,
        found.num_runs, found.run_first, found.run_stop, found.run_address, found.run_rank,
        found.num_pieces, found.piece_first, found.piece_stop, found.piece_address,
        found.piece_rank,
        *factor_arguments(factors, order.slot)[2:], factors.num_slots, max_runs, max_pieces,
        **factor_options(factors), PIECE=piece, BLOCK_M=order.block_m,
        num_warps=max(1, order.block_m // 32), **pdl_options(pdl),
    )  # fmt: skip
    return found
