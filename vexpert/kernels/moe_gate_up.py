"""gate_up product, LoRA expand and activation in one.

At position p of expert e and slot s, x = hidden[pair[p] / K]:
  g, u         = W[e] x + bias[e] + B[s, e] (sum over planes j of h[j, p])     h: see `moe_shrink`
  inter[p]     = activation(g, u)                          [I], in x's dtype

| array | shape | holds |
|---|---|---|
| hidden | [T, H], or [P, H] when SCALED | inputs of tokens, or of pairs |
| weight | [E, n * I, H], any strides | gate at column_step * i, up at up_start + column_step * i |
| h | see `moe_shrink` | shrunk rows by position |
| inter | [P, I] | by position |
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vexpert.kernels.activate import activate
from vexpert.kernels.activations import Activation
from vexpert.kernels.arrivals import arrive, await_arrivals
from vexpert.kernels.common import pdl_release, pdl_wait
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.moe_delta import Delta
from vexpert.kernels.moe_items import TileLora, add_delta, add_lora, begin_lora
from vexpert.kernels.moe_order import PairOrder
from vexpert.kernels.moe_product import Expand, TileShape, product_arguments, weight_rows
from vexpert.kernels.moe_shrink import shrink_position
from vexpert.kernels.moe_tiles import Tile, read_tile


class GateUp(NamedTuple):
    """The base product: the kernel's arguments, and in capitals its constants."""

    hidden: Any
    weight: Any
    weight_rows: Any
    bias: Any
    inter: Any
    pair_at: Any
    depth: Any
    size: Any
    stride_x: Any
    stride_we: Any
    stride_wn: Any
    stride_wk: Any
    up_start: Any
    column_step: Any
    TOP_K: Any
    SCALED: Any
    IDENTITY: Any
    GATED: Any
    HAS_BIAS: Any
    ACTIVATION: Any
    ALPHA: Any
    LIMIT: Any
    EVEN: Any
    TMA: Any
    PRECISION: Any
    BLOCK_N: Any
    BLOCK_K: Any


@triton.jit
def _gate_up_tile(expert, index, start, end, block, of, lora, BLOCK_M: tl.constexpr):
    """Rows start ... end of one expert, block `block` of the columns."""
    position = start + tl.arange(0, BLOCK_M)
    mine = position < end
    source = position
    if not of.IDENTITY:
        source = tl.load(of.pair_at + position, mask=mine, other=0)
    if not of.SCALED:
        source = source // of.TOP_K
    n = block * of.BLOCK_N + tl.arange(0, of.BLOCK_N)
    inside = n < of.size
    k = tl.arange(0, of.BLOCK_K)
    expert = expert.to(tl.int64)
    column = n.to(tl.int64) * of.column_step
    x_at = of.hidden + source.to(tl.int64)[:, None] * of.stride_x + k[None, :]
    gate_at = of.weight + expert * of.stride_we + column[None, :] * of.stride_wn
    gate_at += k[:, None] * of.stride_wk
    up_at = gate_at + of.up_start * of.stride_wn
    slices: tl.constexpr = 2 if of.GATED else 1
    line = (expert * (of.size * slices) + block * of.BLOCK_N).to(tl.int32)
    gate = tl.zeros((BLOCK_M, of.BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, of.BLOCK_N), dtype=tl.float32)
    tile = Tile(index, expert, start, end, position, mine, n, inside, of.size)
    if lora.HAS_LORA:
        begun = begin_lora(tile, lora)
    for first in range(0, of.depth, of.BLOCK_K):
        if of.TMA:
            x_tile = tl.load(x_at, mask=mine[:, None], other=0.0)
            gate_tile = of.weight_rows.load([line, first]).T
        elif of.EVEN:
            x_tile = tl.load(x_at, mask=mine[:, None], other=0.0)
            gate_tile = tl.load(gate_at)
        else:
            within = first + k < of.depth
            x_tile = tl.load(x_at, mask=mine[:, None] & within[None, :], other=0.0)
            keep = inside[None, :] & within[:, None]
            gate_tile = tl.load(gate_at, mask=keep, other=0.0)
        gate = tl.dot(x_tile, gate_tile, gate, input_precision=of.PRECISION)
        if of.GATED:
            if of.TMA:
                up_tile = of.weight_rows.load([line + of.up_start, first]).T
            elif of.EVEN:
                up_tile = tl.load(up_at)
            else:
                up_tile = tl.load(up_at, mask=keep, other=0.0)
            up = tl.dot(x_tile, up_tile, up, input_precision=of.PRECISION)
        x_at += of.BLOCK_K
        gate_at += of.BLOCK_K * of.stride_wk
        up_at += of.BLOCK_K * of.stride_wk
    if of.HAS_BIAS:
        bias_at = of.bias + expert * (of.size * slices) + column
        gate += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)[None, :]
        if of.GATED:
            up_bias = tl.load(bias_at + of.up_start, mask=inside, other=0.0)
            up += up_bias.to(tl.float32)[None, :]
    if lora.HAS_LORA:
        gate, up = add_lora(gate, up, begun, tile, lora)
    if lora.HAS_DELTA:
        gate, up = add_delta(gate, up, tile, lora)
    out = activate(gate, up, of.ACTIVATION, of.ALPHA, of.LIMIT).to(of.inter.dtype.element_ty)
    target = of.inter + position.to(tl.int64)[:, None] * of.size + n[None, :]
    tl.store(target, out, mask=mine[:, None] & inside[None, :])


@triton.jit
def _gate_up_rows(
    expert, index, start, end, block, of, lora, TAIL_M: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The same, in the smaller tile if it holds them."""
    if (TAIL_M < BLOCK_M) & (end - start <= TAIL_M):
        _gate_up_tile(expert, index, start, end, block, of, lora, TAIL_M)
    else:
        _gate_up_tile(expert, index, start, end, block, of, lora, BLOCK_M)


@direct_launch
@triton.jit
def _gate_up_kernel(
    hidden, weight, weight_rows, bias, inter, topk_ids, pair_at,
    tile_expert, tile_start, tile_end, num_tiles,
    run_first, run_stop, num_runs, delta, pending, slot_at, h, arena, address, rank,
    arrivals, run_start, run_end, shrinks, shrink_part, num_pairs, factor_stride, num_slots,
    num_experts, depth, size, stride_x, stride_we, stride_wn, stride_wk, up_start, column_step,
    max_rank,
    TOP_K: tl.constexpr, SCALED: tl.constexpr, IDENTITY: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_LORA: tl.constexpr, HAS_DELTA: tl.constexpr, INNER: tl.constexpr,
    A_M: tl.constexpr, A_K: tl.constexpr, A_R: tl.constexpr,
    A_EVEN: tl.constexpr, A_ALIGNMENT: tl.constexpr, PLANES: tl.constexpr,
    BY_RUN: tl.constexpr, GROUP: tl.constexpr, ITEM_STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, EARLY: tl.constexpr, BLOCK_R: tl.constexpr,
    RANK_STEPS: tl.constexpr, SLICE_WIDTH: tl.constexpr, ALIGNMENT: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, RUN_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, TAIL_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_release(PDL)
    # With a shrink between, the order was complete before this kernel could start: wait later.
    pdl_wait(PDL and not (HAS_LORA or HAS_DELTA))
    blocks = tl.cdiv(size, BLOCK_N)
    program = tl.program_id(0) - shrinks
    tile = program // blocks
    block = program % blocks
    if INNER:
        if program < 0:
            shrink_position(
                tl.program_id(0) // PLANES, tl.program_id(0) % PLANES, hidden, topk_ids, pair_at,
                run_start, run_end, arena, address, rank, h,
                num_pairs, num_experts, num_slots, depth, shrink_part, max_rank, stride_x, TOP_K,
                False, SCALED, False, A_EVEN, A_ALIGNMENT, PRECISION, A_M, A_K, A_R, False, PDL,
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
    SLICES: tl.constexpr = 2 if GATED else 1
    # Where they are passed: an assignment would make tensors of their constants.
    _gate_up_rows(
        expert, tile, start, end, block,
        GateUp(
            hidden, weight, weight_rows, bias, inter, pair_at, depth, size,
            stride_x, stride_we, stride_wn, stride_wk, up_start, column_step,
            TOP_K, SCALED, IDENTITY, GATED, HAS_BIAS, ACTIVATION, ALPHA, LIMIT, EVEN, TMA,
            PRECISION, BLOCK_N, BLOCK_K,
        ),
        TileLora(
            run_first, run_stop, num_runs, delta, pending, slot_at, h, arena, address, rank,
            arrivals, shrinks, consumers, num_pairs, factor_stride, num_slots, max_rank,
            HAS_LORA, HAS_DELTA, INNER, PLANES, BY_RUN, GROUP, ITEM_STAGES, PREFETCH, EARLY,
            BLOCK_R, RANK_STEPS, SLICE_WIDTH, ALIGNMENT, 2, SLICES, TOP_K, IDENTITY, RUN_STRIDE,
            PRECISION, PDL,
        ),
        TAIL_M, BLOCK_M,
    )  # fmt: skip


def moe_gate_up(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    order: PairOrder,
    columns: tuple[int, int, int],
    activation: Activation,
    shape: TileShape,
    lora: Expand | Delta | None = None,
    scaled: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """inter [P, I] in hidden's dtype: the table above; reference: `ops.reference.grouped_gemm`.

    hidden [T, H], or [P, H] if `scaled`, float16, bfloat16 or float32 with adjacent columns;
    weight [E, N, H] (a view, if transposed) and bias [E, N] in the same dtype; columns: (I,
    up_start, column_step). lora: its float32 sums are added before the activation. pdl: may start
    before the launch before it has ended. Rows of sentinels are unspecified.
    """
    size, up_start, step = columns
    assert hidden.stride(1) == 1, hidden.stride()
    inter = torch.empty(order.num_pairs, size, dtype=hidden.dtype, device=hidden.device)
    its = product_arguments(hidden, weight, order, size, shape, lora, pdl)
    _gate_up_kernel[(its.programs,)](
        hidden, weight, weight_rows(weight, shape), hidden if bias is None else bias, inter,
        *its.middle, hidden.stride(0), *weight.stride(), up_start, step, its.width,
        SCALED=scaled, GATED=activation.has_gate, HAS_BIAS=bias is not None,
        ACTIVATION=activation.name, ALPHA=activation.alpha, LIMIT=activation.limit, **its.options,
    )  # fmt: skip
    return inter
