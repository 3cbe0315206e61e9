"""LoRA expand over virtual experts: y[p, columns of slice i] += B[i, s, e] @ h[p, c : c + r].

r = slice_rank[i, s], c = slice_column[i, s]; slice i has columns start + i * step + stride * (0 ...
size - 1). The masked add is the epilogue: each element of y is
read, added to in float32, rounded and written by one program.

| array | shape | holds |
|---|---|---|
| h | [P, max_rank] float32 | shrunk rows |
| arena | [N] float | factors; B^T of (i, s, e) at b_offset[i, s] + e * b_stride[i, s], [r, size] |
| slice_rank, slice_column, b_offset, b_stride | [n, S] int64 | the site's table |
| key, order, block_start, num_blocks | | see `blocks` |
| mask | [P] bool or None | rows that may change |
| y | [P, out] in the arena's dtype, or float32 | the output, columns adjacent |
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vexpert.kernels.blocks import Blocks
from vexpert.kernels.common import ceil_div, check_matrix, dot_precision, power_of_two
from vexpert.kernels.launch import direct_launch


@direct_launch
@triton.jit
def _expand_kernel(
    h,
    arena,
    slice_rank,
    slice_column,
    b_offset,
    b_stride,
    key,
    order,
    block_start,
    num_blocks,
    mask,
    y,
    num_rows,
    num_slots,
    max_rank,
    size,
    first_slice,
    column_start,
    column_step,
    column_stride,
    stride_y,
    NUM_EXPERTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    block = tl.program_id(0)
    if block >= tl.load(num_blocks):
        return
    first = tl.load(block_start + block)
    virtual = tl.load(key + first)
    slot = virtual // NUM_EXPERTS
    expert = virtual % NUM_EXPERTS
    entry = (first_slice + tl.program_id(2)) * num_slots + slot
    rank = tl.load(slice_rank + entry)
    if rank == 0:
        return
    place = first + tl.arange(0, BLOCK_M)
    inside = place < num_rows
    mine = tl.load(key + place, mask=inside, other=-1) == virtual
    row = tl.load(order + place, mask=mine, other=0)
    if HAS_MASK:
        mine = mine & (tl.load(mask + row, mask=mine, other=0) != 0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_base = arena + tl.load(b_offset + entry) + expert * tl.load(b_stride + entry)
    h_line = h + row * max_rank + tl.load(slice_column + entry)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for r in range(0, rank, BLOCK_R):
        inner = r + tl.arange(0, BLOCK_R)
        used = inner < rank
        h_tile = tl.load(
            h_line[:, None] + inner[None, :], mask=mine[:, None] & used[None, :], other=0.0
        )
        b_tile = tl.load(
            b_base + inner[:, None].to(tl.int64) * size + n[None, :],
            mask=used[:, None] & (n < size)[None, :],
            other=0.0,
        )
        h_tile = h_tile.to(arena.dtype.element_ty)
        total = tl.dot(h_tile, b_tile, total, input_precision=PRECISION)
    column = column_start + tl.program_id(2) * column_step + n * column_stride
    target = y + row[:, None] * stride_y + column[None, :]
    stored = mine[:, None] & (n < size)[None, :]
    if ADD:
        total += tl.load(target, mask=stored, other=0.0).to(tl.float32)
    tl.store(target, total.to(y.dtype.element_ty), mask=stored)


@dataclass(frozen=True)
class SliceRun:
    """`count` slices of equal size and stride whose starts are evenly spaced: one launch."""

    first: int
    count: int
    start: int
    step: int
    size: int
    stride: int


def lora_expand(
    h: torch.Tensor,
    arena: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    blocks: Blocks,
    run: SliceRun,
    mask: torch.Tensor | None,
    y: torch.Tensor,
    add: bool,
) -> None:
    """Change rows of y in place; `table`: (slice_rank, slice_column, b_offset, b_stride).

    Without `add`, delta replaces what y holds; columns outside of `run` and rows without an adapter
    stay. Reference: `reference_expand`.
    """
    check_matrix("h", h)
    check_matrix("y", y)
    assert h.dtype == torch.float32, h.dtype
    assert h.is_contiguous(), h.stride()
    assert y.dtype in (arena.dtype, torch.float32), (y.dtype, arena.dtype)
    rows, max_rank = h.shape
    if rows == 0:
        return
    block_n = power_of_two(run.size, 16, 128)
    _expand_kernel[(blocks.max_blocks, ceil_div(run.size, block_n), run.count)](
        h, arena, *table, blocks.key, blocks.order, blocks.block_start, blocks.num_blocks,
        y if mask is None else mask, y, rows, table[0].shape[1], max_rank, run.size, run.first,
        run.start, run.step, run.stride, y.stride(0),
        NUM_EXPERTS=blocks.num_experts, HAS_MASK=mask is not None, ADD=add,
        PRECISION=dot_precision(arena.dtype), BLOCK_M=blocks.block_m, BLOCK_N=block_n,
        BLOCK_R=power_of_two(max_rank, 16, 32 if arena.dtype == torch.float32 else 64),
    )  # fmt: skip


def reference_expand(
    h: torch.Tensor,
    arena: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    experts: torch.Tensor,
    run: SliceRun,
    out_features: int,
) -> torch.Tensor:
    """The deltas alone in float64, row by row."""
    slice_rank, slice_column, b_offset, b_stride = table
    delta = torch.zeros(slots.shape[0], out_features, dtype=torch.float64)
    for row, (slot, expert) in enumerate(zip(slots.tolist(), experts.tolist(), strict=True)):
        for i in range(run.count if slot >= 0 else 0):
            part = run.first + i
            rank, column = int(slice_rank[part, slot]), int(slice_column[part, slot])
            start = int(b_offset[part, slot]) + expert * int(b_stride[part, slot])
            b = arena[start : start + rank * run.size].view(rank, run.size).double()
            left = run.start + i * run.step
            stop = left + (run.size - 1) * run.stride + 1
            delta[row, left : stop : run.stride] += h[row, column : column + rank].double() @ b
    return delta
