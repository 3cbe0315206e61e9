"""LoRA shrink over virtual experts: h[p, :rank] = A[s, e] @ x[x_rows[p]], float32.

The inner dimension is split over programs (split-K): each writes a float32 partial sum, and a
second kernel adds them in a fixed order, so the result does not depend on who came first.

| array | shape | holds |
|---|---|---|
| x | [R, K] in the arena's dtype | inputs; columns adjacent |
| x_rows | [P] int64 or None | row of x for each row p |
| arena | [N] float | factors; A of (s, e) at a_offset[s] + e * a_stride[s], [rank[s], K] |
| rank, a_offset, a_stride | [S] int64 | the site's table |
| key, order, block_start, num_blocks | | see `blocks` |
| partial | [splits, P, max_rank] float32 | partial sums, at row p |
| h | [P, max_rank] float32 | their sums; inactive rows and columns >= rank are unspecified |
"""

import torch
import triton
import triton.language as tl

from vexpert.kernels.blocks import Blocks
from vexpert.kernels.common import ceil_div, check_matrix, dot_precision, power_of_two
from vexpert.kernels.launch import direct_launch


@direct_launch
@triton.jit
def _shrink_kernel(
    x,
    x_rows,
    arena,
    rank,
    a_offset,
    a_stride,
    key,
    order,
    block_start,
    num_blocks,
    partial,
    num_rows,
    depth,
    max_rank,
    split_depth,
    stride_x,
    NUM_EXPERTS: tl.constexpr,
    HAS_X_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(0)
    if block >= tl.load(num_blocks):
        return
    first = tl.load(block_start + block)
    virtual = tl.load(key + first)
    slot = virtual // NUM_EXPERTS
    expert = virtual % NUM_EXPERTS
    slot_rank = tl.load(rank + slot)
    column = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    if tl.program_id(1) * BLOCK_R >= slot_rank:
        return
    place = first + tl.arange(0, BLOCK_M)
    inside = place < num_rows
    mine = tl.load(key + place, mask=inside, other=-1) == virtual
    row = tl.load(order + place, mask=mine, other=0)
    source = row
    if HAS_X_ROWS:
        source = tl.load(x_rows + row, mask=mine, other=0)
    a_base = arena + tl.load(a_offset + slot) + expert * tl.load(a_stride + slot)
    x_line = x + source * stride_x
    used = column < slot_rank
    a_line = a_base + column.to(tl.int64) * depth
    total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    start = tl.program_id(2) * split_depth
    stop = tl.minimum(start + split_depth, depth)
    for k in range(start, stop, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)
        within = inner < stop
        x_tile = tl.load(
            x_line[:, None] + inner[None, :], mask=mine[:, None] & within[None, :], other=0.0
        )
        a_tile = tl.load(
            a_line[None, :] + inner[:, None], mask=used[None, :] & within[:, None], other=0.0
        )
        total = tl.dot(x_tile, a_tile, total, input_precision=PRECISION)
    split = tl.program_id(2).to(tl.int64)
    target = partial + (split * num_rows + row)[:, None] * max_rank + column[None, :]
    tl.store(target, total, mask=mine[:, None] & used[None, :])


@direct_launch
@triton.jit
def _sum_splits_kernel(partial, h, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.load(partial + place, mask=inside, other=0.0)
    for split in range(1, SPLITS):
        total += tl.load(partial + split * size + place, mask=inside, other=0.0)
    tl.store(h + place, total, mask=inside)


def choose_splits(max_blocks: int, depth: int) -> int:
    """Enough programs to fill about 256 places, but at least 256 of the inner dimension each."""
    return max(1, min(256 // max(1, max_blocks), depth // 256, 16))


def lora_shrink(
    x: torch.Tensor,
    x_rows: torch.Tensor | None,
    arena: torch.Tensor,
    rank: torch.Tensor,
    a_offset: torch.Tensor,
    a_stride: torch.Tensor,
    blocks: Blocks,
    max_rank: int,
    splits: int | None = None,
) -> torch.Tensor:
    """h [P, max_rank] float32; `splits` of the depth, None: by the blocks.

    No rank is above max_rank. Reference: `reference_shrink`.
    """
    check_matrix("x", x)
    assert x.dtype == arena.dtype, (x.dtype, arena.dtype)
    rows, depth = blocks.key.shape[0], x.shape[1]
    h = torch.empty(rows, max_rank, dtype=torch.float32, device=x.device)
    if rows == 0:
        return h
    splits = choose_splits(blocks.max_blocks, depth) if splits is None else splits
    block_r = power_of_two(max_rank, 16, 64)
    block_k = power_of_two(depth, 16, 128 if x.dtype != torch.float32 else 64)
    split_depth = ceil_div(ceil_div(depth, splits), block_k) * block_k
    # zeros: the sum below also adds places that no program writes, and what lies there may overflow
    partial = h if splits == 1 else h.new_zeros(splits, rows, max_rank)
    _shrink_kernel[(blocks.max_blocks, ceil_div(max_rank, block_r), splits)](
        x, x if x_rows is None else x_rows, arena, rank, a_offset, a_stride, blocks.key,
        blocks.order, blocks.block_start, blocks.num_blocks, partial, rows, depth, max_rank,
        split_depth, x.stride(0),
        NUM_EXPERTS=blocks.num_experts, HAS_X_ROWS=x_rows is not None,
        PRECISION=dot_precision(x.dtype), BLOCK_M=blocks.block_m, BLOCK_R=block_r, BLOCK_K=block_k,
    )  # fmt: skip
    if splits > 1:
        size = h.numel()
        _sum_splits_kernel[(ceil_div(size, 1024),)](partial, h, size, SPLITS=splits, BLOCK=1024)
    return h


def reference_shrink(
    x: torch.Tensor,
    x_rows: torch.Tensor | None,
    arena: torch.Tensor,
    rank: torch.Tensor,
    a_offset: torch.Tensor,
    a_stride: torch.Tensor,
    slots: torch.Tensor,
    experts: torch.Tensor,
    max_rank: int,
) -> torch.Tensor:
    """The same in float64, row by row, with zeros where `lora_shrink` leaves what it finds."""
    h = torch.zeros(slots.shape[0], max_rank, dtype=torch.float64)
    for row, (slot, expert) in enumerate(zip(slots.tolist(), experts.tolist(), strict=True)):
        if slot < 0:
            continue
        start = int(a_offset[slot]) + expert * int(a_stride[slot])
        size = int(rank[slot])
        a = arena[start : start + size * x.shape[1]].view(size, x.shape[1]).double()
        h[row, :size] = a @ x[row if x_rows is None else int(x_rows[row])].double()
    return h
