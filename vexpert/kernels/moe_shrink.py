"""LoRA shrink of routed experts by position: h[j, p] = A[s, e][:, part j] @ x[p, part j].

One plane j of float32 partial sums per part of the depth; consumers add the planes in order. Base
rows and sentinels are neither read nor written. A program takes either the run that starts at its
position, or is cut at a multiple of BLOCK_M from its start (RUNS: most positions are such starts),
or BLOCK_M positions, whose runs it does one after another (few, long runs).

| array | shape | holds |
|---|---|---|
| hidden | [T, H], or [P, H] when SCALED or BY_POSITION | inputs of tokens, pairs or positions |
| address, rank_at | [P] | this site's rows of `moe_factors`; IDENTITY: slots, packed table |
| h | [PLANES, P, max_rank] float32 | by position; columns from the slot's rank on unspecified |
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import dot_precision, pdl_options, pdl_release, pdl_wait, power_of_two
from vexpert.kernels.moe_order import PairOrder


@dataclass(frozen=True)
class ShrinkShape:
    """Positions and depth of a program's part, and how Triton runs it."""

    by_run: bool
    block_m: int
    planes: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3


@triton.jit
def _shrink_run(
    at, stop, hidden, pair_at, arena, a_at, rank, plane, left, right, depth, max_rank, stride_x,
    TOP_K: tl.constexpr, BY_POSITION: tl.constexpr, SCALED: tl.constexpr, IDENTITY: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Positions at ... stop, at most BLOCK_M of them, of one slot and expert."""
    position = at + tl.arange(0, BLOCK_M)
    own = position < stop
    source = position
    if not BY_POSITION:
        if not IDENTITY:
            source = tl.load(pair_at + position, mask=own, other=0)
        if not SCALED:
            source = source // TOP_K
    k = tl.arange(0, BLOCK_K)
    x_line = hidden + source.to(tl.int64)[:, None] * stride_x + k[None, :]
    a = arena + a_at
    for r in range(0, rank, BLOCK_R):
        inner = r + tl.arange(0, BLOCK_R)
        used = inner < rank
        a_line = a + inner[None, :] * depth + k[:, None]
        sums = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for first in range(left, right, BLOCK_K):
            if EVEN:
                x_tile = tl.load(x_line + first, mask=own[:, None], other=0.0)
                a_tile = tl.load(a_line + first, mask=used[None, :], other=0.0)
            else:
                within = first + k < right
                x_tile = tl.load(x_line + first, mask=own[:, None] & within[None, :], other=0.0)
                a_tile = tl.load(a_line + first, mask=used[None, :] & within[:, None], other=0.0)
            sums = tl.dot(x_tile, a_tile, sums, input_precision=PRECISION)
        target = plane + position.to(tl.int64)[:, None] * max_rank + inner[None, :]
        tl.store(target, sums, mask=own[:, None] & used[None, :])


@triton.jit
def _shrink_kernel(
    hidden, topk_ids, pair_at, run_start, run_end, arena, address, rank_at, h, num_pairs,
    num_experts, num_slots, depth, part, max_rank, stride_x,
    TOP_K: tl.constexpr, RUNS: tl.constexpr, BY_POSITION: tl.constexpr, SCALED: tl.constexpr,
    IDENTITY: tl.constexpr, EVEN: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_release(PDL)
    left = tl.program_id(1) * part
    right = tl.minimum(left + part, depth)
    plane = h + tl.program_id(1).to(tl.int64) * num_pairs * max_rank
    if RUNS:
        at = tl.program_id(0)
        end = at + 1
        if not IDENTITY:
            end = tl.minimum(tl.load(run_end + at), at + BLOCK_M)
            if (at - tl.load(run_start + at)) % BLOCK_M != 0:
                end = at
    else:
        at = tl.program_id(0) * BLOCK_M
        end = tl.minimum(at + BLOCK_M, num_pairs)
    while at < end:
        stop = end
        if not RUNS:
            stop = tl.minimum(tl.load(run_end + at), end)
        if IDENTITY:
            slot = tl.load(address + at // TOP_K)
            expert = tl.load(topk_ids + at).to(tl.int64)
            there = (slot >= 0) & (expert >= 0) & (expert < num_experts)
            rank = tl.load(rank_at + slot, mask=there, other=0)
            a_at = tl.load(rank_at + num_slots + slot, mask=there, other=0)
            a_at += expert * tl.load(rank_at + 2 * num_slots + slot, mask=there, other=0)
        else:
            rank = tl.load(rank_at + at).to(tl.int64)
            a_at = tl.load(address + at)
        # Here, where it is computed: the compiler forgets it of a function's argument.
        a_at = tl.multiple_of(a_at, ALIGNMENT)
        if rank > 0:
            _shrink_run(
                at, stop, hidden, pair_at, arena, a_at, rank, plane, left, right, depth,
                max_rank, stride_x, TOP_K, BY_POSITION, SCALED, IDENTITY, EVEN,
                PRECISION, BLOCK_M, BLOCK_K, BLOCK_R,
            )  # fmt: skip
        at = stop


def moe_shrink(
    hidden: torch.Tensor,
    order: PairOrder,
    shape: ShrinkShape,
    is_down: bool = False,
    scaled: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """h of gate_up, or of down, whose input `hidden` is by position; see the table above."""
    assert order.factors is not None
    assert shape.by_run or not order.is_identity
    assert hidden.stride(1) == 1, hidden.stride()
    factors = order.factors
    lora = factors.down if is_down else factors.gate_up
    assert lora is not None
    pairs, depth = order.num_pairs, hidden.shape[1]
    part = triton.cdiv(triton.cdiv(depth, shape.planes), shape.block_k) * shape.block_k
    planes = triton.cdiv(depth, part)
    h = torch.empty(planes, pairs, lora.max_rank, dtype=torch.float32, device=hidden.device)
    found = factors.address[int(is_down)], factors.rank[int(is_down)]
    if order.is_identity:
        found = factors.slots, lora.packed
    programs = pairs if shape.by_run else triton.cdiv(pairs, shape.block_m)
    _shrink_kernel[(programs, planes)](
        hidden,
        order.topk_ids,
        order.pair,
        order.run_start,
        order.run_end,
        lora.arena,
        *found,
        h,
        pairs,
        order.num_experts,
        lora.num_slots,
        depth,
        part,
        lora.max_rank,
        hidden.stride(0),
        TOP_K=order.top_k,
        RUNS=shape.by_run,
        BY_POSITION=is_down,
        SCALED=scaled,
        IDENTITY=order.is_identity,
        EVEN=depth % shape.block_k == 0,
        ALIGNMENT=lora.alignment_of(depth),
        PRECISION=dot_precision(hidden.dtype),
        BLOCK_M=shape.block_m,
        BLOCK_K=shape.block_k,
        BLOCK_R=power_of_two(lora.max_rank, 16, 64),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **pdl_options(pdl),
    )
    return h
