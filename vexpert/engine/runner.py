"""Runs the model on a schedule: builds the step's tensors and returns the wanted logits."""

from typing import NamedTuple

import numpy as np
import torch

from vexpert.engine.adapters import AdapterSource
from vexpert.engine.request import Sequence
from vexpert.engine.scheduler import Chunk
from vexpert.engine.staging import Staging
from vexpert.lora.types import BatchView
from vexpert.models.types import ServedModel, StepInput


class PromptRows(NamedTuple):
    """Prompt positions `first .. first + size - 1` whose next token's log-probability is due."""

    sequence: Sequence
    first: int
    size: int


class StepResult(NamedTuple):
    """Logits of one step, float32."""

    sampled: list[Sequence]  # sequences whose next token is due
    sample_logits: torch.Tensor  # [len(sampled), V]
    prompt_rows: list[PromptRows]
    prompt_logits: torch.Tensor  # [sum of sizes, V]


class Runner:
    """Owns nothing but its staging buffer; the KV cache is the model's."""

    def __init__(self, model: ServedModel, adapters: AdapterSource, block_size: int) -> None:
        self._model = model
        self._adapters = adapters
        self._block_size = block_size
        self._staging = Staging(model.info.device)

    def run(self, chunks: list[Chunk]) -> StepResult:
        """One forward pass over `chunks`; writes their KV."""
        sampled = [c.sequence for c in chunks if c.start + c.size == len(c.sequence.tokens)]
        prompt_rows = [rows for chunk in chunks if (rows := _prompt_rows(chunk)).size > 0]
        logits = self._model.forward(self._step_input(chunks, prompt_rows))
        split = len(sampled)
        return StepResult(sampled, logits[:split], prompt_rows, logits[split:])

    def _step_input(self, chunks: list[Chunk], prompt_rows: list[PromptRows]) -> StepInput:
        counts = np.array([chunk.size for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        slots = np.array([chunk.sequence.slot for chunk in chunks])
        ends = np.cumsum(counts)
        of_token = np.repeat(np.arange(len(chunks)), counts)  # [T]: which chunk
        positions = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
        tables = _block_tables(chunks)
        blocks = tables[of_token, positions // self._block_size]
        cache_rows = blocks * self._block_size + positions % self._block_size
        logit_rows = _logit_rows(chunks, ends, prompt_rows)
        token_slots = slots[of_token]
        arrays = [_token_ids(chunks), positions, cache_rows, tables, logit_rows]
        arrays += [np.concatenate([[0], ends]), starts + counts]
        active = tuple(sorted({slot for slot in slots.tolist() if slot >= 0}))
        if active:
            arrays += [token_slots, token_slots[logit_rows]]
        tensors = self._staging.to_device(arrays)
        return StepInput(
            token_ids=tensors[0],
            positions=tensors[1],
            query_lens=tuple(counts.tolist()),
            context_lens=tuple((starts + counts).tolist()),
            block_tables=tensors[3],
            cache_rows=tensors[2],
            logit_rows=tensors[4],
            query_starts=tensors[5],
            kv_lens=tensors[6],
            lora=self._view(tensors[7:], active),
        )

    def _view(self, slots: list[torch.Tensor], active: tuple[int, ...]) -> BatchView | None:
        return self._adapters.batch_view(slots[0], slots[1], active) if active else None


def _prompt_rows(chunk: Chunk) -> PromptRows:
    sequence = chunk.sequence
    if not sequence.wants_prompt_logprobs:
        return PromptRows(sequence, 0, 0)
    first = max(chunk.start, sequence.num_prompt_rows_done())
    last = len(sequence.request.prompt_token_ids) - 1  # its next token is not in the prompt
    return PromptRows(sequence, first, min(chunk.start + chunk.size, last) - first)


def _token_ids(chunks: list[Chunk]) -> np.ndarray:
    token_ids: list[int] = []
    for sequence, start, size in chunks:
        if size == 1:
            token_ids.append(sequence.tokens[start])
        else:
            token_ids += sequence.tokens[start : start + size]
    return np.array(token_ids, dtype=np.int64)


def _block_tables(chunks: list[Chunk]) -> np.ndarray:
    """[B, longest table] int64; unused places hold the sequence's own last block.

    They are read under a mask, and what another sequence wrote may not even be finite.
    """
    widths = [len(chunk.sequence.blocks.ids) for chunk in chunks]
    tables = np.zeros((len(chunks), max(widths)), dtype=np.int64)
    for i, width in enumerate(widths):
        tables[i, :width] = chunks[i].sequence.blocks.array[:width]
        tables[i, width:] = tables[i, width - 1]
    return tables


def _logit_rows(chunks: list[Chunk], ends: np.ndarray, prompt_rows: list[PromptRows]) -> np.ndarray:
    """Rows to sample from, in order of the chunks, then the prompt rows."""
    is_last = [c.start + c.size == len(c.sequence.tokens) for c in chunks]
    rows: np.ndarray = ends[np.array(is_last)] - 1
    if not prompt_rows:
        return rows
    begin = {id(c.sequence): end - c.size - c.start for c, end in zip(chunks, ends, strict=True)}
    spans = [begin[id(r.sequence)] + np.arange(r.first, r.first + r.size) for r in prompt_rows]
    return np.concatenate([rows, *spans])
