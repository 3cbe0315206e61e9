"""down product, LoRA expand and routing weight: out[pair[p]] = scale[p] * (W inter[p] + ... ).

At position p of expert e and slot s, q = pair[p]:
  out[q] = scale[p] * (W[e] inter[p] + bias[e] + B[s, e] (sum over planes j of h[j, p]))

| array | shape | holds |
|---|---|---|
| inter | [P, I] | by position |
| weight | [E, H, I] in any strides | |
| h | see `moe_shrink` | by position |
| scale | [P] or None | by position; None: ones |
| out | [P, H] | by pair; rows of sentinels unspecified |
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vexpert.kernels.arrivals import arrive, await_arrivals
from vexpert.kernels.common import ceil_div, dot_precision, pdl_options, pdl_release, pdl_wait
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.moe_delta import Delta, wait_for_pieces
from vexpert.kernels.moe_gate_up import (
    Expand,
    TileShape,
    delta_tensors,
    expand_options,
    expand_tensors,
    factor_stride,
    inner_options,
    inner_shrinks,
    weight_rows,
)
from vexpert.kernels.moe_order import PairOrder
from vexpert.kernels.moe_shrink import shrink_position
from vexpert.kernels.moe_tiles import (
    find_b,
    items_of,
    load_b,
    own_rows,
    read_tile,
    shrunk_of_items,
    shrunk_rows,
    spread_rows,
)


@triton.jit
def _down_tile(
    expert,
    tile,
    start,
    end,
    block,
    inter,
    inter_rows,
    weight,
    weight_rows,
    bias,
    scale_at,
    out,
    pair_at,
    run_first,
    run_stop,
    num_runs,
    delta,
    pending,
    slot_at,
    h,
    arena,
    address,
    rank,
    arrivals,
    shrinks,
    consumers,
    num_pairs,
    factor_stride,
    num_slots,
    depth,
    size,
    stride_we,
    stride_wn,
    stride_wk,
    max_rank,
    TOP_K: tl.constexpr,
    IDENTITY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_LORA: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    INNER: tl.constexpr,
    PLANES: tl.constexpr,
    BY_RUN: tl.constexpr,
    GROUP: tl.constexpr,
    ITEM_STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    RANK_STEPS: tl.constexpr,
    SLICE_WIDTH: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    RUN_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    position = start + tl.arange(0, BLOCK_M)
    mine = position < end
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < size
    k = tl.arange(0, BLOCK_K)
    expert = expert.to(tl.int64)
    x_at = inter + position.to(tl.int64)[:, None] * depth + k[None, :]
    w_at = weight + expert * stride_we
    w_at += n.to(tl.int64)[None, :] * stride_wn + k[:, None] * stride_wk
    line = (expert * size + block * BLOCK_N).to(tl.int32)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # What the end needs is asked for here: there it would be waited for.
    pair = position
    if not IDENTITY:
        pair = tl.load(pair_at + position, mask=mine, other=0)
    if HAS_SCALE:
        scale = tl.load(scale_at + position, mask=mine, other=0.0).to(tl.float32)
    if HAS_LORA:
        dtype: tl.constexpr = arena.dtype.element_ty
        plane = num_pairs * max_rank
        if BY_RUN:
            runs = tl.load(num_runs + tile)
        if EARLY:
            pdl_wait(PDL)
        if BY_RUN and EARLY:
            rows = shrunk_rows(
                h, position, mine, plane, max_rank, 0, SLICE_WIDTH, 0, BLOCK_R, dtype, PLANES
            )
        if PREFETCH:
            index0, item0, first0, stop0, exists0, r0 = items_of(
                0, tile, start, end, run_first, run_stop, BY_RUN, RUN_STRIDE, GROUP, BLOCK_R
            )
            used0, b_at0 = find_b(
                address, rank, index0, item0, exists0, expert, r0, factor_stride, num_slots,
                4, 1, TOP_K, IDENTITY, BY_RUN, GROUP,
            )  # fmt: skip
            if not BY_RUN:
                b_tile0 = load_b(arena, b_at0, used0, r0, n, inside, size, ALIGNMENT)
    for first in range(0, depth, BLOCK_K):
        if TMA:
            x_tile = inter_rows.load([start, first])
            w_tile = weight_rows.load([line, first]).T
        elif EVEN:
            x_tile = tl.load(x_at, mask=mine[:, None], other=0.0)
            w_tile = tl.load(w_at)
        else:
            within = first + k < depth
            x_tile = tl.load(x_at, mask=mine[:, None] & within[None, :], other=0.0)
            w_tile = tl.load(w_at, mask=inside[None, :] & within[:, None], other=0.0)
        total = tl.dot(x_tile, w_tile, total, input_precision=PRECISION)
        x_at += BLOCK_K
        w_at += BLOCK_K * stride_wk
    if HAS_BIAS:
        total += tl.load(bias + expert * size + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    if HAS_LORA:
        if INNER:
            await_arrivals(arrivals, shrinks, consumers, tl.program_id(0) - shrinks)
        elif not EARLY:
            pdl_wait(PDL)  # for the shrink; inter was complete before this kernel could start
        count = end - start
        if BY_RUN:
            count = runs
        for step in tl.static_range(RANK_STEPS):
            if BY_RUN and not EARLY:
                rows = shrunk_rows(
                    h, position, mine, plane, max_rank, 0, SLICE_WIDTH, step, BLOCK_R, dtype, PLANES
                )
            if PREFETCH:
                own = own_rows(position, first0, stop0)
                if BY_RUN:
                    b_tile0 = load_b(arena, b_at0, used0, r0, n, inside, size, ALIGNMENT)
                if BY_RUN:
                    h_tile = spread_rows(rows, own & used0[None, :], GROUP, BLOCK_R)
                else:
                    h_tile = shrunk_of_items(
                        h, address, rank, first0, own, used0, r0, plane, num_pairs, num_slots,
                        max_rank, 4, 1, TOP_K, IDENTITY, dtype, PLANES,
                    )  # fmt: skip
                total = tl.dot(h_tile, b_tile0, total, input_precision=PRECISION)
            for item in tl.range(GROUP if PREFETCH else 0, count, GROUP, num_stages=ITEM_STAGES):
                index, its, first_at, stop, exists, r = items_of(
                    item, tile, start, end, run_first, run_stop, BY_RUN, RUN_STRIDE, GROUP, BLOCK_R
                )
                r += step * BLOCK_R
                own = own_rows(position, first_at, stop)
                used, b_at = find_b(
                    address, rank, index, its, exists, expert, r, factor_stride, num_slots,
                    4, 1, TOP_K, IDENTITY, BY_RUN, GROUP,
                )  # fmt: skip
                b_tile = load_b(arena, b_at, used, r, n, inside, size, ALIGNMENT)
                if BY_RUN:
                    h_tile = spread_rows(rows, own & used[None, :], GROUP, BLOCK_R)
                else:
                    h_tile = shrunk_of_items(
                        h, address, rank, first_at, own, used, r, plane, num_pairs, num_slots,
                        max_rank, 4, 1, TOP_K, IDENTITY, dtype, PLANES,
                    )  # fmt: skip
                total = tl.dot(h_tile, b_tile, total, input_precision=PRECISION)
    if HAS_DELTA:
        slot = tl.load(slot_at + position, mask=mine, other=-1)
        wait_for_pieces(pending + tile)
        delta_at = delta + position.to(tl.int64)[:, None] * size + n[None, :]
        adapted = (slot >= 0)[:, None] & inside[None, :]
        # -0: what is added to a base row leaves its bits alone.
        total += tl.load(delta_at, mask=adapted, other=-0.0).to(tl.float32)
    if HAS_SCALE:
        total *= scale[:, None]
    target = out + pair.to(tl.int64)[:, None] * size + n[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mine[:, None] & inside[None, :])


@direct_launch
@triton.jit
def _down_kernel(
    inter,
    inter_rows,
    inter_tail_rows,
    weight,
    weight_rows,
    bias,
    scale_at,
    out,
    topk_ids,
    pair_at,
    tile_expert,
    tile_start,
    tile_end,
    num_tiles,
    run_first,
    run_stop,
    num_runs,
    delta,
    pending,
    slot_at,
    h,
    arena,
    address,
    rank,
    arrivals,
    run_start,
    run_end,
    shrinks,
    shrink_part,
    num_pairs,
    factor_stride,
    num_slots,
    num_experts,
    depth,
    size,
    stride_we,
    stride_wn,
    stride_wk,
    max_rank,
    TOP_K: tl.constexpr,
    IDENTITY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_LORA: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    INNER: tl.constexpr,
    A_M: tl.constexpr,
    A_K: tl.constexpr,
    A_R: tl.constexpr,
    A_EVEN: tl.constexpr,
    A_ALIGNMENT: tl.constexpr,
    PLANES: tl.constexpr,
    BY_RUN: tl.constexpr,
    GROUP: tl.constexpr,
    ITEM_STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    RANK_STEPS: tl.constexpr,
    SLICE_WIDTH: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    RUN_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_release(PDL)
    # With a shrink between, inter was complete before this kernel could start: wait later.
    pdl_wait(PDL and not (HAS_LORA or HAS_DELTA))
    blocks = tl.cdiv(size, BLOCK_N)
    program = tl.program_id(0) - shrinks
    tile = program // blocks
    block = program % blocks
    if INNER:
        if program < 0:
            shrink_position(
                tl.program_id(0) // PLANES, tl.program_id(0) % PLANES, inter, topk_ids, pair_at,
                run_start, run_end, arena, address + num_pairs, rank + num_pairs, h,
                num_pairs, num_experts, num_slots, depth, shrink_part, max_rank, depth, TOP_K,
                True, False, False, A_EVEN, A_ALIGNMENT, PRECISION, A_M, A_K, A_R, False, PDL,
            )  # fmt: skip
            arrive(arrivals)
            return
        pdl_wait(PDL)
    expert, start, end = read_tile(
        tile, topk_ids, tile_expert, tile_start, tile_end, num_tiles, num_experts, IDENTITY
    )
    consumers = 1  # even without a tile somebody resets the count
    if INNER:
        consumers = tl.maximum(tl.load(num_tiles) * blocks, 1)
    if end < 0:
        if INNER and program == 0:
            await_arrivals(arrivals, shrinks, consumers, program)
        return
    if (TAIL_M < BLOCK_M) & (end - start <= TAIL_M):
        _down_tile(
            expert, tile, start, end, block, inter, inter_tail_rows, weight, weight_rows, bias,
            scale_at, out, pair_at, run_first, run_stop, num_runs, delta, pending, slot_at, h,
            arena, address, rank, arrivals, shrinks, consumers, num_pairs, factor_stride, num_slots,
            depth, size, stride_we, stride_wn, stride_wk, max_rank, TOP_K, IDENTITY, HAS_BIAS,
            HAS_SCALE, HAS_LORA, HAS_DELTA, INNER, PLANES, BY_RUN, GROUP, ITEM_STAGES, PREFETCH,
            EARLY, BLOCK_R, RANK_STEPS, SLICE_WIDTH, ALIGNMENT, EVEN, TMA, PRECISION, RUN_STRIDE,
            TAIL_M, BLOCK_N, BLOCK_K, PDL,
        )  # fmt: skip
    else:
        _down_tile(
            expert, tile, start, end, block, inter, inter_rows, weight, weight_rows, bias,
            scale_at, out, pair_at, run_first, run_stop, num_runs, delta, pending, slot_at, h,
            arena, address, rank, arrivals, shrinks, consumers, num_pairs, factor_stride, num_slots,
            depth, size, stride_we, stride_wn, stride_wk, max_rank, TOP_K, IDENTITY, HAS_BIAS,
            HAS_SCALE, HAS_LORA, HAS_DELTA, INNER, PLANES, BY_RUN, GROUP, ITEM_STAGES, PREFETCH,
            EARLY, BLOCK_R, RANK_STEPS, SLICE_WIDTH, ALIGNMENT, EVEN, TMA, PRECISION, RUN_STRIDE,
            BLOCK_M, BLOCK_N, BLOCK_K, PDL,
        )  # fmt: skip


def moe_down(
    inter: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    order: PairOrder,
    shape: TileShape,
    lora: Expand | Delta | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """out [P, H], see the table above; weight [E, H, I] (a view, if transposed)."""
    pairs, depth = inter.shape
    size = weight.shape[1]
    out = torch.empty(pairs, size, dtype=inter.dtype, device=inter.device)
    none = inter
    expand, delta = delta_tensors(lora, none)
    tiles = pairs if order.is_identity else order.max_tiles
    tail_m = shape.tail_m or order.block_m
    rows = [inter, inter]
    if shape.tma:
        rows = [
            TensorDescriptor.from_tensor(inter, [m, shape.block_k]) for m in (order.block_m, tail_m)
        ]
    shrinks, inner = inner_shrinks(expand, order, none, depth)
    _down_kernel[(shrinks + tiles * ceil_div(size, shape.block_n),)](
        inter,
        *rows,
        weight,
        weight_rows(weight, shape) if shape.tma else weight,
        none if bias is None else bias,
        none if scale is None else scale,
        out,
        order.topk_ids,
        order.pair,
        order.tile_expert,
        order.tile_start,
        order.tile_end,
        order.num_tiles,
        *expand_tensors(expand, delta, order, none),
        *inner,
        pairs,
        factor_stride(expand, pairs),
        0 if expand is None else expand.factors.num_slots,
        order.num_experts,
        depth,
        size,
        *weight.stride(),
        0 if expand is None else expand.h.shape[2],
        TOP_K=order.top_k,
        IDENTITY=order.is_identity,
        HAS_BIAS=bias is not None,
        HAS_SCALE=scale is not None,
        **expand_options(expand, size),
        HAS_DELTA=isinstance(lora, Delta),
        **inner_options(expand, depth),
        EVEN=depth % shape.block_k == 0 and size % shape.block_n == 0,
        TMA=shape.tma,
        PRECISION=dot_precision(inter.dtype),
        RUN_STRIDE=order.block_m,
        BLOCK_M=order.block_m,
        TAIL_M=tail_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **pdl_options(pdl),
    )
    return out
