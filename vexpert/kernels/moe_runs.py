"""The runs of each tile: positions in it where (expert, slot) changes, base runs left out.

| array | shape | holds |
|---|---|---|
| tile_runs | [max_tiles, BLOCK_M] int32 | first position of each run within the tile |
| tile_num_runs | [max_tiles] int32 | how many there are |
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import pdl_options, pdl_release, pdl_wait
from vexpert.kernels.moe_order import PairOrder


@dataclass(frozen=True)
class TileRuns:
    """The arrays above."""

    tile_runs: torch.Tensor
    tile_num_runs: torch.Tensor


@triton.jit
def _runs_kernel(
    run_start,
    slot_at,
    tile_start,
    tile_end,
    num_tiles,
    tile_runs,
    tile_num_runs,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pdl_release(PDL)
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles):
        return
    start = tl.load(tile_start + tile)
    position = start + tl.arange(0, BLOCK_M)
    mine = position < tl.load(tile_end + tile)
    first = tl.load(run_start + position, mask=mine, other=-1)
    opens = mine & ((first == position) | (position == start))
    opens = opens & (tl.load(slot_at + position, mask=mine, other=-1) >= 0)
    number = tl.cumsum(opens.to(tl.int32), 0) - 1
    tl.store(tile_runs + tile * BLOCK_M + number, position, mask=opens)
    tl.store(tile_num_runs + tile, tl.sum(opens.to(tl.int32), 0))


def find_runs(order: PairOrder, pdl: bool = False) -> TileRuns:
    """Both arrays of the table above."""
    assert order.factors is not None
    assert not order.is_identity
    device = order.pair.device
    tile_runs = torch.empty(order.max_tiles, order.block_m, dtype=torch.int32, device=device)
    tile_num_runs = torch.empty(order.max_tiles, dtype=torch.int32, device=device)
    _runs_kernel[(order.max_tiles,)](
        order.run_start,
        order.slot,
        order.tile_start,
        order.tile_end,
        order.num_tiles,
        tile_runs,
        tile_num_runs,
        BLOCK_M=order.block_m,
        **pdl_options(pdl),
    )
    return TileRuns(tile_runs, tile_num_runs)
