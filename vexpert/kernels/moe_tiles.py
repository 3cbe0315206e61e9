"""Tiles of one expert's pairs, as the kernels of both products take them."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Tile(NamedTuple):
    """Rows of one expert, and a block of a product's columns."""

    index: Any
    expert: Any  # int64
    start: Any  # first position
    end: Any
    position: Any  # [BLOCK_M]
    mine: Any  # [BLOCK_M], whether a position is the tile's
    n: Any  # [BLOCK_N], columns
    inside: Any  # [BLOCK_N], whether a column exists
    size: Any  # columns of the product, or of a slice


@triton.jit
def read_tile(
    tile,
    topk_ids,
    tile_expert,
    tile_start,
    tile_end,
    num_tiles,
    num_experts,
    IDENTITY: tl.constexpr,
):
    """(expert, first position, end); an end of -1: no such tile."""
    if IDENTITY:
        expert = tl.load(topk_ids + tile).to(tl.int32)
        start = tile
        end = tl.where((expert >= 0) & (expert < num_experts), tile + 1, -1)
    else:
        # One wait: what lies behind the last tile is read, and dropped.
        expert = tl.load(tile_expert + tile)
        start = tl.load(tile_start + tile)
        end = tl.where(tile < tl.load(num_tiles), tl.load(tile_end + tile), -1)
    return expert, start, end
