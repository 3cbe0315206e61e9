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

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vexpert.kernels.arrivals import arrive, await_arrivals
from vexpert.kernels.common import pdl_release, pdl_wait
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.moe_delta import Delta
from vexpert.kernels.moe_items import TileLora, add_delta, add_lora, begin_lora
from vexpert.kernels.moe_order import PairOrder
from vexpert.kernels.moe_product import Expand, TileShape, product_arguments, weight_rows
from vexpert.kernels.moe_shrink import shrink_position
from vexpert.kernels.moe_tiles import Tile, read_tile


class Down(NamedTuple):
    """The base product: the kernel's arguments, and in capitals its constants."""

    inter: Any
    weight: Any
    weight_rows: Any
    bias: Any
    scale_at: Any
    out: Any
    pair_at: Any
    depth: Any
    size: Any
    stride_we: Any
    stride_wn: Any
    stride_wk: Any
    IDENTITY: Any
    HAS_BIAS: Any
    HAS_SCALE: Any
    EVEN: Any
    TMA: Any
    PRECISION: Any
    BLOCK_N: Any
    BLOCK_K: Any


@triton.jit
def _down_tile(expert, index, start, end, block, inter_rows, of, lora, BLOCK_M: tl.constexpr):
    """Rows start ... end of one expert, block `block` of the columns."""
    position = start + tl.arange(0, BLOCK_M)
    mine = position < end
    n = block * of.BLOCK_N + tl.arange(0, of.BLOCK_N)
    inside = n < of.size
    k = tl.arange(0, of.BLOCK_K)
    expert = expert.to(tl.int64)
    x_at = of.inter + position.to(tl.int64)[:, None] * of.depth + k[None, :]
    w_at = of.weight + expert * of.stride_we
    w_at += n.to(tl.int64)[None, :] * of.stride_wn + k[:, None] * of.stride_wk
    line = (expert * of.size + block * of.BLOCK_N).to(tl.int32)
    total = tl.zeros((BLOCK_M, of.BLOCK_N), dtype=tl.float32)
    # What the end needs is asked for here: there it would be waited for.
    pair = position
    if not of.IDENTITY:
        pair = tl.load(of.pair_at + position, mask=mine, other=0)
    if of.HAS_SCALE:
        scale = tl.load(of.scale_at + position, mask=mine, other=0.0).to(tl.float32)
    tile = Tile(index, expert, start, end, position, mine, n, inside, of.size)
    if lora.HAS_LORA:
        begun = begin_lora(tile, lora)
    for first in range(0, of.depth, of.BLOCK_K):
        if of.TMA:
            x_tile = inter_rows.load([start, first])
            w_tile = of.weight_rows.load([line, first]).T
        elif of.EVEN:
            x_tile = tl.load(x_at, mask=mine[:, None], other=0.0)
            w_tile = tl.load(w_at)
        else:
            within = first + k < of.depth
            x_tile = tl.load(x_at, mask=mine[:, None] & within[None, :], other=0.0)
            w_tile = tl.load(w_at, mask=inside[None, :] & within[:, None], other=0.0)
        total = tl.dot(x_tile, w_tile, total, input_precision=of.PRECISION)
        x_at += of.BLOCK_K
        w_at += of.BLOCK_K * of.stride_wk
    if of.HAS_BIAS:
        bias = tl.load(of.bias + expert * of.size + n, mask=inside, other=0.0)
        total += bias.to(tl.float32)[None, :]
    if lora.HAS_LORA:
        total, _ = add_lora(total, total, begun, tile, lora)
    if lora.HAS_DELTA:
        total, _ = add_delta(total, total, tile, lora)
    if of.HAS_SCALE:
        total *= scale[:, None]
    target = of.out + pair.to(tl.int64)[:, None] * of.size + n[None, :]
    tl.store(target, total.to(of.out.dtype.element_ty), mask=mine[:, None] & inside[None, :])


@triton.jit
def _down_rows(
    expert, index, start, end, block, inter_rows, inter_tail_rows, of, lora,
    TAIL_M: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The same, in the smaller tile if it holds them."""
    if (TAIL_M < BLOCK_M) & (end - start <= TAIL_M):
        _down_tile(expert, index, start, end, block, inter_tail_rows, of, lora, TAIL_M)
    else:
        _down_tile(expert, index, start, end, block, inter_rows, of, lora, BLOCK_M)


@direct_launch
@triton.jit
def _down_kernel(
    inter, inter_rows, inter_tail_rows, weight, weight_rows, bias, scale_at, out,
    topk_ids, pair_at, tile_expert, tile_start, tile_end, num_tiles,
    run_first, run_stop, num_runs, delta, pending, slot_at, h, arena, address, rank,
    arrivals, run_start, run_end, shrinks, shrink_part, num_pairs, factor_stride, num_slots,
    num_experts, depth, size, stride_we, stride_wn, stride_wk, max_rank,
    TOP_K: tl.constexpr, IDENTITY: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_LORA: tl.constexpr, HAS_DELTA: tl.constexpr, INNER: tl.constexpr,
    A_M: tl.constexpr, A_K: tl.constexpr, A_R: tl.constexpr,
    A_EVEN: tl.constexpr, A_ALIGNMENT: tl.constexpr, PLANES: tl.constexpr,
    BY_RUN: tl.constexpr, GROUP: tl.constexpr, ITEM_STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, EARLY: tl.constexpr, BLOCK_R: tl.constexpr,
    RANK_STEPS: tl.constexpr, SLICE_WIDTH: tl.constexpr, ALIGNMENT: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, RUN_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, TAIL_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
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
    # Where they are passed: an assignment would make tensors of their constants.
    _down_rows(
        expert, tile, start, end, block, inter_rows, inter_tail_rows,
        Down(
            inter, weight, weight_rows, bias, scale_at, out, pair_at, depth, size,
            stride_we, stride_wn, stride_wk, IDENTITY, HAS_BIAS, HAS_SCALE, EVEN, TMA, PRECISION,
            BLOCK_N, BLOCK_K,
        ),
        TileLora(
            run_first, run_stop, num_runs, delta, pending, slot_at, h, arena, address, rank,
            arrivals, shrinks, consumers, num_pairs, factor_stride, num_slots, max_rank,
            HAS_LORA, HAS_DELTA, INNER, PLANES, BY_RUN, GROUP, ITEM_STAGES, PREFETCH, EARLY,
            BLOCK_R, RANK_STEPS, SLICE_WIDTH, ALIGNMENT, 4, 1, TOP_K, IDENTITY, RUN_STRIDE,
            PRECISION, PDL,
        ),
        TAIL_M, BLOCK_M,
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
    """out [P, H] in inter's dtype: the table above; reference: `ops.reference.grouped_gemm`.

    inter [P, I] float16, bfloat16 or float32, contiguous; weight [E, H, I] (a view, if transposed)
    and bias [E, H] in the same dtype; scale [P] of any float dtype. lora: its float32 sums are
    added before the scale. pdl: may start before the launch before it has ended.
    """
    pairs, size = inter.shape[0], weight.shape[1]
    assert inter.is_contiguous(), inter.stride()
    out = torch.empty(pairs, size, dtype=inter.dtype, device=inter.device)
    its = product_arguments(inter, weight, order, size, shape, lora, pdl)
    rows = [inter, inter]
    if shape.tma:
        heights = order.block_m, shape.tail_m or order.block_m
        rows = [TensorDescriptor.from_tensor(inter, [m, shape.block_k]) for m in heights]
    _down_kernel[(its.programs,)](
        inter, *rows, weight, weight_rows(weight, shape), inter if bias is None else bias,
        inter if scale is None else scale, out, *its.middle, *weight.stride(), its.width,
        HAS_BIAS=bias is not None, HAS_SCALE=scale is not None, **its.options,
    )  # fmt: skip
    return out
