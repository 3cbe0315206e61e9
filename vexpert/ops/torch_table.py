"""A site's table on the host, and a plan for adapters that all lie alike there.

Small calls cost more in array operations than in arithmetic (2 to 4 us each in torch, 0.5 us in
numpy), so what depends on the table alone is worked out once, until the table's bytes change.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from vexpert.ops.torch_bags import rows_anywhere, rows_in_step, weighted_dots, weighted_sums
from vexpert.ops.torch_routing import IntArray, Pairs, TorchRouting, repeated, steps
from vexpert.ops.types import LoraSite, OutputSlice, SiteTable

Rows = IntArray | None
MAX_TABLE = 1 << 15  # integers: 256 KiB per site for indices of every virtual expert


@lru_cache(maxsize=64)
def _every_slice(pairs: int, slices: int, rank: int) -> torch.Tensor:
    """Positions in h [pairs, rank] that give h once per slice, [pairs * slices * rank]."""
    places = np.arange(pairs * rank, dtype=np.int64).reshape(pairs, 1, rank)
    return torch.from_numpy(np.repeat(places, slices, axis=1).reshape(-1))


@dataclass(frozen=True)
class UniformPlan:
    """All slots at hand have equal ranks, and their slices tile the output: two calls in all."""

    site: LoraSite
    rank: int  # shrunk columns
    bag_rank: int  # of each slice
    is_shared: bool  # every slice multiplies all shrunk columns, not columns of its own
    a_rows: torch.Tensor  # [N - in + 1, in], the arena's dtype: `rows_anywhere` of it
    b_rows: torch.Tensor  # [N / slice size, slice size], the arena's dtype: `rows_in_step`
    starts: "FactorStarts"
    a_index: IntArray | None  # [S * E, rank] `starts.a` of every virtual expert; None: too many
    b_index: IntArray | None  # [S * E, slices * bag_rank] likewise

    def add(self, x: torch.Tensor, y: torch.Tensor, routing: TorchRouting, x_rows: Rows) -> None:
        """Add to every row of y in place; every row of `routing` is active."""
        count, slices = routing.num_rows, len(self.site.slices)
        if self.a_index is None or self.b_index is None:
            a_index, b_index = self.starts.expand(routing.pairs)
        else:
            a_index, b_index = self.a_index[routing.virtual], self.b_index[routing.virtual]
        x_row = repeated(count, self.rank) if x_rows is None else np.repeat(x_rows, self.rank)
        h = weighted_dots(x, self.a_rows, a_index.reshape(-1), x_row)
        if self.is_shared and slices > 1:
            h = h.index_select(0, _every_slice(count, slices, self.rank))
        bag_start = steps(count * slices, self.bag_rank)
        delta = weighted_sums(h, self.b_rows, b_index.reshape(-1), bag_start)
        y.add_(delta.view(count, self.site.out_features))


@dataclass(frozen=True)
class FactorStarts:
    """Where every slot's factors begin, copied from the table."""

    a_offset: IntArray  # [S] element of the arena
    a_stride: IntArray  # [S]
    b_row: IntArray  # [S, slices] row of `UniformPlan.b_rows`
    b_row_stride: IntArray  # [S, slices]
    a_steps: IntArray  # [rank] from one row of A to the next, in elements
    b_steps: IntArray  # [bag_rank] rows of B^T

    def expand(self, pairs: Pairs) -> tuple[IntArray, IntArray]:
        """Element of each row of A [n, rank]; row of each of B^T [n, slices * bag_rank]."""
        slots, experts = pairs.slots, pairs.experts
        a = (self.a_offset[slots] + experts * self.a_stride[slots])[:, None] + self.a_steps
        b = self.b_row[slots] + experts[:, None] * self.b_row_stride[slots]
        return a, (b[:, :, None] + self.b_steps).reshape(len(slots), -1)

    def expand_all(self, num_experts: int) -> tuple[IntArray, IntArray]:
        """`expand` of every virtual expert, in order."""
        slots, experts = np.divmod(steps(len(self.a_offset) * num_experts), num_experts)
        return self.expand(Pairs(slots, slots, experts))


class HostTable:
    """The arrays of a SiteTable as numpy views of the same memory, so always up to date."""

    def __init__(self, site: LoraSite, table: SiteTable) -> None:
        self.table = table
        parts = [(part.start, part.size, part.stride) for part in site.slices]
        self.parts: IntArray = np.array(parts, dtype=np.int64).reshape(-1, 3)
        self.packed: IntArray = table.packed.numpy()
        self.arena = table.arena.numpy() if table.arena.dtype == torch.float32 else None
        self.rank: IntArray = table.rank.numpy()
        self.a_offset: IntArray = table.a_offset.numpy()
        self.a_stride: IntArray = table.a_stride.numpy()
        self.slice_rank: IntArray = table.slice_rank.numpy()
        self.slice_column: IntArray = table.slice_column.numpy()
        self.b_offset: IntArray = table.b_offset.numpy()
        self.b_stride: IntArray = table.b_stride.numpy()
        self._bytes = b""
        self._plans: dict[tuple[int, ...], UniformPlan | None] = {}

    def a_start(self, pairs: Pairs) -> IntArray:
        """First element of each pair's A [n]."""
        start: IntArray = self.a_offset[pairs.slots] + pairs.experts * self.a_stride[pairs.slots]
        return start

    def b_start(self, pairs: Pairs) -> IntArray:
        """First element of each slice's and pair's B^T [slices, n]."""
        start: IntArray = (
            self.b_offset[:, pairs.slots] + pairs.experts * self.b_stride[:, pairs.slots]
        )
        return start

    def plan(self, site: LoraSite, slots: tuple[int, ...]) -> UniformPlan | None:
        """The plan for pairs of `slots`, or None if they do not lie alike."""
        now = self.packed.tobytes()
        if now != self._bytes or len(self._plans) > 64:
            self._bytes = now
            self._plans.clear()
        if slots not in self._plans:
            self._plans[slots] = self._make_plan(site, np.array(slots, dtype=np.int64))
        return self._plans[slots]

    def _make_plan(self, site: LoraSite, slots: IntArray) -> UniformPlan | None:
        size, slices = site.slices[0].size, len(site.slices)
        rank, bag_rank = int(self.rank[slots[0]]), int(self.slice_rank[0, slots[0]])
        shift = int(self.b_offset[0, slots[0]]) % size
        columns = self.slice_column[:, slots]
        own_columns = bag_rank * np.arange(slices)[:, None]
        is_shared = rank == bag_rank and bool((columns == 0).all())
        lies_alike = (
            bag_rank > 0
            and site.out_features == size * slices
            and all(part == OutputSlice(i * size, size) for i, part in enumerate(site.slices))
            and bool((self.rank[slots] == rank).all())
            and bool((self.slice_rank[:, slots] == bag_rank).all())
            and (is_shared or bool((columns == own_columns).all()))
            and not ((self.b_offset[:, slots] - shift) % size).any()
            and not (self.b_stride[:, slots] % size).any()
        )
        if not lies_alike:
            return None
        starts = FactorStarts(
            a_offset=self.a_offset.copy(),
            a_stride=self.a_stride.copy(),
            b_row=((self.b_offset - shift) // size).T.copy(),
            b_row_stride=(self.b_stride // size).T.copy(),
            a_steps=steps(rank, site.in_features),
            b_steps=steps(bag_rank),
        )
        tables: tuple[IntArray | None, IntArray | None] = (None, None)
        if len(self.rank) * site.num_experts * (rank + slices * bag_rank) <= MAX_TABLE:
            tables = starts.expand_all(site.num_experts)
        return UniformPlan(
            site=site,
            rank=rank,
            bag_rank=bag_rank,
            is_shared=is_shared,
            a_rows=rows_anywhere(self.table.arena, site.in_features),
            b_rows=rows_in_step(self.table.arena, size, shift),
            starts=starts,
            a_index=tables[0],
            b_index=tables[1],
        )
