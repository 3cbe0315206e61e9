"""What a packed adapter puts into the tables of the sites, ready to be written in a step."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from vexpert.lora.pack import SiteEntry


class Cells(NamedTuple):
    """What an adapter's entries put into the tables, flat: one item for each number."""

    site: np.ndarray  # int64, which site's rows
    row: np.ndarray  # int64, which of them: those of `SiteTable.packed`
    value: np.ndarray  # int64, for an adapter that lies at element 0 of the arena
    moves: np.ndarray  # int64, 1 where the adapter's place is to be added, else 0


def entry_cells(entries: "tuple[SiteEntry, ...]") -> Cells:
    """The cells of `entries`, in their order."""
    site: list[int] = []
    row: list[int] = []
    value: list[int] = []
    moves: list[int] = []
    for entry in entries:
        ranks = entry.slice_rank
        used = [int(rank > 0) for rank in ranks]
        offsets = [
            offset if rank else 0 for offset, rank in zip(entry.b_offset, ranks, strict=True)
        ]
        values = [entry.rank, entry.a_offset, entry.a_stride, *ranks, *entry.slice_column]
        values += [*offsets, *entry.b_stride]
        none = [0] * len(ranks)
        site += [entry.site] * len(values)
        row += range(len(values))
        value += values
        moves += [0, 1, 0, *none, *none, *used, *none]
    return Cells(*(np.array(items, dtype=np.int64) for items in (site, row, value, moves)))
