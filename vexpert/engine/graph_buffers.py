"""What captured decode graphs read and write: tensors at fixed places on the device."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from vexpert.engine.decode_rows import DecodeRows, RowArrays, buffer_size, row_bounds
from vexpert.engine.host_copy import Largest
from vexpert.engine.mailbox import Mailbox
from vexpert.engine.scheduler import Chunk
from vexpert.engine.staging import Staging
from vexpert.lora.types import BatchView
from vexpert.models.types import ModelInfo, StepInput

if TYPE_CHECKING:
    from vexpert.kernels.argmax import Scratch


class Decoded(NamedTuple):
    """What a step of n rows gave; valid until the next step."""

    logits: torch.Tensor  # [n, V] float32, or with kernels of `info.logits_dtype`
    largest: Largest | None  # None: not looked for


class GraphBuffers:
    """Inputs and logits of decode steps of up to `most` rows; at first all rows are padding.

    A sequence has up to `width` blocks. `use_kernels`: on a GPU, unless given; then each step also
    finds the largest logit of each row, and leaves its token where the next step reads it.
    """

    def __init__(
        self,
        info: ModelInfo,
        most: int,
        width: int,
        block_size: int,
        use_kernels: bool | None = None,
    ) -> None:
        device = info.device
        self._use_kernels = device.type == "cuda" if use_kernels is None else use_kernels
        self._pdl = False
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
            dtype = info.logits_dtype if self._use_kernels else torch.float32
            self.logits = torch.zeros(most, info.vocab_size, dtype=dtype, device=device)
            self._scratch: Scratch | None = None
            self._mailbox: Mailbox | None = None
            if self._use_kernels:
                from vexpert.kernels import argmax, common  # need Triton

                self._scratch = argmax.Scratch.empty(most, info.vocab_size, device)
                self._pdl = common.can_use_pdl(device)
                self._mailbox = Mailbox(buffer_size(most), most, device)
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
        if chosen is not None and chosen.data_ptr() != self._chosen.data_ptr():
            self._chosen[: len(chosen)] = chosen
        if tables is not None:
            count, width = tables.shape
            (new,) = self._staging.to_device([tables])
            self._tables[:count, :width] = new

    def clear(self) -> None:
        """Show them padding alone."""
        self.rows.clear()
        self._fill()

    def _fill(self) -> None:
        if self._mailbox is None:
            self._staging.fill(self._flat, self.rows.buffer)
        else:
            self._mailbox.write(self.rows.buffer)

    def begin(self, size: int) -> torch.Tensor:
        """Token of each row, [size] int64, from the host or the step before: part of a graph.

        The step's new block ids go to the tables.
        """
        if self._mailbox is not None:
            from vexpert.kernels.decode_inputs import decode_inputs  # needs Triton

            box = self._mailbox
            tables = self._tables.view(-1)
            return decode_inputs(
                *(box.given, box.turn, self._chosen, self._flat, tables, size, self._pdl)
            )
        cells, blocks, sources = (
            self._part(name)[:size] for name in ("cells", "blocks", "sources")
        )
        self._tables.view(-1).scatter_(0, cells, blocks)
        # NO_TOKEN becomes any other: its sequence ends there.
        return self._tokens.index_select(0, sources).clamp(min=0)

    def end(self, logits: torch.Tensor) -> None:
        """Keep a step's `logits` [size, V]: part of a graph."""
        size = len(logits)
        kept = self.logits[:size]
        if self._scratch is None or self._mailbox is None:
            kept[:] = logits
            return
        from vexpert.kernels.argmax import argmax_rows  # needs Triton

        told = self._mailbox.told, self._mailbox.turn
        argmax_rows(logits, self._scratch, self._chosen[:size], kept, *told, pdl=self._pdl)

    def decoded(self, count: int) -> Decoded:
        """What the step that has just been begun gives for its first `count` rows."""
        largest = None
        if self._mailbox is not None:
            largest = Largest(self._chosen[:count], self._mailbox.end(count))
        return Decoded(self.logits[:count], largest)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside, a step may run more often than once: each time it reads the same."""
        changing = [self._chosen] if self._mailbox is None else [self._chosen, self._mailbox.turn]
        saved = [tensor.clone() for tensor in changing]
        try:
            yield
        finally:
            for tensor, before in zip(changing, saved, strict=True):
                tensor.copy_(before)

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
            wants_all=True,
            lora=view,
        )
