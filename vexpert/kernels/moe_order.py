"""The order of a MoE layer's pairs: by expert, within an expert by slot; and tiles of one expert.

Position of pair i = number of pairs before it in (expert, slot, i). Everything else is counted in
the same way, so one launch needs no sort: P^2 comparisons, 1 us of one GPU's lanes at P = 4,096.

| array | shape | holds |
|---|---|---|
| topk_ids | [T, K] int32 or int64 | of pair t * K + k; < 0 or >= E: a sentinel, ordered last |
| slots | [T] int64, or None | adapter slot of each token; < 0: base |
| topk_weights | [T, K] of any float dtype, or None | routing weight of each pair |
| address, rank | | see `moe_factors`; filled by position on demand |
| pair | [P] int32 | the pair at each position |
| scale | [P] in that dtype, or None | its routing weight |
| expert, slot | [P] int32 | its expert (E: sentinel) and slot (-1: base) |
| run_start, run_end | [P] int32 | the run of equal (expert, slot) of this position; or None |
| tile_expert, tile_start, tile_end | [max_tiles] int32 | positions of at most BLOCK_M pairs |
| num_tiles | [1] int32 | tiles that exist; sentinels are in none |
| num_pieces | [1] int32 | 0, where `moe_runs` counts |
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import ceil_div, pdl_options, pdl_release, pdl_wait, power_of_two
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.moe_factors import (
    PairFactors,
    factor_arguments,
    factor_options,
    store_sites,
)


@dataclass(frozen=True)
class PairOrder:
    """The arrays above. `is_identity`: every pair is a tile of its own, nothing was launched."""

    topk_ids: torch.Tensor  # int64
    factors: PairFactors | None
    pair: torch.Tensor
    expert: torch.Tensor
    slot: torch.Tensor
    run_start: torch.Tensor | None
    run_end: torch.Tensor | None
    tile_expert: torch.Tensor
    tile_start: torch.Tensor
    tile_end: torch.Tensor
    num_tiles: torch.Tensor
    num_pieces: torch.Tensor
    scale: torch.Tensor | None  # in the dtype of topk_weights
    block_m: int
    num_experts: int
    is_identity: bool

    @property
    def max_tiles(self) -> int:
        return self.tile_expert.shape[0]

    @property
    def num_pairs(self) -> int:
        return self.topk_ids.numel()

    @property
    def top_k(self) -> int:
        return self.topk_ids.shape[1]

    def ints(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Room for that many integers."""
        return torch.empty(shape, dtype=dtype, device=self.pair.device)


@triton.jit
def keys_of(
    topk_ids, slots, pair, inside, num_experts, TOP_K: tl.constexpr, HAS_SLOTS: tl.constexpr
):
    """Expert (sentinels and what lies outside: E and E + 1) and slot of pairs."""
    expert = tl.load(topk_ids + pair, mask=inside, other=0).to(tl.int32)
    expert = tl.where((expert < 0) | (expert >= num_experts), num_experts, expert)
    expert = tl.where(inside, expert, num_experts + 1)
    slot = tl.zeros_like(expert) - 1
    if HAS_SLOTS:
        slot = tl.load(slots + pair // TOP_K, mask=inside, other=-1).to(tl.int32)
        slot = tl.maximum(slot, -1)
    return expert, slot


@direct_launch
@triton.jit
def _order_kernel(
    topk_ids,
    slots,
    topk_weights,
    scale_at,
    pair_at,
    expert_at,
    slot_at,
    run_start,
    run_end,
    tile_expert,
    tile_start,
    tile_end,
    num_tiles,
    num_pieces,
    num_pairs,
    num_experts,
    num_slots,
    address,
    rank_at,
    up_table,
    down_table,
    TOP_K: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    LOOK_UP: tl.constexpr,
    GATE_SLICES: tl.constexpr,
    HAS_UP: tl.constexpr,
    HAS_DOWN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pdl_release(PDL)
    mine = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = mine < num_pairs
    expert, slot = keys_of(topk_ids, slots, mine, inside, num_experts, TOP_K, HAS_SLOTS)
    key = expert * (num_slots + 1) + slot + 1
    before = tl.zeros((ROWS,), dtype=tl.int32)
    equal_before = tl.zeros((ROWS,), dtype=tl.int32)
    up_to = tl.zeros((ROWS,), dtype=tl.int32)
    count = tl.zeros((BINS,), dtype=tl.int32)
    for first in range(0, num_pairs, CHUNK):
        other = first + tl.arange(0, CHUNK)
        there = other < num_pairs
        its_expert, its_slot = keys_of(topk_ids, slots, other, there, num_experts, TOP_K, HAS_SLOTS)
        its_key = its_expert * (num_slots + 1) + its_slot + 1
        less = its_key[None, :] < key[:, None]
        equal = its_key[None, :] == key[:, None]
        before += tl.sum(less.to(tl.int32), 1)
        up_to += tl.sum((less | equal).to(tl.int32), 1)
        equal_before += tl.sum((equal & (other[None, :] < mine[:, None])).to(tl.int32), 1)
    for first in range(0, num_pairs, WIDE):
        other = first + tl.arange(0, WIDE)
        its_expert, _ = keys_of(
            topk_ids, slots, other, other < num_pairs, num_experts, TOP_K, False
        )
        count += tl.histogram(its_expert, BINS)
    bins = tl.arange(0, BINS)
    count = tl.where(bins < num_experts, count, 0)
    tiles = (count + BLOCK_M - 1) // BLOCK_M
    lower = bins[None, :] < expert[:, None]
    same = bins[None, :] == expert[:, None]
    expert_start = tl.sum(tl.where(lower, count[None, :], 0), 1)
    expert_stop = expert_start + tl.sum(tl.where(same, count[None, :], 0), 1)
    first_tile = tl.sum(tl.where(lower, tiles[None, :], 0), 1)
    position = before + equal_before
    tl.store(pair_at + position, mine, mask=inside)
    if HAS_WEIGHTS:
        scale = tl.load(topk_weights + mine, mask=inside, other=0.0)
        tl.store(scale_at + position, scale, mask=inside)
    tl.store(expert_at + position, expert, mask=inside)
    tl.store(slot_at + position, slot, mask=inside)
    tl.store(run_start + position, before, mask=inside)
    tl.store(run_end + position, up_to, mask=inside)
    if LOOK_UP:
        active = inside & (slot >= 0) & (expert < num_experts)
        store_sites(
            position, slot, expert, active, inside, address, rank_at, num_pairs, num_slots,
            up_table, down_table, GATE_SLICES, HAS_UP, HAS_DOWN,
        )  # fmt: skip
    within = position - expert_start
    opens = inside & (expert < num_experts) & (within % BLOCK_M == 0)
    tile = first_tile + within // BLOCK_M
    tl.store(tile_expert + tile, expert, mask=opens)
    tl.store(tile_start + tile, position, mask=opens)
    tl.store(tile_end + tile, tl.minimum(position + BLOCK_M, expert_stop), mask=opens)
    if tl.program_id(0) == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))
        tl.store(num_pieces, 0)


def make_order(
    topk_ids: torch.Tensor,
    factors: PairFactors | None,
    arrays: tuple[torch.Tensor | None, ...],
    block_m: int,
    num_experts: int,
    scale: torch.Tensor | None = None,
    is_identity: bool = False,
) -> PairOrder:
    """`arrays`: pair ... num_pieces, in the order of the table above; only runs may be None."""
    pair, expert, slot, run_start, run_end, *rest = arrays
    tile_expert, tile_start, tile_end, num_tiles, num_pieces = present(rest)
    pair, expert, slot = present([pair, expert, slot])
    return PairOrder(
        topk_ids=topk_ids,
        factors=factors,
        pair=pair,
        expert=expert,
        slot=slot,
        run_start=run_start,
        run_end=run_end,
        tile_expert=tile_expert,
        tile_start=tile_start,
        tile_end=tile_end,
        num_tiles=num_tiles,
        num_pieces=num_pieces,
        scale=scale,
        block_m=block_m,
        num_experts=num_experts,
        is_identity=is_identity,
    )


def weight_arguments(
    topk_weights: torch.Tensor | None, scale: torch.Tensor | None, none: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_weights and scale, as kernels take them."""
    if topk_weights is None or scale is None:
        return none, none
    return topk_weights, scale


def present(tensors: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """The same, none of them None."""
    found = [tensor for tensor in tensors if tensor is not None]
    assert len(found) == len(tensors), tensors
    return found


def identity_order(
    topk_ids: torch.Tensor,
    factors: PairFactors | None,
    num_experts: int,
    block_m: int,
    topk_weights: torch.Tensor | None = None,
) -> PairOrder:
    """Pair p at position p, each pair a tile; no launch. For a handful of pairs.

    Kernels then read the site tables themselves; the arrays of `factors` stay empty.
    """
    arrays = (topk_ids,) * 10
    return make_order(topk_ids, factors, arrays, block_m, num_experts, topk_weights, True)


def order_pairs(
    topk_ids: torch.Tensor,
    factors: PairFactors | None,
    num_experts: int,
    block_m: int,
    pdl: bool = False,
    look_up: bool = True,
    topk_weights: torch.Tensor | None = None,
) -> PairOrder:
    """The arrays of the table above for topk_ids and topk_weights [T, K], contiguous.

    factors: None without LoRA; look_up: fill their arrays by position; block_m: positions of a tile
    at most; pdl: may start before the launch before it has ended. Reference: `reference_order`.
    """
    assert topk_ids.is_contiguous(), topk_ids.stride()
    tokens, top_k = topk_ids.shape
    pairs = tokens * top_k
    num_slots = 0 if factors is None else factors.num_slots
    assert (num_experts + 2) * (num_slots + 1) < 1 << 31, (num_experts, num_slots)
    max_tiles = min(pairs, pairs // block_m + min(pairs, num_experts))
    at = torch.empty(5, pairs, dtype=torch.int32, device=topk_ids.device)
    tile = torch.empty(3, max_tiles, dtype=torch.int32, device=topk_ids.device)
    num_tiles, num_pieces = torch.empty(2, 1, dtype=torch.int32, device=topk_ids.device)
    scale = None if topk_weights is None else torch.empty_like(topk_weights).view(-1)
    rows = 16 if pairs <= 1024 else 32
    _order_kernel[(ceil_div(pairs, rows),)](
        topk_ids,
        topk_ids if factors is None else factors.slots,
        *weight_arguments(topk_weights, scale, topk_ids),
        *at,
        *tile,
        num_tiles,
        num_pieces,
        pairs,
        num_experts,
        num_slots,
        *factor_arguments(factors, topk_ids),
        TOP_K=top_k,
        HAS_SLOTS=factors is not None,
        HAS_WEIGHTS=scale is not None,
        LOOK_UP=factors is not None and look_up,
        **factor_options(factors),
        BLOCK_M=block_m,
        ROWS=rows,
        CHUNK=power_of_two(pairs, 16, 256),
        WIDE=power_of_two(pairs, 16, 1024),
        BINS=power_of_two(num_experts + 2, 16, 4096),
        num_warps=4,
        **pdl_options(pdl),
    )
    arrays = (*at, *tile, num_tiles, num_pieces)
    return make_order(topk_ids, factors, arrays, block_m, num_experts, scale)


def reference_order(
    experts: list[int], slots: list[int], num_experts: int
) -> tuple[list[int], list[int]]:
    """Pairs and run ends by position, to be read."""
    keys = [
        (expert if 0 <= expert < num_experts else num_experts, max(slot, -1))
        for expert, slot in zip(experts, slots, strict=True)
    ]
    pairs = sorted(range(len(keys)), key=lambda pair: (keys[pair], pair))
    ends = [sum(other <= keys[pair] for other in keys) for pair in pairs]
    return pairs, ends
