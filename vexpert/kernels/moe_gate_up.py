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

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vexpert.kernels.activate import activate
from vexpert.kernels.activations import Activation
from vexpert.kernels.arrivals import arrive, await_arrivals
from vexpert.kernels.common import (
    ceil_div,
    dot_precision,
    pdl_options,
    pdl_release,
    pdl_wait,
    power_of_two,
)
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.moe_delta import Delta, wait_for_pieces
from vexpert.kernels.moe_factors import SiteFactors
from vexpert.kernels.moe_order import PairOrder, present
from vexpert.kernels.moe_runs import TileRuns
from vexpert.kernels.moe_shrink import ShrinkShape, shrink_parts, shrink_position
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


@dataclass(frozen=True)
class Expand:
    """LoRA of one product: shrunk rows, factors, and how items are stacked."""

    h: torch.Tensor  # [PLANES, P, max_rank] float32
    factors: SiteFactors
    runs: TileRuns | None  # None: every row is an item
    group: int  # items of one dot
    item_stages: int = 1  # of the loop over groups
    # The first group's B, or of runs where it is, before the base product; ranks of one step only.
    prefetch: bool = False
    early: bool = False  # shrunk rows too: the product then waits for the shrink; runs only
    shrink: ShrinkShape | None = None  # of the launch's first programs; None: h is complete


@dataclass(frozen=True)
class TileShape:
    """Columns and depth of a tile, and how Triton runs it."""

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    tail_m: int = (
        0  # rows of the smaller tile that an expert's last pairs take if they fit; 0: none
    )
    tma: bool = False  # weights through the tensor memory accelerator: [E, N, K] contiguous


def weight_rows(weight: torch.Tensor, shape: TileShape) -> TensorDescriptor:
    """All experts' rows [E * N, K] for block loads of [block_n, block_k]."""
    assert weight.is_contiguous(), weight.stride()
    rows = weight.view(-1, weight.shape[2])
    return TensorDescriptor.from_tensor(rows, [shape.block_n, shape.block_k])


def delta_tensors(
    lora: Expand | Delta | None, none: torch.Tensor
) -> tuple[Expand | None, tuple[torch.Tensor, ...]]:
    """The expand, if it is one; delta, pending and slot_at."""
    if isinstance(lora, Delta):
        return None, (lora.rows, lora.pending, lora.slot)
    return lora, (none,) * 3


def expand_tensors(
    lora: Expand | None, delta: tuple[torch.Tensor, ...], order: PairOrder, none: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """run_first ... num_runs, `delta`'s, h, arena, address and rank, in the kernels' order."""
    if lora is None:
        return none, none, none, *delta, none, none, none, none
    assert order.factors is not None
    arena, runs = lora.factors.arena, lora.runs
    if runs is not None:
        lists = runs.run_first, runs.run_stop, runs.num_runs
        return *lists, *delta, lora.h, arena, runs.run_address, runs.run_rank
    found = order.factors.address, order.factors.rank
    if order.is_identity:
        found = order.factors.slots, lora.factors.packed
    return none, none, none, *delta, lora.h, arena, *found


def factor_stride(lora: Expand | None, pairs: int) -> int:
    """Between rows of the arrays of `moe_factors`."""
    return pairs if lora is None or lora.runs is None else lora.runs.run_first.shape[0]


def _group(lora: Expand) -> int:
    """Items of one dot: B's tile is bounded, as large a one as a plan says for 16 ranks."""
    rows = 128 if lora.runs is None else min(128, 16 * lora.group)
    return max(1, min(lora.group, rows // lora.factors.block_r))


def expand_options(lora: Expand | None, size: int) -> dict[str, int | bool]:
    """The constants of LoRA that the kernels share."""
    if lora is None:
        off = dict.fromkeys(("HAS_LORA", "BY_RUN", "PREFETCH", "EARLY"), False)
        ones = dict.fromkeys(("PLANES", "GROUP", "ITEM_STAGES", "RANK_STEPS", "ALIGNMENT"), 1)
        return {**off, **ones, "BLOCK_R": 16, "SLICE_WIDTH": 16}
    factors, block_r = lora.factors, lora.factors.block_r
    one_step = factors.slice_max_rank <= block_r
    return {
        "HAS_LORA": True,
        "PLANES": lora.h.shape[0],
        "BY_RUN": lora.runs is not None,
        "GROUP": _group(lora),
        "ITEM_STAGES": lora.item_stages,
        "PREFETCH": lora.prefetch and one_step,
        "EARLY": lora.early and one_step,
        "BLOCK_R": block_r,
        "RANK_STEPS": ceil_div(factors.slice_max_rank, block_r),
        "SLICE_WIDTH": factors.slice_width,
        "ALIGNMENT": factors.alignment_of(size),
    }


def inner_shrinks(
    lora: Expand | None, order: PairOrder, none: torch.Tensor, depth: int
) -> tuple[int, tuple[torch.Tensor | int, ...]]:
    """Programs of a launch that shrink, and what they need: arrivals, runs, their number, part."""
    if lora is None or lora.shrink is None:
        return 0, (none, none, none, 0, 0)
    assert lora.factors.arrivals is not None, lora
    start, end = present([order.run_start, order.run_end])
    part, planes = shrink_parts(depth, lora.shrink)
    shrinks = order.num_pairs * planes
    return shrinks, (lora.factors.arrivals, start, end, shrinks, part)


def inner_options(lora: Expand | None, depth: int) -> dict[str, int | bool]:
    """Their constants."""
    if lora is None or lora.shrink is None:
        ones = dict.fromkeys(("A_M", "A_K", "A_R", "A_ALIGNMENT"), 1)
        return {"INNER": False, "A_EVEN": False, **ones}
    shape, factors = lora.shrink, lora.factors
    return {
        "INNER": True,
        "A_M": shape.block_m,
        "A_K": shape.block_k,
        "A_R": power_of_two(factors.max_rank, 16, shape.most_ranks),
        "A_EVEN": depth % shape.block_k == 0,
        "A_ALIGNMENT": factors.alignment_of(depth),
    }


@triton.jit
def _gate_up_tile(
    expert,
    tile,
    start,
    end,
    block,
    hidden,
    weight,
    weight_rows,
    bias,
    inter,
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
    stride_x,
    stride_we,
    stride_wn,
    stride_wk,
    up_start,
    column_step,
    max_rank,
    TOP_K: tl.constexpr,
    SCALED: tl.constexpr,
    IDENTITY: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
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
    source = position
    if not IDENTITY:
        source = tl.load(pair_at + position, mask=mine, other=0)
    if not SCALED:
        source = source // TOP_K
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
    if HAS_LORA:
        dtype: tl.constexpr = arena.dtype.element_ty
        GATE_SLICES: tl.constexpr = 2 if GATED else 1
        plane = num_pairs * max_rank
        if BY_RUN:
            runs = tl.load(num_runs + tile)
        if EARLY:
            pdl_wait(PDL)
        if BY_RUN and EARLY:
            gate_rows = shrunk_rows(
                h, position, mine, plane, max_rank, 0, SLICE_WIDTH, 0, BLOCK_R, dtype, PLANES
            )
            if GATED:
                up_rows = shrunk_rows(
                    h, position, mine, plane, max_rank, 1, SLICE_WIDTH, 0, BLOCK_R, dtype, PLANES
                )
        if PREFETCH:
            index0, item0, first0, stop0, exists0, r0 = items_of(
                0, tile, start, end, run_first, run_stop, BY_RUN, RUN_STRIDE, GROUP, BLOCK_R
            )
            gate_used0, b_at_gate0 = find_b(
                address, rank, index0, item0, exists0, expert, r0, factor_stride, num_slots,
                2, GATE_SLICES, TOP_K, IDENTITY, BY_RUN, GROUP,
            )  # fmt: skip
            if not BY_RUN:
                b_gate0 = load_b(arena, b_at_gate0, gate_used0, r0, n, inside, size, ALIGNMENT)
            if GATED:
                up_used0, b_at_up0 = find_b(
                    address, rank, index0, item0, exists0, expert, r0, factor_stride,
                    num_slots, 3, GATE_SLICES, TOP_K, IDENTITY, BY_RUN, GROUP,
                )  # fmt: skip
                if not BY_RUN:
                    b_up0 = load_b(arena, b_at_up0, up_used0, r0, n, inside, size, ALIGNMENT)
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
    if HAS_LORA:
        if INNER:
            await_arrivals(arrivals, shrinks, consumers, tl.program_id(0) - shrinks)
        elif not EARLY:
            pdl_wait(PDL)  # for the shrink; the order was complete before this kernel could start
        count = end - start
        if BY_RUN:
            count = runs
        for step in tl.static_range(RANK_STEPS):
            if BY_RUN and not EARLY:
                gate_rows = shrunk_rows(
                    h, position, mine, plane, max_rank, 0, SLICE_WIDTH, step, BLOCK_R, dtype, PLANES
                )
                if GATED:
                    up_rows = shrunk_rows(
                        h,
                        position,
                        mine,
                        plane,
                        max_rank,
                        1,
                        SLICE_WIDTH,
                        step,
                        BLOCK_R,
                        dtype,
                        PLANES,
                    )
            if PREFETCH:
                own = own_rows(position, first0, stop0)
                if BY_RUN:
                    b_gate0 = load_b(arena, b_at_gate0, gate_used0, r0, n, inside, size, ALIGNMENT)
                    if GATED:
                        b_up0 = load_b(arena, b_at_up0, up_used0, r0, n, inside, size, ALIGNMENT)
                if BY_RUN:
                    h_gate = spread_rows(gate_rows, own & gate_used0[None, :], GROUP, BLOCK_R)
                else:
                    h_gate = shrunk_of_items(
                        h, address, rank, first0, own, gate_used0, r0, plane, num_pairs, num_slots,
                        max_rank, 2, GATE_SLICES, TOP_K, IDENTITY, dtype, PLANES,
                    )  # fmt: skip
                gate = tl.dot(h_gate, b_gate0, gate, input_precision=PRECISION)
                if GATED:
                    if BY_RUN:
                        h_up = spread_rows(up_rows, own & up_used0[None, :], GROUP, BLOCK_R)
                    else:
                        h_up = shrunk_of_items(
                            h, address, rank, first0, own, up_used0, r0, plane, num_pairs,
                            num_slots, max_rank, 3, GATE_SLICES, TOP_K, IDENTITY, dtype, PLANES,
                        )  # fmt: skip
                    up = tl.dot(h_up, b_up0, up, input_precision=PRECISION)
            for item in tl.range(GROUP if PREFETCH else 0, count, GROUP, num_stages=ITEM_STAGES):
                index, its, first_at, stop, exists, r = items_of(
                    item, tile, start, end, run_first, run_stop, BY_RUN, RUN_STRIDE, GROUP, BLOCK_R
                )
                r += step * BLOCK_R
                own = own_rows(position, first_at, stop)
                gate_used, b_at_gate = find_b(
                    address, rank, index, its, exists, expert, r, factor_stride, num_slots,
                    2, GATE_SLICES, TOP_K, IDENTITY, BY_RUN, GROUP,
                )  # fmt: skip
                b_gate = load_b(arena, b_at_gate, gate_used, r, n, inside, size, ALIGNMENT)
                if GATED:
                    up_used, b_at_up = find_b(
                        address, rank, index, its, exists, expert, r, factor_stride,
                        num_slots, 3, GATE_SLICES, TOP_K, IDENTITY, BY_RUN, GROUP,
                    )  # fmt: skip
                    b_up = load_b(arena, b_at_up, up_used, r, n, inside, size, ALIGNMENT)
                if BY_RUN:
                    h_gate = spread_rows(gate_rows, own & gate_used[None, :], GROUP, BLOCK_R)
                else:
                    h_gate = shrunk_of_items(
                        h, address, rank, first_at, own, gate_used, r, plane, num_pairs, num_slots,
                        max_rank, 2, GATE_SLICES, TOP_K, IDENTITY, dtype, PLANES,
                    )  # fmt: skip
                gate = tl.dot(h_gate, b_gate, gate, input_precision=PRECISION)
                if GATED:
                    if BY_RUN:
                        h_up = spread_rows(up_rows, own & up_used[None, :], GROUP, BLOCK_R)
                    else:
                        h_up = shrunk_of_items(
                            h, address, rank, first_at, own, up_used, r, plane, num_pairs,
                            num_slots, max_rank, 3, GATE_SLICES, TOP_K, IDENTITY, dtype, PLANES,
                        )  # fmt: skip
                    up = tl.dot(h_up, b_up, up, input_precision=PRECISION)
    if HAS_DELTA:
        slot = tl.load(slot_at + position, mask=mine, other=-1)
        wait_for_pieces(pending + tile)
        slices: tl.constexpr = 2 if GATED else 1
        delta_at = delta + position.to(tl.int64)[:, None] * (slices * size) + n[None, :]
        adapted = (slot >= 0)[:, None] & inside[None, :]
        # -0: what is added to a base row leaves its bits alone.
        gate += tl.load(delta_at, mask=adapted, other=-0.0).to(tl.float32)
        if GATED:
            up += tl.load(delta_at + size, mask=adapted, other=-0.0).to(tl.float32)
    out = activate(gate, up, ACTIVATION, ALPHA, LIMIT).to(inter.dtype.element_ty)
    target = inter + position.to(tl.int64)[:, None] * size + n[None, :]
    tl.store(target, out, mask=mine[:, None] & inside[None, :])


@direct_launch
@triton.jit
def _gate_up_kernel(
    hidden,
    weight,
    weight_rows,
    bias,
    inter,
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
    stride_x,
    stride_we,
    stride_wn,
    stride_wk,
    up_start,
    column_step,
    max_rank,
    TOP_K: tl.constexpr,
    SCALED: tl.constexpr,
    IDENTITY: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
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
    if (TAIL_M < BLOCK_M) & (end - start <= TAIL_M):
        _gate_up_tile(
            expert, tile, start, end, block, hidden, weight, weight_rows, bias, inter, pair_at,
            run_first, run_stop, num_runs, delta, pending, slot_at, h, arena, address, rank,
            arrivals, shrinks, consumers, num_pairs, factor_stride, num_slots, depth, size,
            stride_x, stride_we, stride_wn, stride_wk, up_start, column_step, max_rank, TOP_K,
            SCALED, IDENTITY, GATED, HAS_BIAS, HAS_LORA, HAS_DELTA, INNER, PLANES, BY_RUN,
            GROUP, ITEM_STAGES, PREFETCH, EARLY, BLOCK_R, RANK_STEPS, SLICE_WIDTH, ALIGNMENT,
            ACTIVATION,
            ALPHA, LIMIT, EVEN, TMA, PRECISION, RUN_STRIDE, TAIL_M, BLOCK_N, BLOCK_K, PDL,
        )  # fmt: skip
    else:
        _gate_up_tile(
            expert, tile, start, end, block, hidden, weight, weight_rows, bias, inter, pair_at,
            run_first, run_stop, num_runs, delta, pending, slot_at, h, arena, address, rank,
            arrivals, shrinks, consumers, num_pairs, factor_stride, num_slots, depth, size,
            stride_x, stride_we, stride_wn, stride_wk, up_start, column_step, max_rank, TOP_K,
            SCALED, IDENTITY, GATED, HAS_BIAS, HAS_LORA, HAS_DELTA, INNER, PLANES, BY_RUN,
            GROUP, ITEM_STAGES, PREFETCH, EARLY, BLOCK_R, RANK_STEPS, SLICE_WIDTH, ALIGNMENT,
            ACTIVATION,
            ALPHA, LIMIT, EVEN, TMA, PRECISION, RUN_STRIDE, BLOCK_M, BLOCK_N, BLOCK_K, PDL,
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
    """inter [P, I], see the table above.

    weight [E, N, H] (a view, if transposed); columns: (I, up_start, column_step).
    """
    size, up_start, step = columns
    pairs, depth = order.num_pairs, hidden.shape[1]
    assert hidden.stride(1) == 1, hidden.stride()
    inter = torch.empty(pairs, size, dtype=hidden.dtype, device=hidden.device)
    tiles = pairs if order.is_identity else order.max_tiles
    none = hidden
    expand, delta = delta_tensors(lora, none)
    shrinks, inner = inner_shrinks(expand, order, none, depth)
    _gate_up_kernel[(shrinks + tiles * ceil_div(size, shape.block_n),)](
        hidden,
        weight,
        weight_rows(weight, shape) if shape.tma else weight,
        none if bias is None else bias,
        inter,
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
        hidden.stride(0),
        *weight.stride(),
        up_start,
        step,
        0 if expand is None else expand.h.shape[2],
        TOP_K=order.top_k,
        SCALED=scaled,
        IDENTITY=order.is_identity,
        GATED=activation.has_gate,
        HAS_BIAS=bias is not None,
        **expand_options(expand, size),
        HAS_DELTA=isinstance(lora, Delta),
        **inner_options(expand, depth),
        ACTIVATION=activation.name,
        ALPHA=activation.alpha,
        LIMIT=activation.limit,
        EVEN=depth % shape.block_k == 0 and size % shape.block_n == 0,
        TMA=shape.tma,
        PRECISION=dot_precision(hidden.dtype),
        RUN_STRIDE=order.block_m,
        BLOCK_M=order.block_m,
        TAIL_M=shape.tail_m or order.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **pdl_options(pdl),
    )
    return inter
