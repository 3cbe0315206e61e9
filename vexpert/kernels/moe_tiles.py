"""What the kernels over tiles of one expert share: reading a tile, LoRA on its runs.

A *run* is a stretch of equal (expert, slot) within a tile. Each run is one masked dot with the
factors of its adapter, so a tile may mix adapters and base rows; base rows take no step of it.
"""

import triton
import triton.language as tl


@triton.jit
def read_tile(
    tile, topk_ids, tile_expert, tile_start, tile_end, num_tiles, num_experts, IDENTITY: tl.constexpr
):
    """(expert, first position, end); an end of -1: no such tile."""
    if IDENTITY:
        expert = tl.load(topk_ids + tile).to(tl.int32)
        start = tile
        end = tl.where((expert >= 0) & (expert < num_experts), tile + 1, -1)
    else:
        exists = tile < tl.load(num_tiles)
        expert = tl.load(tile_expert + tile, mask=exists, other=0)
        start = tl.load(tile_start + tile, mask=exists, other=0)
        end = tl.load(tile_end + tile, mask=exists, other=-1)
    return expert, start, end


@triton.jit
def read_run(position, end, slots, slot_at, run_end, TOP_K: tl.constexpr, IDENTITY: tl.constexpr):
    """(slot, stop) of the run at `position`, cut at the tile's end."""
    if IDENTITY:
        slot = tl.load(slots + position // TOP_K).to(tl.int32)
        stop = position + 1
    else:
        slot = tl.load(slot_at + position)
        stop = tl.minimum(tl.load(run_end + position), end)
    return slot, stop


@triton.jit
def expand_run(
    total,
    h,
    arena,
    slice_rank,
    slice_column,
    b_offset,
    b_stride,
    entry,
    expert,
    position,
    mine,
    n,
    size,
    plane,
    max_rank,
    PLANES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """total [M, N] + (sum over planes of h [position, column + r]) @ B^T [r, n] on `mine` rows."""
    rank = tl.load(slice_rank + entry)
    column = tl.load(slice_column + entry)
    b = arena + tl.load(b_offset + entry) + expert * tl.load(b_stride + entry)
    row = h + position[:, None] * max_rank
    for r in range(0, rank, BLOCK_R):
        inner = r + tl.arange(0, BLOCK_R)
        used = inner < rank
        keep = mine[:, None] & used[None, :]
        at = row + (column + inner)[None, :]
        h_tile = tl.load(at, mask=keep, other=0.0)
        for i in tl.static_range(1, PLANES):
            h_tile += tl.load(at + i * plane, mask=keep, other=0.0)
        b_tile = tl.load(
            b + inner[:, None] * size + n[None, :],
            mask=used[:, None] & (n < size)[None, :],
            other=0.0,
        )
        h_tile = h_tile.to(arena.dtype.element_ty)
        total = tl.dot(h_tile, b_tile, total, input_precision=PRECISION)
    return total
