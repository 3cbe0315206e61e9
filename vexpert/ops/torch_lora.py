"""LoRA on a CPU: many rows of one virtual expert are two products; all others are bags of rows.

One `Delta` is one call for one site. Index arrays are built on the host for the pairs at hand.
"""

from dataclasses import dataclass

import numpy as np
import torch

from vexpert.ops.torch_bags import dots, sums
from vexpert.ops.torch_routing import (
    IntArray,
    Pairs,
    Segment,
    TorchRouting,
    as_rows,
    ragged,
    repeated,
    steps,
)
from vexpert.ops.types import LoraSite, OutputSlice, SiteTable

# Rows of one virtual expert from which two matrix products beat bags. Measured at rank 8, 256 to
# 512 columns: about 25 us for the products' calls, 0.6 us a row for bags.
SEGMENT_ROWS = 32


class HostTable:
    """The arrays of a SiteTable as numpy views of the same memory, so always up to date."""

    def __init__(self, table: SiteTable) -> None:
        self.table = table
        self.rank: IntArray = table.rank.numpy()
        self.a_offset: IntArray = table.a_offset.numpy()
        self.a_stride: IntArray = table.a_stride.numpy()
        self.slice_rank: IntArray = table.slice_rank.numpy()
        self.slice_column: IntArray = table.slice_column.numpy()
        self.b_offset: IntArray = table.b_offset.numpy()
        self.b_stride: IntArray = table.b_stride.numpy()

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


def columns(y: torch.Tensor, part: OutputSlice) -> torch.Tensor:
    """The view of y [P, out] that a slice writes."""
    if part.start == 0 and part.size == y.shape[1]:
        return y
    return y[:, part.start : part.start + (part.size - 1) * part.stride + 1 : part.stride]


def add_rows(y: torch.Tensor, rows: IntArray | None, delta: torch.Tensor) -> None:
    """y[rows] += delta in place; rows are distinct. None: all rows."""
    if rows is None:
        y.add_(delta)
        return
    index = as_rows(rows)
    y[index] = y.index_select(0, index).add_(delta)


@dataclass(frozen=True)
class Layout:
    """How the pairs of a call lie, if they all lie alike: `rank` shrunk columns in `bags` slices.

    Slices are equal parts of the output; each multiplies its own columns, or all the same ones.
    """

    rank: int
    bag_rank: int
    shared: bool


class Delta:
    """The delta of one site for rows of x [R, in], R = P or less when `x_rows` [P] is given."""

    def __init__(
        self, x: torch.Tensor, site: LoraSite, host: HostTable, x_rows: torch.Tensor | None
    ) -> None:
        self.x = x
        self.site = site
        self.host = host
        self.arena = host.table.arena
        self.x_rows: IntArray | None = None if x_rows is None else x_rows.numpy()

    def add(self, y: torch.Tensor, routing: TorchRouting) -> None:
        """Add every active pair's delta to y [P, out] in place."""
        if routing.is_single:
            pairs = routing.pairs
            segment = Segment(int(pairs.slots[0]), int(pairs.experts[0]), pairs.rows)
            self._add_segment(y, segment, None)
            return
        segments, rest = routing.split(SEGMENT_ROWS)
        for segment in segments:
            self._add_segment(y, segment, segment.rows)
        if not len(rest.rows):
            return
        layout = self._layout(routing) if routing.whole and not segments else None
        if layout is not None and self._add_uniform(y, rest, layout):
            return
        h, starts = self.shrink(rest)
        self.expand(y, rest, h, starts)

    def _add_segment(self, y: torch.Tensor, segment: Segment, rows: IntArray | None) -> None:
        """Two matrix products for all rows of a virtual expert; None: all rows of y, in order."""
        slot, expert = segment.slot, segment.expert
        rank = int(self.host.rank[slot])
        if rank == 0:
            return
        a_start = int(self.host.a_offset[slot] + expert * self.host.a_stride[slot])
        h = self._take_x(rows) @ self._matrix(a_start, rank, self.site.in_features).t()
        for i, part in enumerate(self.site.slices):
            count, column = int(self.host.slice_rank[i, slot]), int(self.host.slice_column[i, slot])
            if count == 0:
                continue
            b_start = int(self.host.b_offset[i, slot] + expert * self.host.b_stride[i, slot])
            b = self._matrix(b_start, count, part.size)
            out = columns(y, part)
            if rows is None and y.dtype == h.dtype:
                out.addmm_(h[:, column : column + count], b)
            else:
                add_rows(out, rows, (h[:, column : column + count] @ b).to(y.dtype))

    def _take_x(self, rows: IntArray | None) -> torch.Tensor:
        """Rows of x for rows of y, in float32: products of half dtypes would round in between."""
        x_rows = self.x_rows if rows is None else rows
        if rows is not None and self.x_rows is not None:
            x_rows = self.x_rows[rows]
        x = self.x if x_rows is None else self.x.index_select(0, as_rows(x_rows))
        return x.to(torch.float32)

    def _matrix(self, start: int, rows: int, width: int) -> torch.Tensor:
        """A factor [rows, width] in float32."""
        return self.arena.narrow(0, start, rows * width).view(rows, width).to(torch.float32)

    def _layout(self, routing: TorchRouting) -> Layout | None:
        """What all active slots have in common, or None if they differ."""
        slots, parts = routing.active_slots, self.site.slices
        host, first = self.host, slots[0]
        if len(slots) > 1:
            pick = routing.slot_array
            for values in (host.rank[pick], host.slice_rank[:, pick], host.slice_column[:, pick]):
                if (values != values[..., :1]).any():
                    return None
        rank, bag_rank = int(host.rank[first]), int(host.slice_rank[0, first])
        if bag_rank == 0:
            return None
        starts = host.slice_column[:, first].tolist()
        size = parts[0].size
        tiled = self.site.out_features == size * len(parts) and all(
            part == OutputSlice(i * size, size) for i, part in enumerate(parts)
        )
        if not tiled or host.slice_rank[:, first].tolist() != [bag_rank] * len(parts):
            return None
        if starts == [0] * len(parts) and rank == bag_rank:
            return Layout(rank, bag_rank, shared=True)
        if starts == [i * bag_rank for i in range(len(parts))] and rank == bag_rank * len(parts):
            return Layout(rank, bag_rank, shared=False)
        return None

    def _add_uniform(self, y: torch.Tensor, pairs: Pairs, layout: Layout) -> bool:
        """Shrink and expand in two calls; False when B^T's rows do not line up (see `sums`)."""
        count, parts, size = len(pairs.rows), len(self.site.slices), self.site.slices[0].size
        b_start = self.host.b_start(pairs).T  # [n, slices]
        if ((b_start - b_start[0, 0]) % size).any():
            return False
        a_index = self.host.a_start(pairs)[:, None] + steps(layout.rank, self.site.in_features)
        if self.x_rows is None:
            x_row = repeated(count, layout.rank)
        else:
            x_row = np.repeat(self.x_rows, layout.rank)
        h = dots(self.x, self.arena, self.site.in_features, a_index.reshape(-1), x_row)
        if layout.shared and parts > 1:
            h = h.view(count, 1, layout.rank).expand(-1, parts, -1).reshape(-1)
        b_index = b_start[:, :, None] + steps(layout.bag_rank, size)
        bag_start = steps(count * parts, layout.bag_rank)
        y.add_(sums(h, self.arena, size, b_index.reshape(-1), bag_start).view(count, -1))
        return True

    def shrink(self, pairs: Pairs) -> tuple[torch.Tensor, IntArray]:
        """Shrunk values of all pairs, one pair after another, and where each pair's begin."""
        pair, column, starts = ragged(self.host.rank[pairs.slots])
        offset = self.host.a_start(pairs)[pair] + column * self.site.in_features
        rows = pairs.rows if self.x_rows is None else self.x_rows[pairs.rows]
        if not len(pair):
            return self.x.new_empty(0), starts
        return dots(self.x, self.arena, self.site.in_features, offset, rows[pair]), starts

    def expand(self, y: torch.Tensor, pairs: Pairs, h: torch.Tensor, starts: IntArray) -> None:
        """Add to rows of y; h [any] flat, a pair's shrunk values begin at `starts` [n]."""
        b_start = self.host.b_start(pairs)
        for i, part in enumerate(self.site.slices):
            counts = self.host.slice_rank[i, pairs.slots]
            source = starts + self.host.slice_column[i, pairs.slots]
            shift = b_start[i] % part.size
            for value in np.unique(shift[counts > 0]):
                which = np.flatnonzero((shift == value) & (counts > 0))
                bag, column, bag_start = ragged(counts[which])
                offset = b_start[i, which][bag] + column * part.size
                weight = h.index_select(0, as_rows(source[which][bag] + column))
                delta = sums(weight, self.arena, part.size, offset, bag_start)
                add_rows(columns(y, part), pairs.rows[which], delta)
