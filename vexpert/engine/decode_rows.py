"""The rows of decode steps on the host: one sequence a row, one token each.

While the same sequences decode, a step changes a few numbers of each row; the block tables stay on
the device, and a step only tells them of new blocks.
"""

from typing import NamedTuple

import numpy as np

from vexpert.engine.request import Sequence
from vexpert.engine.scheduler import Chunk


class RowArrays(NamedTuple):
    """Views of one buffer of int64, for `most` rows. Rows behind the last one are padding."""

    token_ids: np.ndarray  # [most]
    positions: np.ndarray  # [most]
    cache_rows: np.ndarray  # [most] row of the KV cache that the token is written to, -1: none
    kv_lens: np.ndarray  # [most] keys to attend over, 0: none
    slots: np.ndarray  # [most] adapter slot, -1: base
    query_starts: np.ndarray  # [most + 1] 0, 1, .. n, n, n: padding has no query
    cells: np.ndarray  # [most] place in the flat block tables that gets a new id
    blocks: np.ndarray  # [most] the id
    sources: np.ndarray  # [most] row of the last step that chose the token; most + row: `token_ids`


def buffer_size(most: int) -> int:
    """Elements of the buffer behind `row_views`."""
    return most * len(RowArrays._fields) + 1


def row_bounds(most: int) -> list[tuple[int, int]]:
    """Start and end of each of RowArrays in the buffer."""
    sizes = [most + (name == "query_starts") for name in RowArrays._fields]
    ends = np.cumsum(sizes).tolist()
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


class DecodeRows:
    """Keeps the rows of the last decode step, and makes the next from them where it can.

    Tables are [most + 1, width]; new ids of rows that have none go to the last row, which nobody
    reads.
    """

    def __init__(self, most: int, width: int, block_size: int) -> None:
        self.width = width
        self._block_size = block_size
        self._spare_cell = most * width
        self._own = np.arange(most, 2 * most)
        self.buffer = np.zeros(buffer_size(most), dtype=np.int64)
        self.arrays = RowArrays(*(self.buffer[a:b] for a, b in row_bounds(most)))
        self.active_slots: tuple[int, ...] = ()
        self._sequences: list[Sequence] = []
        self.clear()

    def forget(self) -> None:
        """Other steps have run in between: the next is built anew."""
        self._sequences = []

    def advance(self, chunks: list[Chunk]) -> np.ndarray | None:
        """Take over a step of one token a chunk.

        Returns None where the tables on the device need only `cells` and `blocks`, else the tables
        of all rows, [len(chunks), longest].
        """
        sequences = [chunk.sequence for chunk in chunks]
        n = len(sequences)
        arrays = self.arrays
        is_same = sequences == self._sequences
        if not is_same:
            self.clear()
        arrays.token_ids[:n] = [sequence.tokens[-1] for sequence in sequences]
        sources = np.array([sequence.source for sequence in sequences])
        arrays.sources[:n] = np.where(sources >= 0, sources, self._own[:n])
        if is_same:
            self._advance(n)
            return None
        positions = np.array([chunk.start for chunk in chunks])
        arrays.positions[:n] = positions
        arrays.kv_lens[:n] = positions + 1
        arrays.slots[:n] = [sequence.slot for sequence in sequences]
        arrays.query_starts[: n + 1] = np.arange(n + 1)
        arrays.query_starts[n + 1 :] = n
        self.active_slots = tuple(sorted({s.slot for s in sequences if s.slot >= 0}))
        self._sequences = sequences
        self._place(n)
        return block_tables(sequences)

    def clear(self) -> None:
        """All rows are padding."""
        self.forget()
        self.active_slots = ()
        arrays = self.arrays
        values = (0, 0, -1, 0, -1, 0, self._spare_cell, 0, self._own)
        for array, value in zip(arrays, values, strict=True):
            array[:] = value

    def _advance(self, n: int) -> None:
        """The same sequences, each one token on."""
        arrays = self.arrays
        arrays.positions[:n] += 1
        arrays.kv_lens[:n] += 1
        arrays.cells[:n] = self._spare_cell
        self._place(n)
        starts_block = arrays.positions[:n] % self._block_size == 0
        for row in np.flatnonzero(starts_block).tolist():
            column = int(arrays.positions[row]) // self._block_size
            arrays.cells[row] = row * self.width + column
            arrays.blocks[row] = self._sequences[row].blocks.ids[column]

    def _place(self, n: int) -> None:
        """Where each token's keys and values go: into the last block of its sequence."""
        arrays, size = self.arrays, self._block_size
        last = np.array([sequence.blocks.ids[-1] for sequence in self._sequences])
        arrays.cache_rows[:n] = last * size + arrays.positions[:n] % size


def block_tables(sequences: list[Sequence]) -> np.ndarray:
    """[B, longest table] int64; unused places hold the sequence's own last block.

    They are read under a mask, and what another sequence wrote may not even be finite.
    """
    widths = [len(sequence.blocks.ids) for sequence in sequences]
    tables = np.zeros((len(sequences), max(widths)), dtype=np.int64)
    for i, width in enumerate(widths):
        tables[i, :width] = sequences[i].blocks.array[:width]
        tables[i, width:] = tables[i, width - 1]
    return tables
