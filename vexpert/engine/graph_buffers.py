"""What captured decode graphs read and write: tensors at fixed places on the device."""

import dataclasses

import torch

from vexpert.engine.decode_rows import DecodeRows, RowArrays, buffer_size, row_bounds
from vexpert.engine.scheduler import Chunk
from vexpert.engine.staging import Staging
from vexpert.lora.types import BatchView
from vexpert.models.types import ModelInfo, StepInput


class GraphBuffers:
    """Inputs and logits of decode steps of up to `most` rows; at first all rows are padding.

    A sequence has up to `width` blocks.
    """

    def __init__(self, info: ModelInfo, most: int, width: int, block_size: int) -> None:
        device = info.device
        self.rows = DecodeRows(most, width, block_size)
        self._limit = width * block_size
        self._staging = Staging(device)
        with torch.inference_mode(False):
            # The tokens of the last step, then the buffer of rows, which begins with token ids.
            both = torch.zeros(most + buffer_size(most), dtype=torch.int64, device=device)
            self._chosen, self._flat = both[:most], both[most:]
            self._tokens = both[: 2 * most]
            self._tables = torch.zeros(most + 1, width, dtype=torch.int64, device=device)
            self._row_numbers = torch.arange(most, device=device)
            self.logits = torch.zeros(most, info.vocab_size, device=device)
        self.parts = [self._flat[a:b] for a, b in row_bounds(most)]
        self._fill()

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        tensors = (self._flat, self._tables, self._row_numbers, self.logits)
        return sum(tensor.nbytes for tensor in tensors)

    def slots(self, size: int) -> torch.Tensor:
        """Adapter slot of each row, [size] int64 on the device."""
        return self._part("slots")[:size]

    def _part(self, name: str) -> torch.Tensor:
        return self.parts[RowArrays._fields.index(name)]

    def upload(self, chunks: list[Chunk], chosen: torch.Tensor | None) -> None:
        """Show the graphs a step of one token a chunk; `chosen` [m]: tokens of the step before."""
        tables = self.rows.advance(chunks)
        self._fill()
        if chosen is not None:  # NO_TOKEN becomes any other: its sequence ends there
            torch.clamp(chosen, min=0, out=self._chosen[: len(chosen)])
        if tables is not None:
            count, width = tables.shape
            (new,) = self._staging.to_device([tables])
            self._tables[:count, :width] = new

    def clear(self) -> None:
        """Show them padding alone."""
        self.rows.clear()
        self._fill()

    def _fill(self) -> None:
        self._staging.fill(self._flat, self.rows.buffer)

    def update_tables(self, size: int) -> None:
        """Write the step's new block ids to the tables. On the device: part of a graph."""
        cells, blocks = self._part("cells"), self._part("blocks")
        self._tables.view(-1).scatter_(0, cells[:size], blocks[:size])

    def tokens(self, size: int) -> torch.Tensor:
        """Token of each row, [size] int64, from the host or the step before: part of a graph."""
        return self._tokens.index_select(0, self._part("sources")[:size])

    def step(self, size: int, view: BatchView | None) -> StepInput:
        """The first `size` rows as a step; its tensors are the buffers themselves."""
        token_ids, positions, cache_rows, kv_lens, slots, starts, *_ = self.parts
        if view is not None:
            view = dataclasses.replace(view, slots=slots[:size], logit_slots=slots[:size])
        return StepInput(
            token_ids=token_ids[:size],
            positions=positions[:size],
            query_lens=(1,) * size,
            context_lens=(self._limit,) * size,
            block_tables=self._tables[:size],
            cache_rows=cache_rows[:size],
            logit_rows=self._row_numbers[:size],
            query_starts=starts[: size + 1],
            kv_lens=kv_lens[:size],
            lora=view,
        )
