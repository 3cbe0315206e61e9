"""LoRA on a CPU: many rows of one virtual expert are two products; all others are bags of rows.

One `Delta` is one call for one site. Index arrays are built on the host for the pairs at hand.
"""

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
)
from vexpert.ops.torch_table import HostTable
from vexpert.ops.types import LoraSite, OutputSlice

# Rows of one virtual expert from which two matrix products beat bags. Measured at rank 8, 256 to
# 512 columns: about 25 us for the products' calls, 0.6 us a row for bags.
SEGMENT_ROWS = 32


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
            self.add_segment(y, segment, None)
            return
        segments, rest = routing.split(SEGMENT_ROWS)
        for segment in segments:
            self.add_segment(y, segment, segment.rows)
        if not len(rest.rows):
            return
        if rest is routing.pairs and routing.whole:
            plan = self.host.plan(self.site, routing.active_slots)
            if plan is not None:
                plan.add(self.x, y, routing, self.x_rows)
                return
        h, starts = self.shrink(rest)
        self.expand(y, rest, h, starts)

    def add_segment(self, y: torch.Tensor, segment: Segment, rows: IntArray | None) -> None:
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
