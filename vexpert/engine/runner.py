"""Runs the model on a schedule: builds the step's tensors and returns the wanted logits."""

from typing import NamedTuple

import numpy as np
import torch

from vexpert.engine.adapters import AdapterSource
from vexpert.engine.decode_rows import block_tables
from vexpert.engine.graphs import DecodeGraphs
from vexpert.engine.host_copy import Largest
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
    """Logits of one step: of `info.logits_dtype` on a GPU, else float32."""

    sampled: list[Sequence]  # sequences whose next token is due
    sample_logits: torch.Tensor  # [len(sampled), V]
    prompt_rows: list[PromptRows]
    prompt_logits: torch.Tensor  # [sum of sizes, V]
    largest: Largest | None = None  # of `sample_logits`, where it is known


class Runner:
    """Owns nothing but its staging buffers; the KV cache is the model's.

    With `graphs`, steps of one token a sequence are replayed where they can be.
    """

    def __init__(
        self,
        model: ServedModel,
        adapters: AdapterSource,
        block_size: int,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._block_size = block_size
        self._staging = Staging(model.info.device)
        self._graphs = graphs

    def run(self, chunks: list[Chunk], chosen: torch.Tensor | None = None) -> StepResult:
        """One forward pass over `chunks`; writes their KV. Logits live until the next step.

        `chosen` [m] int64, on the device: the tokens of the step before, for sequences whose last
        token the host does not know yet.
        """
        sampled = [c.sequence for c in chunks if c.start + c.size == len(c.sequence.tokens)]
        prompt_rows = [rows for chunk in chunks if (rows := _prompt_rows(chunk)).size > 0]
        if self._graphs is not None and not prompt_rows and _is_decode(chunks, sampled):
            decoded = self._graphs.run(chunks, chosen)
            if decoded is not None:
                logits, largest = decoded
                return StepResult(sampled, logits, prompt_rows, logits[:0], largest)
        logits = self._run_eagerly(chunks, prompt_rows, chosen)
        split = len(sampled)
        return StepResult(sampled, logits[:split], prompt_rows, logits[split:])

    def _run_eagerly(
        self, chunks: list[Chunk], prompt_rows: list[PromptRows], chosen: torch.Tensor | None
    ) -> torch.Tensor:
        if self._graphs is not None:
            self._graphs.forget_rows()
        step = self._step_input(chunks, prompt_rows, chosen)
        # On a GPU the sampler's kernels take any dtype; PyTorch's sampling on a CPU wants float32.
        is_cuda = self._model.info.device.type == "cuda"
        return self._model.raw_logits(step) if is_cuda else self._model.forward(step)

    def _step_input(
        self, chunks: list[Chunk], prompt_rows: list[PromptRows], chosen: torch.Tensor | None
    ) -> StepInput:
        counts = np.array([chunk.size for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        slots = np.array([chunk.sequence.slot for chunk in chunks])
        ends = np.cumsum(counts)
        of_token = np.repeat(np.arange(len(chunks)), counts)  # [T]: which chunk
        positions = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
        tables = block_tables([chunk.sequence for chunk in chunks])
        blocks = tables[of_token, positions // self._block_size]
        cache_rows = blocks * self._block_size + positions % self._block_size
        logit_rows = _logit_rows(chunks, ends, prompt_rows)
        token_slots = slots[of_token]
        arrays = [_token_ids(chunks), positions, cache_rows, tables, logit_rows]
        arrays += [np.concatenate([[0], ends]), starts + counts]
        active = tuple(sorted({slot for slot in slots.tolist() if slot >= 0}))
        sources = np.array([chunk.sequence.source for chunk in chunks])
        unknown = sources >= 0
        arrays += [(ends - 1)[unknown], sources[unknown]]
        if active:
            arrays += [token_slots, token_slots[logit_rows]]
        tensors = self._staging.to_device(arrays)
        if unknown.any():
            assert chosen is not None, "a token is unknown, but no step is under way"
            tokens = chosen.index_select(0, tensors[8]).clamp(min=0)  # NO_TOKEN: it ends there
            tensors[0].index_copy_(0, tensors[7], tokens)
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
            lora=self._view(tensors[9:], active),
        )

    def _view(self, slots: list[torch.Tensor], active: tuple[int, ...]) -> BatchView | None:
        return self._adapters.batch_view(slots[0], slots[1], active) if active else None


def _is_decode(chunks: list[Chunk], sampled: list[Sequence]) -> bool:
    """Whether each chunk is one token, and the last of its sequence."""
    return len(sampled) == len(chunks) and all(chunk.size == 1 for chunk in chunks)


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


def _logit_rows(chunks: list[Chunk], ends: np.ndarray, prompt_rows: list[PromptRows]) -> np.ndarray:
    """Rows to sample from, in order of the chunks, then the prompt rows."""
    is_last = [c.start + c.size == len(c.sequence.tokens) for c in chunks]
    rows: np.ndarray = ends[np.array(is_last)] - 1
    if not prompt_rows:
        return rows
    begin = {id(c.sequence): end - c.size - c.start for c, end in zip(chunks, ends, strict=True)}
    spans = [begin[id(r.sequence)] + np.arange(r.first, r.first + r.size) for r in prompt_rows]
    return np.concatenate([rows, *spans])
