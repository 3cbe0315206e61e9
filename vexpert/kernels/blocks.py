"""Rows grouped by virtual expert, in blocks of BLOCK_M rows of one virtual expert each.

All on the device, without a sync: sort the keys (virtual expert, or `num_keys` for an inactive
row), find each segment's start, cut segments into blocks, number the blocks. Cost follows the rows:
no array has one element per virtual expert.

| array | shape | holds |
|---|---|---|
| key | [P] int64 | sorted keys; `num_keys` from the first inactive row on |
| order | [P] int64 | row of the activation matrix at each sorted position |
| block_start | [max_blocks] int64 | sorted position of each block's first row |
| num_blocks | [1] int64 | how many of them exist; the rest of `block_start` is arbitrary |
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Blocks:
    """The arrays above. `num_keys` = slots * num_experts; a key is slot * num_experts + expert."""

    key: torch.Tensor
    order: torch.Tensor
    block_start: torch.Tensor
    num_blocks: torch.Tensor
    num_experts: int
    num_keys: int
    block_m: int

    @property
    def max_blocks(self) -> int:
        return self.block_start.shape[0]


def virtual_keys(
    slots: torch.Tensor | None, experts: torch.Tensor, num_experts: int, num_slots: int
) -> torch.Tensor:
    """Keys [P] of slots [P] (None: all 0) and experts [P]; `num_slots * num_experts`: inactive."""
    active = (experts >= 0) & (experts < num_experts)
    key = experts
    if slots is not None:
        active &= slots >= 0
        key = slots * num_experts + experts
    return torch.where(active, key, num_slots * num_experts)


def choose_block_m(rows: int, keys: int) -> int:
    """Rows of a block: about the rows that one key has, from 16 (least of a dot) to 64."""
    per_key = rows / max(1, min(rows, keys))
    return 16 if per_key <= 16 else 32 if per_key <= 32 else 64


def make_blocks(
    keys: torch.Tensor, num_experts: int, num_keys: int, block_m: int | None = None
) -> Blocks:
    """Blocks of rows with keys [P] int64; block_m None: by how many rows a key has."""
    count = keys.shape[0]
    block_m = choose_block_m(count, num_keys) if block_m is None else block_m
    key, order = torch.sort(keys, stable=True)
    place = torch.arange(count, device=keys.device)
    is_start = torch.ones_like(key, dtype=torch.bool)
    is_start[1:] = key[1:] != key[:-1]
    segment_start = torch.cummax(torch.where(is_start, place, 0), 0).values if count else place
    opens_block = ((place - segment_start) % block_m == 0) & (key < num_keys)
    number = torch.cumsum(opens_block, 0)
    # Each segment has at most one block that is not full.
    max_blocks = min(count, count // block_m + min(count, num_keys))
    block_start = torch.zeros(max_blocks + 1, dtype=torch.int64, device=keys.device)
    block_start.scatter_(0, torch.where(opens_block, number - 1, max_blocks), place)
    num_blocks = opens_block.sum(0, keepdim=True)
    return Blocks(key, order, block_start[:max_blocks], num_blocks, num_experts, num_keys, block_m)


def reference_blocks(keys: list[int], num_keys: int, block_m: int) -> list[tuple[int, list[int]]]:
    """The same, to be read: (key, rows) of each block."""
    blocks: list[tuple[int, list[int]]] = []
    for key in sorted({key for key in keys if key < num_keys}):
        rows = [row for row, other in enumerate(keys) if other == key]
        blocks += [(key, rows[i : i + block_m]) for i in range(0, len(rows), block_m)]
    return blocks
