"""The same arrays as `moe_order` for many pairs, by counting: P * CHUNK and, with slots, T * T.

0. rank, with slots only: the tokens by slot, by counting too unless slots are too many. What
   follows keeps the order of tokens.
1. count: pairs of each expert in each chunk.
2. scan, of many chunks only: of those counts, the sums over earlier chunks.
3. place: position by expert = pairs of lower experts + of this one in earlier chunks + in this one.

Runs and factors are looked up by tile, in `moe_runs`.

| array | shape | holds |
|---|---|---|
| topk_ids, topk_weights | [T, K], dtypes of `moe_order` | see there |
| token_at | [T] int32 | tokens by slot |
| count | [chunks, BINS] int32 | pairs of expert b in chunk c; bin E: sentinels |
| pair_by_slot, expert_by_slot | [P] int32 | the pairs of those tokens, and their experts |
"""

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import ceil_div, pdl_options, pdl_release, pdl_wait, power_of_two
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.moe_factors import PairFactors
from vexpert.kernels.moe_order import PairOrder, keys_of, make_order, weight_arguments

MOST_BINS = 1024  # of slots: more are compared
MOST_CHUNKS = 64  # that each program of place adds up itself


@direct_launch
@triton.jit
def _rank_kernel(
    slots, token_at, num_tokens, ROWS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    pdl_wait(PDL)
    pdl_release(PDL)
    mine = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = mine < num_tokens
    slot = tl.maximum(tl.load(slots + mine, mask=inside, other=0).to(tl.int32), -1)
    # Counts stay spread over threads until the loop is over: a sum is a trip through shared memory.
    before = tl.zeros((ROWS, CHUNK), dtype=tl.int32)
    for first in range(0, num_tokens, CHUNK):
        other = first + tl.arange(0, CHUNK)
        there = other < num_tokens
        its = tl.maximum(tl.load(slots + other, mask=there, other=0).to(tl.int32), -1)
        its = tl.where(there, its, 1 << 30)
        less = its[None, :] < slot[:, None]
        equal = its[None, :] == slot[:, None]
        before += (less | (equal & (other[None, :] < mine[:, None]))).to(tl.int32)
    tl.store(token_at + tl.sum(before, 1), mine, mask=inside)


@triton.jit
def _bins_of(slots, token, there, BINS: tl.constexpr):
    """Base rows are bin 0, a slot the one behind it, what is not there the last."""
    slot = tl.load(slots + token, mask=there, other=0).to(tl.int32)
    return tl.where(there, tl.maximum(slot, -1) + 1, BINS - 1)


@direct_launch
@triton.jit
def _rank_by_counting_kernel(
    slots, token_at, num_tokens, ROWS: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each program counts all slots itself: that takes less than a second launch would."""
    pdl_wait(PDL)
    pdl_release(PDL)
    begin = tl.program_id(0) * ROWS
    total = tl.zeros((BINS,), dtype=tl.int32)
    earlier = tl.zeros((BINS,), dtype=tl.int32)
    for first in range(0, num_tokens, CHUNK):
        other = first + tl.arange(0, CHUNK)
        count = tl.histogram(_bins_of(slots, other, other < num_tokens, BINS), BINS)
        total += count
        earlier += tl.where(first + CHUNK <= begin, count, 0)
    # Of the chunk that this program's tokens lie in, those before them.
    other = begin // CHUNK * CHUNK + tl.arange(0, CHUNK)
    earlier += tl.histogram(_bins_of(slots, other, other < begin, BINS), BINS)
    mine = begin + tl.arange(0, ROWS)
    inside = mine < num_tokens
    its = _bins_of(slots, mine, inside, BINS)
    other = begin + tl.arange(0, ROWS)
    others = _bins_of(slots, other, other < num_tokens, BINS)
    same = (others[None, :] == its[:, None]) & (other[None, :] < mine[:, None])
    position = tl.gather(tl.cumsum(total, 0) - total + earlier, its, 0)
    tl.store(token_at + position + tl.sum(same.to(tl.int32), 1), mine, mask=inside)


def _rank(slots: torch.Tensor, num_slots: int, options: dict[str, bool]) -> torch.Tensor:
    """token_at [T]."""
    tokens = slots.shape[0]
    token_at = torch.empty(tokens, dtype=torch.int32, device=slots.device)
    if num_slots + 2 > MOST_BINS:
        _rank_kernel[(ceil_div(tokens, 8),)](
            slots, token_at, tokens, ROWS=8, CHUNK=power_of_two(tokens, 16, 1024), num_warps=8,
            **options,
        )  # fmt: skip
        return token_at
    _rank_by_counting_kernel[(ceil_div(tokens, 64),)](
        slots, token_at, tokens, ROWS=64, CHUNK=power_of_two(tokens, 64, 1024),
        BINS=power_of_two(num_slots + 2, 16, MOST_BINS), num_warps=4, **options,
    )  # fmt: skip
    return token_at


@direct_launch
@triton.jit
def _count_kernel(
    topk_ids, token_at, count, pair_by_slot, expert_by_slot, num_pairs, num_experts,
    TOP_K: tl.constexpr, HAS_SLOTS: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_release(PDL)
    index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = index < num_pairs
    pair = index
    if HAS_SLOTS:
        pair = tl.load(token_at + index // TOP_K, mask=inside, other=0) * TOP_K + index % TOP_K
    expert, _ = keys_of(topk_ids, topk_ids, pair, inside, num_experts, TOP_K, False)
    tl.store(pair_by_slot + index, pair, mask=inside)
    tl.store(expert_by_slot + index, expert, mask=inside)
    bins = tl.histogram(expert, BINS)
    tl.store(count + tl.program_id(0) * BINS + tl.arange(0, BINS), bins)


@direct_launch
@triton.jit
def _scan_kernel(
    count, total_at, chunks, BINS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """In place: pairs of each expert in earlier chunks."""
    pdl_wait(PDL)
    pdl_release(PDL)
    bins = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.int32)
    for first in range(0, chunks, ROWS):
        row = first + tl.arange(0, ROWS)
        at = count + row[:, None] * BINS + bins[None, :]
        part = tl.load(at, mask=row[:, None] < chunks, other=0)
        up_to = tl.cumsum(part, 0)
        tl.store(at, total[None, :] + up_to - part, mask=row[:, None] < chunks)
        total += tl.sum(part, 0)
    tl.store(total_at + bins, total)


@direct_launch
@triton.jit
def _place_kernel(
    slots, topk_weights, scale_at, pair_by_slot, expert_by_slot, count, total_at,
    pair_at, expert_at, slot_at,
    tile_expert, tile_start, tile_end, num_tiles, num_pieces, num_pairs, num_experts, chunks,
    TOP_K: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    SCANNED: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
    BINS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_release(PDL)
    chunk = tl.program_id(0)
    bins = tl.arange(0, BINS)
    if SCANNED:
        earlier = tl.load(count + chunk * BINS + bins)
        total = tl.load(total_at + bins)
    else:
        total = tl.zeros((BINS,), dtype=tl.int32)
        earlier = tl.zeros((BINS,), dtype=tl.int32)
        for first in range(0, chunks, ROWS):
            row = first + tl.arange(0, ROWS)
            part = tl.load(
                count + row[:, None] * BINS + bins[None, :], mask=row[:, None] < chunks, other=0
            )
            total += tl.sum(part, 0)
            earlier += tl.sum(tl.where(row[:, None] < chunk, part, 0), 0)
    total = tl.where(bins <= num_experts, total, 0)
    tiles = tl.where(bins < num_experts, (total + BLOCK_M - 1) // BLOCK_M, 0)
    start = tl.cumsum(total, 0) - total
    first_tile = tl.cumsum(tiles, 0) - tiles
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < num_pairs
    pair = tl.load(pair_by_slot + index, mask=inside, other=0)
    expert = tl.load(expert_by_slot + index, mask=inside, other=num_experts + 1)
    # The same experts once more, as columns, a few at a time: registers are short.
    same = tl.zeros((CHUNK, COLUMNS), dtype=tl.int32)
    for first in range(chunk * CHUNK, chunk * CHUNK + CHUNK, COLUMNS):
        other = first + tl.arange(0, COLUMNS)
        its = tl.load(expert_by_slot + other, mask=other < num_pairs, other=num_experts + 1)
        same += ((its[None, :] == expert[:, None]) & (other[None, :] < index[:, None])).to(tl.int32)
    within = tl.gather(earlier, expert, 0) + tl.sum(same, 1)
    left = tl.gather(start, expert, 0)
    right = left + tl.gather(total, expert, 0)
    position = left + within
    tl.store(pair_at + position, pair, mask=inside)
    tl.store(expert_at + position, expert, mask=inside)
    if HAS_WEIGHTS:
        scale = tl.load(topk_weights + pair, mask=inside, other=0.0)
        tl.store(scale_at + position, scale, mask=inside)
    if HAS_SLOTS:
        slot = tl.load(slots + pair // TOP_K, mask=inside, other=-1).to(tl.int32)
        tl.store(slot_at + position, tl.maximum(slot, -1), mask=inside)
    opens = inside & (expert < num_experts) & (within % BLOCK_M == 0)
    tile = tl.gather(first_tile, expert, 0) + within // BLOCK_M
    tl.store(tile_expert + tile, expert, mask=opens)
    tl.store(tile_start + tile, position, mask=opens)
    tl.store(tile_end + tile, tl.minimum(position + BLOCK_M, right), mask=opens)
    if chunk == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))
        tl.store(num_pieces, 0)


def order_many_pairs(
    topk_ids: torch.Tensor,
    factors: PairFactors | None,
    num_experts: int,
    block_m: int,
    pdl: bool = False,
    chunk: int = 256,
    topk_weights: torch.Tensor | None = None,
) -> PairOrder:
    """What `order_pairs` gives, for any number of pairs; without runs and look-up.

    chunk: pairs of a chunk. The other flags are those of `order_pairs`. Reference:
    `kernels.moe_order.reference_order`.
    """
    assert topk_ids.is_contiguous(), topk_ids.stride()
    tokens, top_k = topk_ids.shape
    pairs, device = tokens * top_k, topk_ids.device
    chunks, bins = ceil_div(pairs, chunk), power_of_two(num_experts + 2, 16, 4096)
    max_tiles = min(pairs, pairs // block_m + min(pairs, num_experts))
    count = torch.empty(chunks, bins, dtype=torch.int32, device=device)
    pair, expert, slot = torch.empty(3, pairs, dtype=torch.int32, device=device)
    by_slot = torch.empty(2, pairs, dtype=torch.int32, device=device)
    tile = torch.empty(3, max_tiles, dtype=torch.int32, device=device)
    num_tiles, num_pieces = torch.empty(2, 1, dtype=torch.int32, device=device)
    scale = None if topk_weights is None else torch.empty_like(topk_weights).view(-1)
    options = pdl_options(pdl)
    slots = token_at = topk_ids
    if factors is not None:
        slots = factors.slots
        token_at = _rank(slots, factors.num_slots, options)
    _count_kernel[(chunks,)](
        topk_ids, token_at, count, *by_slot, pairs, num_experts, TOP_K=top_k,
        HAS_SLOTS=factors is not None, CHUNK=chunk, BINS=bins, **options,
    )  # fmt: skip
    total, is_scanned = count, chunks > MOST_CHUNKS
    if is_scanned:
        total = torch.empty(bins, dtype=torch.int32, device=device)
        _scan_kernel[(bins // 16,)](
            count, total, chunks, BINS=bins, ROWS=power_of_two(chunks, 16, 256), COLUMNS=16,
            num_warps=4, **options,
        )  # fmt: skip
    _place_kernel[(chunks,)](
        slots, *weight_arguments(topk_weights, scale, topk_ids), *by_slot, count, total,
        pair, expert, slot, *tile, num_tiles, num_pieces, pairs, num_experts, chunks,
        TOP_K=top_k, HAS_SLOTS=factors is not None, HAS_WEIGHTS=scale is not None,
        SCANNED=is_scanned, BLOCK_M=block_m, CHUNK=chunk, BINS=bins,
        ROWS=power_of_two(chunks, 16, 64),
        COLUMNS=min(chunk, 16), num_warps=8, **options,
    )  # fmt: skip
    arrays = (pair, expert, slot, None, None, *tile, num_tiles, num_pieces)
    return make_order(topk_ids, factors, arrays, block_m, num_experts, scale)
