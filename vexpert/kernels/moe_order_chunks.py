"""The same arrays as `moe_order` for many pairs, by counting: P * (CHUNK + pairs of one expert).

1. count: pairs of each expert in each chunk.
2. place: position by expert = pairs of lower experts + of this one in earlier chunks + in this one.
3. refine, with slots only: within an expert's positions, order by slot and find the runs.

| array | shape | holds |
|---|---|---|
| count | [chunks, BINS] int32 | pairs of expert b in chunk c; bin E: sentinels |
| low, high | [P] int32 | the positions of this position's expert |
"""

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import pdl_options, pdl_release, pdl_wait, power_of_two
from vexpert.kernels.moe_factors import PairFactors, factor_arguments, factor_options, store_site
from vexpert.kernels.moe_order import PairOrder, keys_of, make_order


@triton.jit
def _count_kernel(
    topk_ids, count, num_pairs, num_experts,
    TOP_K: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_release(PDL)
    mine = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert, _ = keys_of(topk_ids, topk_ids, mine, mine < num_pairs, num_experts, TOP_K, False)
    bins = tl.histogram(expert, BINS)
    tl.store(count + tl.program_id(0) * BINS + tl.arange(0, BINS), bins)


@triton.jit
def _place_kernel(
    topk_ids, slots, count, pair_at, expert_at, slot_at, low, high,
    tile_expert, tile_start, tile_end, num_tiles, num_pairs, num_experts, chunks,
    TOP_K: tl.constexpr, HAS_SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
    BINS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_release(PDL)
    chunk = tl.program_id(0)
    bins = tl.arange(0, BINS)
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
    mine = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = mine < num_pairs
    expert, slot = keys_of(topk_ids, slots, mine, inside, num_experts, TOP_K, HAS_SLOTS)
    # The same pairs once more, as columns.
    other = chunk * CHUNK + tl.arange(0, CHUNK)
    its_expert, _ = keys_of(topk_ids, slots, other, other < num_pairs, num_experts, TOP_K, False)
    same = (its_expert[None, :] == expert[:, None]) & (other[None, :] < mine[:, None])
    within = tl.gather(earlier, expert, 0) + tl.sum(same.to(tl.int32), 1)
    left = tl.gather(start, expert, 0)
    right = left + tl.gather(total, expert, 0)
    position = left + within
    tl.store(pair_at + position, mine, mask=inside)
    tl.store(expert_at + position, expert, mask=inside)
    if HAS_SLOTS:
        tl.store(slot_at + position, slot, mask=inside)
        tl.store(low + position, left, mask=inside)
        tl.store(high + position, right, mask=inside)
    opens = inside & (expert < num_experts) & (within % BLOCK_M == 0)
    tile = tl.gather(first_tile, expert, 0) + within // BLOCK_M
    tl.store(tile_expert + tile, expert, mask=opens)
    tl.store(tile_start + tile, position, mask=opens)
    tl.store(tile_end + tile, tl.minimum(position + BLOCK_M, right), mask=opens)
    if chunk == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))


@triton.jit
def _refine_kernel(
    pair_by_expert, expert_by_expert, slot_by_expert, low, high, pair_at, slot_at, run_start,
    run_end, num_pairs, num_experts, num_slots, address, rank_at,
    up_table, down_table,
    GATE_SLICES: tl.constexpr, HAS_UP: tl.constexpr, HAS_DOWN: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_release(PDL)
    mine = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = mine < num_pairs
    slot = tl.load(slot_by_expert + mine, mask=inside, other=0)
    left = tl.load(low + mine, mask=inside, other=num_pairs)
    right = tl.load(high + mine, mask=inside, other=0)
    pair = tl.load(pair_by_expert + mine, mask=inside, other=0)
    expert = tl.load(expert_by_expert + mine, mask=inside, other=num_experts)
    # Counts stay spread over threads until the loop is over: a sum is a trip through shared memory.
    before = tl.zeros((ROWS, CHUNK), dtype=tl.int32)
    equal_before = tl.zeros((ROWS, CHUNK), dtype=tl.int32)
    after = tl.zeros((ROWS, CHUNK), dtype=tl.int32)
    for first in range(tl.min(left, 0), tl.max(right, 0), CHUNK):
        other = first + tl.arange(0, CHUNK)
        its_slot = tl.load(slot_by_expert + other, mask=other < num_pairs, other=0)
        here = (other[None, :] >= left[:, None]) & (other[None, :] < right[:, None])
        earlier = other[None, :] < mine[:, None]
        equal = here & (its_slot[None, :] == slot[:, None])
        before += (here & (its_slot[None, :] < slot[:, None])).to(tl.int32)
        equal_before += (equal & earlier).to(tl.int32)
        after += (equal & (other[None, :] >= mine[:, None])).to(tl.int32)
    start = left + tl.sum(before, 1)
    position = start + tl.sum(equal_before, 1)
    tl.store(pair_at + position, pair, mask=inside)
    tl.store(slot_at + position, slot, mask=inside)
    tl.store(run_start + position, start, mask=inside)
    tl.store(run_end + position, position + tl.sum(after, 1), mask=inside)
    active = inside & (slot >= 0) & (expert < num_experts)
    store_site(
        position, slot, expert, active, inside, address, rank_at, num_pairs, num_slots,
        up_table, 0, 2, GATE_SLICES, HAS_UP,
    )  # fmt: skip
    store_site(
        position, slot, expert, active, inside, address, rank_at, num_pairs, num_slots,
        down_table, 1, 4, 1, HAS_DOWN,
    )  # fmt: skip


def order_many_pairs(
    topk_ids: torch.Tensor,
    factors: PairFactors | None,
    num_experts: int,
    block_m: int,
    pdl: bool = False,
    chunk: int = 256,
) -> PairOrder:
    """What `order_pairs` gives, for any number of pairs."""
    assert topk_ids.is_contiguous(), topk_ids.stride()
    tokens, top_k = topk_ids.shape
    pairs, device = tokens * top_k, topk_ids.device
    chunks, bins = triton.cdiv(pairs, chunk), power_of_two(num_experts + 2, 16, 4096)
    max_tiles = min(pairs, pairs // block_m + min(pairs, num_experts))
    count = torch.empty(chunks, bins, dtype=torch.int32, device=device)
    at = torch.empty(9, pairs, dtype=torch.int32, device=device)
    tile = torch.empty(3, max_tiles, dtype=torch.int32, device=device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=device)
    pair, expert, slot, low, high, ordered, ordered_slot, run_start, run_end = at
    options = pdl_options(pdl)
    _count_kernel[(chunks,)](
        topk_ids, count, pairs, num_experts, TOP_K=top_k, CHUNK=chunk, BINS=bins, **options
    )
    slots = topk_ids if factors is None else factors.slots
    _place_kernel[(chunks,)](
        topk_ids, slots, count, pair, expert, slot, low, high, *tile, num_tiles, pairs,
        num_experts, chunks, TOP_K=top_k, HAS_SLOTS=factors is not None, BLOCK_M=block_m,
        CHUNK=chunk, BINS=bins, ROWS=power_of_two(chunks, 16, 64), num_warps=8, **options,
    )  # fmt: skip
    if factors is not None:
        _refine_kernel[(triton.cdiv(pairs, 32),)](
            pair, expert, slot, low, high, ordered, ordered_slot, run_start, run_end, pairs,
            num_experts, factors.num_slots, *factor_arguments(factors, topk_ids),
            **factor_options(factors), ROWS=32, CHUNK=64, **options,
        )  # fmt: skip
        pair, slot = ordered, ordered_slot
    arrays = (pair, expert, slot, run_start, run_end, *tile, num_tiles)
    return make_order(topk_ids, factors, arrays, block_m, num_experts)
