"""Routing of the torch backend: plain index arrays on the host, where small ones cost least.

A numpy call on a few dozen integers takes 0.5 us where a torch call takes 2 to 4 us (measured).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch

from vexpert.ops.routing import Arrangement, Routing

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pairs:
    """Active pairs: the rows that LoRA changes, with their slot and expert, all [n]."""

    rows: IntArray
    slots: IntArray
    experts: IntArray

    def take(self, which: IntArray | npt.NDArray[np.bool_]) -> "Pairs":
        """The pairs at positions, or where a mask is true."""
        return Pairs(self.rows[which], self.slots[which], self.experts[which])


@dataclass(frozen=True)
class Segment:
    """All rows [m] of one virtual expert."""

    slot: int
    expert: int
    rows: IntArray


@dataclass(frozen=True)
class TorchRouting(Routing):
    """Which virtual expert each row needs. What is derived from that is computed when asked for."""

    num_experts: int
    slots: IntArray  # [num_rows] adapter slot, or < 0
    experts: IntArray | None  # [num_rows] local expert, or a sentinel; None: a dense layer

    @cached_property
    def whole(self) -> bool:
        """Whether every row is active."""
        if not self.num_rows:
            return True
        experts = self.experts
        return bool(self.slots.min() >= 0) and (
            experts is None or _all_below(experts, self.num_experts)
        )

    @cached_property
    def pairs(self) -> Pairs:
        """The active rows, ascending."""
        experts = np.zeros_like(self.slots) if self.experts is None else self.experts
        pairs = Pairs(steps(self.num_rows), self.slots, experts)
        if self.whole:
            return pairs
        return pairs.take((self.slots >= 0) & (experts >= 0) & (experts < self.num_experts))

    @cached_property
    def active_slots(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.pairs.slots.tolist())))

    @cached_property
    def virtual(self) -> IntArray:
        """Virtual expert of each active pair [n]."""
        virtual: IntArray = self.pairs.slots * self.num_experts + self.pairs.experts
        return virtual

    @cached_property
    def is_single(self) -> bool:
        """Whether every row needs one and the same virtual expert."""
        if not self.whole or not self.num_rows or len(self.active_slots) > 1:
            return False
        return self.num_experts == 1 or bool((self.virtual == self.virtual[0]).all())

    def split(self, min_rows: int) -> tuple[tuple[Segment, ...], Pairs]:
        """Virtual experts with at least `min_rows` rows; the pairs of all others, in order."""
        if len(self.pairs.rows) < min_rows:
            return (), self.pairs
        return self._split(min_rows)

    @cached_property
    def _splits(self) -> dict[int, tuple[tuple[Segment, ...], Pairs]]:
        return {}

    def _split(self, min_rows: int) -> tuple[tuple[Segment, ...], Pairs]:
        if min_rows not in self._splits:
            order = np.argsort(self.virtual, kind="stable")
            virtual, starts = np.unique(self.virtual[order], return_index=True)
            parts = np.split(order, starts[1:])
            large = [len(part) >= min_rows for part in parts]
            segments = tuple(
                Segment(*divmod(int(v), self.num_experts), self.pairs.rows[part])
                for v, part, is_large in zip(virtual, parts, large, strict=True)
                if is_large
            )
            rest = [part for part, is_large in zip(parts, large, strict=True) if not is_large]
            chosen = np.concatenate([np.empty(0, np.int64), *rest])
            pairs = self.pairs.take(np.sort(chosen)) if segments else self.pairs
            self._splits[min_rows] = (segments, pairs)
        return self._splits[min_rows]


@lru_cache(maxsize=256)
def steps(count: int, step: int = 1) -> IntArray:
    """`0, step, 2 * step, ...` (`count` of them). Shared: not to be written."""
    return np.arange(0, count * step, step, dtype=np.int64)


@lru_cache(maxsize=64)
def repeated(count: int, times: int) -> IntArray:
    """`0, 0, ..., 1, 1, ...`: each of `count` integers `times` times. Shared: not to be written."""
    return np.repeat(steps(count), times)


def route(slots: torch.Tensor, experts: torch.Tensor | None, num_experts: int) -> TorchRouting:
    """Routing of slots [P] and experts [P] (None: a dense layer), both int64 on the CPU."""
    local = None if experts is None else experts.numpy()
    return TorchRouting(slots.shape[0], num_experts, slots.numpy(), local)


def _all_below(values: IntArray, limit: int) -> bool:
    """Whether 0 <= value < limit for all; a negative value is a huge unsigned one."""
    return not values.size or bool(values.view(np.uint64).max() < limit)


def ragged(counts: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """For bags of `counts` [n] items: bag and place in it of each item, first item of each bag."""
    starts = np.cumsum(counts) - counts
    bag = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return bag, np.arange(len(bag), dtype=np.int64) - starts[bag], starts


def as_rows(rows: Sequence[int] | IntArray) -> torch.Tensor:
    """Indices as a tensor [n] int64 over the same memory."""
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))


@dataclass(frozen=True)
class TorchArrangement(Arrangement):
    """Pairs sorted by expert, so that an expert's weights are read once; sentinels left out."""

    counts: IntArray  # [num_experts] rows of each expert
    kept: IntArray | None  # [P] which of the T * K pairs are rows, ascending; None: all of them
    position: IntArray  # [P] row of each kept pair
    bag_start: IntArray  # [T] first item of each token in `position`


def arrange(topk_ids: torch.Tensor, num_experts: int) -> TorchArrangement:
    """Arrangement of topk_ids [T, K] int64 on the CPU."""
    tokens, k = topk_ids.shape
    expert: IntArray = topk_ids.reshape(-1).numpy()
    kept, bag_start, token = None, steps(tokens, k), repeated(tokens, k)
    pair = steps(len(expert))
    if not _all_below(expert, num_experts):
        valid = (expert >= 0) & (expert < num_experts)
        kept = pair = np.flatnonzero(valid)
        expert, token = expert[kept], token[kept]
        per_token = valid.reshape(tokens, k).sum(1)
        bag_start = np.cumsum(per_token) - per_token
    order = np.argsort(expert, kind="stable")
    position = np.empty_like(order)
    position[order] = steps(len(order))
    expert = expert[order]
    return TorchArrangement(
        pair=torch.from_numpy(pair[order]),
        token=torch.from_numpy(token[order]),
        expert=torch.from_numpy(expert),
        num_tokens=tokens,
        counts=np.bincount(expert, minlength=num_experts),
        kept=kept,
        position=position,
        bag_start=bag_start,
    )
