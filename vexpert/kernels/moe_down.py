"""down product, LoRA expand and routing weight: out[pair[p]] = weight[p] * (W inter[p] + ... ).

At position p of expert e and slot s:
  y        = W[e] inter[p] + bias[e] + B[s, e] (sum over planes j of hd[j, p])
  out[q]   = topk_weights[q] * y            q = pair[p]; without topk_weights: y
`moe_down_tokens` sums over a token's pairs instead, in order: for a handful of tokens.

| array | shape | holds |
|---|---|---|
| inter | [P, I] | by position |
| weight | [E, H, I] in any strides | |
| hd | [PLANES, P, max_rank] float32 | by position |
| topk_weights | [T, K] or None | |
| out | [P, H] by pair (rows of sentinels unspecified), or [T, H] | |
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vexpert.kernels.common import dot_precision, pdl_options, pdl_release, pdl_wait, power_of_two
from vexpert.kernels.moe_gate_up import SiteFactors, TileShape, weight_rows
from vexpert.kernels.moe_order import PairOrder
from vexpert.kernels.moe_tiles import expand_run, read_run, read_tile


@triton.jit
def _down_tile(
    expert,
    start,
    end,
    block,
    inter,
    inter_rows,
    weight,
    weight_rows,
    bias,
    topk_weights,
    out,
    slots,
    pair_at,
    slot_at,
    run_end,
    hd,
    arena,
    slice_rank,
    slice_column,
    b_offset,
    b_stride,
    num_pairs,
    depth,
    size,
    stride_we,
    stride_wn,
    stride_wk,
    max_rank,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_LORA: tl.constexpr,
    PLANES: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
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
        at = start
        while at < end:
            slot, stop = read_run(at, end, slots, slot_at, run_end, TOP_K, False)
            if slot >= 0:
                own = mine & (position >= at) & (position < stop)
                total = expand_run(
                    total, hd, arena, slice_rank, slice_column, b_offset, b_stride, slot, expert,
                    position, own, n, size, num_pairs * max_rank, max_rank, PLANES, BLOCK_R,
                    PRECISION,
                )  # fmt: skip
            at = stop
    pair = tl.load(pair_at + position, mask=mine, other=0)
    if HAS_WEIGHTS:
        total *= tl.load(topk_weights + pair, mask=mine, other=0.0).to(tl.float32)[:, None]
    target = out + pair.to(tl.int64)[:, None] * size + n[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mine[:, None] & inside[None, :])


@triton.jit
def _down_kernel(
    inter,
    inter_rows,
    inter_tail_rows,
    weight,
    weight_rows,
    bias,
    topk_weights,
    out,
    slots,
    pair_at,
    slot_at,
    run_end,
    tile_expert,
    tile_start,
    tile_end,
    num_tiles,
    hd,
    arena,
    slice_rank,
    slice_column,
    b_offset,
    b_stride,
    num_pairs,
    depth,
    size,
    stride_we,
    stride_wn,
    stride_wk,
    max_rank,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_LORA: tl.constexpr,
    PLANES: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_release(PDL)
    pdl_wait(PDL)
    blocks = tl.cdiv(size, BLOCK_N)
    tile = tl.program_id(0) // blocks
    expert, start, end = read_tile(
        tile, tile_expert, tile_expert, tile_start, tile_end, num_tiles, 0, False
    )
    if end < 0:
        return
    block = tl.program_id(0) % blocks
    if (TAIL_M < BLOCK_M) & (end - start <= TAIL_M):
        _down_tile(
            expert, start, end, block, inter, inter_tail_rows, weight, weight_rows, bias, topk_weights, out, slots, pair_at, slot_at, run_end, hd, arena, slice_rank, slice_column, b_offset, b_stride, num_pairs, depth, size, stride_we, stride_wn, stride_wk, max_rank, TOP_K, HAS_BIAS, HAS_WEIGHTS, HAS_LORA, PLANES, EVEN, TMA, PRECISION, TAIL_M, BLOCK_N, BLOCK_K, BLOCK_R, PDL,
        )  # fmt: skip
    else:
        _down_tile(
            expert, start, end, block, inter, inter_rows, weight, weight_rows, bias, topk_weights, out, slots, pair_at, slot_at, run_end, hd, arena, slice_rank, slice_column, b_offset, b_stride, num_pairs, depth, size, stride_we, stride_wn, stride_wk, max_rank, TOP_K, HAS_BIAS, HAS_WEIGHTS, HAS_LORA, PLANES, EVEN, TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, PDL,
        )  # fmt: skip


@triton.jit
def _down_tokens_kernel(
    inter,
    weight,
    bias,
    topk_ids,
    topk_weights,
    out,
    slots,
    hd,
    arena,
    slice_rank,
    slice_column,
    b_offset,
    b_stride,
    num_pairs,
    num_experts,
    depth,
    size,
    stride_we,
    stride_wn,
    stride_wk,
    max_rank,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_LORA: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_release(PDL)
    token = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < size
    k = tl.arange(0, BLOCK_K)
    pdl_wait(PDL)
    result = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for i in range(TOP_K):
        pair = token * TOP_K + i
        expert = tl.load(topk_ids + pair).to(tl.int64)
        if (expert >= 0) & (expert < num_experts):
            total = tl.zeros((BLOCK_N,), dtype=tl.float32)
            line = inter + pair.to(tl.int64) * depth
            w_line = weight + expert * stride_we + n.to(tl.int64)[:, None] * stride_wn
            for first in range(0, depth, BLOCK_K):
                within = first + k < depth
                x_part = tl.load(line + first + k, mask=within, other=0.0).to(tl.float32)
                w_tile = tl.load(
                    w_line + (first + k)[None, :] * stride_wk,
                    mask=inside[:, None] & within[None, :],
                    other=0.0,
                )
                total += tl.sum(w_tile.to(tl.float32) * x_part[None, :], 1)
            if HAS_BIAS:
                total += tl.load(bias + expert * size + n, mask=inside, other=0.0).to(tl.float32)
            if HAS_LORA:
                slot = tl.load(slots + token)
                if slot >= 0:
                    rank = tl.load(slice_rank + slot)
                    row = hd + pair * max_rank + tl.load(slice_column + slot)
                    b = arena + tl.load(b_offset + slot) + expert * tl.load(b_stride + slot)
                    for r in range(0, rank, BLOCK_R):
                        inner = r + tl.arange(0, BLOCK_R)
                        used = inner < rank
                        h = tl.load(row + inner, mask=used, other=0.0)
                        for j in tl.static_range(1, PLANES):
                            at = row + j * num_pairs * max_rank + inner
                            h += tl.load(at, mask=used, other=0.0)
                        h = h.to(arena.dtype.element_ty).to(tl.float32)
                        b_tile = tl.load(
                            b + inner[None, :] * size + n[:, None],
                            mask=used[None, :] & inside[:, None],
                            other=0.0,
                        )
                        total += tl.sum(b_tile.to(tl.float32) * h[None, :], 1)
            if HAS_WEIGHTS:
                total *= tl.load(topk_weights + pair).to(tl.float32)
            result += total
    target = out + token.to(tl.int64) * size + n
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)


def _lora_arguments(lora: SiteFactors | None, none: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if lora is None:
        return (none,) * 5
    return lora.arena, lora.slice_rank, lora.slice_column, lora.b_offset, lora.b_stride


def moe_down(
    inter: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    order: PairOrder,
    shape: TileShape,
    hd: torch.Tensor | None = None,
    lora: SiteFactors | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """out [P, H], see the table above; weight [E, H, I] (a view, if transposed)."""
    assert not order.is_identity
    pairs, depth = inter.shape
    size = weight.shape[1]
    out = torch.empty(pairs, size, dtype=inter.dtype, device=inter.device)
    none = inter
    tail_m = shape.tail_m or order.block_m
    rows = [inter, inter]
    if shape.tma:
        rows = [TensorDescriptor.from_tensor(inter, [m, shape.block_k]) for m in (order.block_m, tail_m)]
    _down_kernel[(order.max_tiles * triton.cdiv(size, shape.block_n),)](
        inter,
        *rows,
        weight,
        weight_rows(weight, shape) if shape.tma else weight,
        none if bias is None else bias,
        none if topk_weights is None else topk_weights,
        out,
        none if order.slots is None else order.slots,
        order.pair,
        order.slot,
        order.run_end,
        order.tile_expert,
        order.tile_start,
        order.tile_end,
        order.num_tiles,
        none if hd is None else hd,
        *_lora_arguments(lora, none),
        pairs,
        depth,
        size,
        *weight.stride(),
        0 if lora is None else lora.max_rank,
        TOP_K=order.top_k,
        HAS_BIAS=bias is not None,
        HAS_WEIGHTS=topk_weights is not None,
        HAS_LORA=lora is not None,
        PLANES=1 if hd is None else hd.shape[0],
        EVEN=depth % shape.block_k == 0 and size % shape.block_n == 0,
        TMA=shape.tma,
        PRECISION=dot_precision(inter.dtype),
        BLOCK_M=order.block_m,
        TAIL_M=tail_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        BLOCK_R=16 if lora is None else power_of_two(lora.max_rank, 16, 64),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **pdl_options(pdl),
    )
    return out


def moe_down_tokens(
    inter: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    order: PairOrder,
    shape: TileShape,
    hd: torch.Tensor | None = None,
    lora: SiteFactors | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """out [T, H], see the table above; `order` is the identity."""
    assert order.is_identity
    pairs, depth = inter.shape
    tokens, size = order.topk_ids.shape[0], weight.shape[1]
    out = torch.empty(tokens, size, dtype=inter.dtype, device=inter.device)
    none = inter
    _down_tokens_kernel[(triton.cdiv(size, shape.block_n), tokens)](
        inter,
        weight,
        none if bias is None else bias,
        order.topk_ids,
        none if topk_weights is None else topk_weights,
        out,
        none if order.slots is None else order.slots,
        none if hd is None else hd,
        *_lora_arguments(lora, none),
        pairs,
        order.num_experts,
        depth,
        size,
        *weight.stride(),
        0 if lora is None else lora.max_rank,
        TOP_K=order.top_k,
        HAS_BIAS=bias is not None,
        HAS_WEIGHTS=topk_weights is not None,
        HAS_LORA=lora is not None,
        PLANES=1 if hd is None else hd.shape[0],
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        BLOCK_R=16 if lora is None else power_of_two(lora.max_rank, 16, 64),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **pdl_options(pdl),
    )
    return out
