"""gate_up product, LoRA expand, activation and the partial sums of down's LoRA shrink, in one.

At position p of expert e and slot s, x = hidden[pair[p] / K]:
  g, u         = W[e] x + bias[e] + B[s, e] h[p]           h: see `moe_shrink`
  inter[p]     = activation(g, u)                          [I], in x's dtype
  hd[j, p]     = A_down[s, e][:, block j] @ inter[p, block j]    block j: BLOCK_N columns
Partial sums are float32, one plane j per block; `moe_down` adds them in order.

| array | shape | holds |
|---|---|---|
| hidden | [T, H], or [P, H] when SCALED | inputs of tokens, or of pairs |
| weight | [E, n * I, H] in any strides | gate at column_step * i, up at up_start + column_step * i |
| h | [PLANES, P, max_rank] float32 | shrunk rows by position |
| inter | [P, I] | by position |
| hd | [ceil(I / BLOCK_N), P, max_rank of down] float32 | by position; base rows unspecified |
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vexpert.kernels.activations import Activation, activate
from vexpert.kernels.common import dot_precision, pdl_options, pdl_release, pdl_wait, power_of_two
from vexpert.kernels.moe_order import PairOrder
from vexpert.kernels.moe_tiles import expand_run, read_run, read_tile


@dataclass(frozen=True)
class SiteFactors:
    """One site's factors as kernels read them: the columns of ops.types.SiteTable."""

    arena: torch.Tensor
    rank: torch.Tensor
    a_offset: torch.Tensor
    a_stride: torch.Tensor
    slice_rank: torch.Tensor
    slice_column: torch.Tensor
    b_offset: torch.Tensor
    b_stride: torch.Tensor
    max_rank: int

    @property
    def num_slots(self) -> int:
        return self.rank.shape[0]


@dataclass(frozen=True)
class TileShape:
    """Columns and depth of a tile, and how Triton runs it."""

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    tail_m: int = 0  # rows of the smaller tile that an expert's last pairs take if they fit; 0: none
    tma: bool = False  # weights through the tensor memory accelerator: [E, N, K] contiguous


def weight_rows(weight: torch.Tensor, shape: TileShape) -> TensorDescriptor:
    """All experts' rows [E * N, K] for block loads of [block_n, block_k]."""
    assert weight.is_contiguous(), weight.stride()
    rows = weight.view(-1, weight.shape[2])
    return TensorDescriptor.from_tensor(rows, [shape.block_n, shape.block_k])


@triton.jit
def _gate_up_tile(
    expert,
    start,
    end,
    block,
    hidden,
    weight,
    weight_rows,
    bias,
    inter,
    topk_ids,
    slots,
    pair_at,
    slot_at,
    run_end,
    h,
    arena,
    slice_rank,
    slice_column,
    b_offset,
    b_stride,
    hd,
    down_arena,
    down_rank,
    down_a_offset,
    down_a_stride,
    num_pairs,
    num_slots,
    depth,
    size,
    stride_x,
    stride_we,
    stride_wn,
    stride_wk,
    up_start,
    column_step,
    max_rank,
    down_max_rank,
    TOP_K: tl.constexpr,
    SCALED: tl.constexpr,
    IDENTITY: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_UP_LORA: tl.constexpr,
    HAS_DOWN_LORA: tl.constexpr,
    PLANES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOWN_BLOCK_R: tl.constexpr,
    WAIT_LATE: tl.constexpr,
    PDL: tl.constexpr,
):
    position = start + tl.arange(0, BLOCK_M)
    mine = position < end
    pair = position
    if not IDENTITY:
        pair = tl.load(pair_at + position, mask=mine, other=0)
    source = pair
    if not SCALED:
        source = pair // TOP_K
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < size
    k = tl.arange(0, BLOCK_K)
    expert = expert.to(tl.int64)
    column = n.to(tl.int64) * column_step
    x_at = hidden + source.to(tl.int64)[:, None] * stride_x + k[None, :]
    gate_at = weight + expert * stride_we + column[None, :] * stride_wn + k[:, None] * stride_wk
    up_at = gate_at + up_start * stride_wn
    line = (expert * (size * (2 if GATED else 1)) + block * BLOCK_N).to(tl.int32)
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, depth, BLOCK_K):
        if TMA:
            x_tile = tl.load(x_at, mask=mine[:, None], other=0.0)
            gate_tile = weight_rows.load([line, first]).T
        elif EVEN:
            x_tile = tl.load(x_at, mask=mine[:, None], other=0.0)
            gate_tile = tl.load(gate_at)
        else:
            within = first + k < depth
            x_tile = tl.load(x_at, mask=mine[:, None] & within[None, :], other=0.0)
            keep = inside[None, :] & within[:, None]
            gate_tile = tl.load(gate_at, mask=keep, other=0.0)
        gate = tl.dot(x_tile, gate_tile, gate, input_precision=PRECISION)
        if GATED:
            if TMA:
                up_tile = weight_rows.load([line + up_start, first]).T
            elif EVEN:
                up_tile = tl.load(up_at)
            else:
                up_tile = tl.load(up_at, mask=keep, other=0.0)
            up = tl.dot(x_tile, up_tile, up, input_precision=PRECISION)
        x_at += BLOCK_K
        gate_at += BLOCK_K * stride_wk
        up_at += BLOCK_K * stride_wk
    if HAS_BIAS:
        bias_at = bias + expert * (size * (2 if GATED else 1)) + column
        gate += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_at + up_start, mask=inside, other=0.0).to(tl.float32)[None, :]
    if HAS_UP_LORA:
        pdl_wait(PDL and WAIT_LATE)
        plane = num_pairs * max_rank
        at = start
        while at < end:
            slot, stop = read_run(at, end, slots, slot_at, run_end, TOP_K, IDENTITY)
            if slot >= 0:
                own = mine & (position >= at) & (position < stop)
                gate = expand_run(
                    gate, h, arena, slice_rank, slice_column, b_offset, b_stride, slot, expert,
                    position, own, n, size, plane, max_rank, PLANES, BLOCK_R, PRECISION,
                )  # fmt: skip
                if GATED:
                    up = expand_run(
                        up, h, arena, slice_rank, slice_column, b_offset, b_stride,
                        num_slots + slot, expert, position, own, n, size, plane, max_rank,
                        PLANES, BLOCK_R, PRECISION,
                    )  # fmt: skip
            at = stop
    out = activate(gate, up, ACTIVATION, ALPHA, LIMIT).to(inter.dtype.element_ty)
    target = inter + position.to(tl.int64)[:, None] * size + n[None, :]
    tl.store(target, out, mask=mine[:, None] & inside[None, :])
    if HAS_DOWN_LORA:
        out = tl.where(inside[None, :], out, 0.0)
        hd_at = hd + (block.to(tl.int64) * num_pairs + position)[:, None] * down_max_rank
        at = start
        while at < end:
            slot, stop = read_run(at, end, slots, slot_at, run_end, TOP_K, IDENTITY)
            if slot >= 0:
                rank = tl.load(down_rank + slot)
                own = mine & (position >= at) & (position < stop)
                a = down_arena + tl.load(down_a_offset + slot)
                a += expert * tl.load(down_a_stride + slot)
                for r in range(0, rank, DOWN_BLOCK_R):
                    inner = r + tl.arange(0, DOWN_BLOCK_R)
                    used = inner < rank
                    a_tile = tl.load(
                        a + inner[None, :] * size + n[:, None],
                        mask=used[None, :] & inside[:, None],
                        other=0.0,
                    )
                    part = tl.dot(out, a_tile, input_precision=PRECISION)
                    tl.store(hd_at + inner[None, :], part, mask=own[:, None] & used[None, :])
            at = stop


@triton.jit
def _gate_up_kernel(
    hidden,
    weight,
    weight_rows,
    bias,
    inter,
    topk_ids,
    slots,
    pair_at,
    slot_at,
    run_end,
    tile_expert,
    tile_start,
    tile_end,
    num_tiles,
    h,
    arena,
    slice_rank,
    slice_column,
    b_offset,
    b_stride,
    hd,
    down_arena,
    down_rank,
    down_a_offset,
    down_a_stride,
    num_pairs,
    num_experts,
    num_slots,
    depth,
    size,
    stride_x,
    stride_we,
    stride_wn,
    stride_wk,
    up_start,
    column_step,
    max_rank,
    down_max_rank,
    TOP_K: tl.constexpr,
    SCALED: tl.constexpr,
    IDENTITY: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_UP_LORA: tl.constexpr,
    HAS_DOWN_LORA: tl.constexpr,
    PLANES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOWN_BLOCK_R: tl.constexpr,
    WAIT_LATE: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_release(PDL)
    # With a shrink between, the order was complete before this kernel could start.
    pdl_wait(PDL and not WAIT_LATE)
    blocks = tl.cdiv(size, BLOCK_N)
    tile = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    expert, start, end = read_tile(
        tile, topk_ids, tile_expert, tile_start, tile_end, num_tiles, num_experts, IDENTITY
    )
    if end < 0:
        return
    if (TAIL_M < BLOCK_M) & (end - start <= TAIL_M):
        _gate_up_tile(
            expert, start, end, block, hidden, weight, weight_rows, bias, inter, topk_ids, slots, pair_at, slot_at, run_end, h, arena, slice_rank, slice_column, b_offset, b_stride, hd, down_arena, down_rank, down_a_offset, down_a_stride, num_pairs, num_slots, depth, size, stride_x, stride_we, stride_wn, stride_wk, up_start, column_step, max_rank, down_max_rank, TOP_K, SCALED, IDENTITY, GATED, HAS_BIAS, HAS_UP_LORA, HAS_DOWN_LORA, PLANES, ACTIVATION, ALPHA, LIMIT, EVEN, TMA, PRECISION, TAIL_M, BLOCK_N, BLOCK_K, BLOCK_R, DOWN_BLOCK_R, WAIT_LATE, PDL,
        )  # fmt: skip
    else:
        _gate_up_tile(
            expert, start, end, block, hidden, weight, weight_rows, bias, inter, topk_ids, slots, pair_at, slot_at, run_end, h, arena, slice_rank, slice_column, b_offset, b_stride, hd, down_arena, down_rank, down_a_offset, down_a_stride, num_pairs, num_slots, depth, size, stride_x, stride_we, stride_wn, stride_wk, up_start, column_step, max_rank, down_max_rank, TOP_K, SCALED, IDENTITY, GATED, HAS_BIAS, HAS_UP_LORA, HAS_DOWN_LORA, PLANES, ACTIVATION, ALPHA, LIMIT, EVEN, TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, DOWN_BLOCK_R, WAIT_LATE, PDL,
        )  # fmt: skip


def moe_gate_up(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    order: PairOrder,
    columns: tuple[int, int, int],
    activation: Activation,
    shape: TileShape,
    h: torch.Tensor | None = None,
    up_lora: SiteFactors | None = None,
    down_lora: SiteFactors | None = None,
    scaled: bool = False,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """inter [P, I] and hd (None without down_lora), see the table above.

    weight [E, N, H] (a view, if transposed); columns: (I, up_start, column_step).
    """
    size, up_start, step = columns
    pairs, depth = order.num_pairs, hidden.shape[1]
    assert hidden.stride(1) == 1, hidden.stride()
    assert (h is None) == (up_lora is None)
    inter = torch.empty(pairs, size, dtype=hidden.dtype, device=hidden.device)
    blocks = triton.cdiv(size, shape.block_n)
    hd = None
    if down_lora is not None:
        hd = torch.empty(
            blocks, pairs, down_lora.max_rank, dtype=torch.float32, device=hidden.device
        )
    up = up_lora or down_lora
    down = down_lora or up_lora
    tiles = pairs if order.is_identity else order.max_tiles
    none = hidden
    _gate_up_kernel[(tiles * blocks,)](
        hidden,
        weight,
        weight_rows(weight, shape) if shape.tma else weight,
        none if bias is None else bias,
        inter,
        order.topk_ids,
        none if order.slots is None else order.slots,
        order.pair,
        order.slot,
        order.run_end,
        order.tile_expert,
        order.tile_start,
        order.tile_end,
        order.num_tiles,
        none if h is None else h,
        *((none,) * 5 if up is None else (up.arena, up.slice_rank, up.slice_column, up.b_offset, up.b_stride)),
        none if hd is None else hd,
        *((none,) * 4 if down is None else (down.arena, down.rank, down.a_offset, down.a_stride)),
        pairs,
        order.num_experts,
        0 if up is None else up.num_slots,
        depth,
        size,
        hidden.stride(0),
        *weight.stride(),
        up_start,
        step,
        0 if up is None else up.max_rank,
        0 if down is None else down.max_rank,
        TOP_K=order.top_k,
        SCALED=scaled,
        IDENTITY=order.is_identity,
        GATED=activation.has_gate,
        HAS_BIAS=bias is not None,
        HAS_UP_LORA=up_lora is not None,
        HAS_DOWN_LORA=down_lora is not None,
        PLANES=1 if h is None else h.shape[0],
        ACTIVATION=activation.name,
        ALPHA=activation.alpha,
        LIMIT=activation.limit,
        EVEN=depth % shape.block_k == 0 and size % shape.block_n == 0,
        TMA=shape.tma,
        PRECISION=dot_precision(hidden.dtype),
        BLOCK_M=order.block_m,
        TAIL_M=shape.tail_m or order.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        BLOCK_R=16 if up is None else power_of_two(up.max_rank // up.slice_rank.shape[0], 16, 64),
        DOWN_BLOCK_R=16 if down is None else power_of_two(down.max_rank, 16, 64),
        WAIT_LATE=up_lora is not None,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **pdl_options(pdl),
    )  # fmt: skip
    return inter, hd
