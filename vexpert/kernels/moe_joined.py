"""A shrink in the loop of the product that expands it.

The programs of a tile's first block of columns multiply the inputs, which they load anyway, by A^T
of the tile's first run too; its other runs take a pass over their own rows. They store the shrunk
rows and count the tile's `pending` down; the programs of its other blocks wait for that before they
expand. So that nobody waits long, block 0 of a tile comes AHEAD tiles before its other blocks:

| program | tile | block |
|---|---|---|
| p < AHEAD | p | 0 |
| AHEAD + t * blocks + i, i < blocks - 1 | t | i + 1 |
| AHEAD + t * blocks + blocks - 1 | t + AHEAD | 0 |

The device starts programs in their order, so whoever is waited for runs, or has run. Base rows have
the same sums as without: their products are not touched.
"""

import triton
import triton.language as tl

from vexpert.kernels.moe_shrink import shrink_run, store_slices

MOST_JOINED = 16  # rows of A for each slice: more need registers that the product has


@triton.jit
def place_of_program(program, blocks, AHEAD: tl.constexpr):
    """(tile, block of its columns); a block of -1: no such tile."""
    later = program - AHEAD
    group = later // blocks
    place = later % blocks
    is_first = place == blocks - 1
    tile = tl.where(program < AHEAD, program, tl.where(is_first, group + AHEAD, group))
    block = tl.where((program < AHEAD) | is_first, 0, place + 1)
    tiles = (tl.num_programs(0) - AHEAD) // blocks
    return tile, tl.where(tile < tiles, block, -1)


@triton.jit
def begin_shrink(tile, k, depth, lora):
    """Where A^T [BLOCK_K, A_R] of a tile's first run begins, and which columns [A_R] it has."""
    run = ((lora.ROW - 2) // 2) * lora.factor_stride + tile.index * lora.RUN_STRIDE
    r = tl.arange(0, lora.A_R)
    a_row = tl.multiple_of(tl.load(lora.address + run) + r * depth, [lora.A_ALIGNMENT])
    return lora.arena + a_row[None, :] + k[:, None], r < tl.load(lora.rank + run)


@triton.jit
def load_a(at, used, within, lora):
    """A block of A^T. within: which of its rows exist; unless A_EVEN all of them do."""
    keep = used[None, :]
    if not lora.A_EVEN:
        keep = keep & within[:, None]
    return tl.load(at, mask=keep, other=0.0)


@triton.jit
def end_shrink(
    sums, tile, hidden, pair_at, depth, stride_x, lora, TOP_K: tl.constexpr,
    BY_POSITION: tl.constexpr, SCALED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Stores the shrunk rows of a tile's first run, shrinks its other runs, and tells of it."""
    M: tl.constexpr = sums.shape[0]
    run = tile.index * lora.RUN_STRIDE
    part_at = lora.rank + lora.ROW * lora.factor_stride + run
    own = (tile.position < tl.load(lora.run_stop + run)) & (
        tile.position >= tl.load(lora.run_first + run)
    )
    line = lora.h + tile.position.to(tl.int64)[:, None] * lora.width
    out = sums.to(lora.h.dtype.element_ty)
    inner = tl.arange(0, lora.A_R)
    store_slices(out, line, inner, own, part_at, lora.factor_stride, lora.SLICES, lora.SLICE_WIDTH)
    for i in range(1, tl.load(lora.num_runs + tile.index)):
        at = ((lora.ROW - 2) // 2) * lora.factor_stride + run + i
        rank = tl.load(lora.rank + at)
        a_at = tl.multiple_of(tl.load(lora.address + at), lora.A_ALIGNMENT)
        if rank > 0:
            shrink_run(
                tl.load(lora.run_first + run + i), tl.load(lora.run_stop + run + i), hidden,
                pair_at, lora.arena, a_at, rank, lora.h, 0, depth, depth, lora.width, stride_x,
                part_at + i, lora.factor_stride, TOP_K, BY_POSITION, SCALED, False, lora.SLICES,
                lora.SLICE_WIDTH, lora.A_EVEN, lora.PRECISION, M, BLOCK_K, lora.A_R,
            )  # fmt: skip
    tl.debug_barrier()  # all threads' rows before the count that tells of them
    tl.atomic_add(lora.pending + tile.index, -1, sem="release")
