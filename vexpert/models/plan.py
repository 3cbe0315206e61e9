"""Index arrays of one step: built once, reused by the attention of every layer.

Kernels of paged attention take `attention_batch`. Without them:
Sequences with equally few queries form one padded group (all decodes are one group); a longer
prefill chunk is a group of its own. Keys are read by whole blocks.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from vexpert.models.masks import MaskKind
from vexpert.models.types import StepInput
from vexpert.ops.attention import AttentionBatch

SMALL_QUERY = 8  # chunks up to this length are padded together; longer ones would waste the padding


@dataclass(frozen=True)
class Group:
    """`n` sequences with `q` queries each."""

    sequences: tuple[int, ...]  # n indices into the step's sequences
    q: int
    rows: torch.Tensor | slice  # [n * q] int64: rows of the step; a slice if they are consecutive
    context_lens: tuple[int, ...]  # n


@dataclass(frozen=True)
class Keys:
    """The keys that one group may need under one mask kind."""

    blocks: torch.Tensor  # [n * b] int64: block ids, b of each sequence, padded with valid ids
    length: int  # b * block_size keys of each sequence
    mask: torch.Tensor  # [n, q, length] bool: query may see key


class StepPlan:
    """Groups of a step, and per mask kind the blocks and masks of each group, made on demand."""

    def __init__(self, step: StepInput, block_size: int) -> None:
        self.step = step
        self.block_size = block_size
        self.found: dict[object, Any] = {}  # what layers share besides
        self._keys: dict[MaskKind, tuple[Keys, ...]] = {}
        self._head_masks: dict[object, tuple[torch.Tensor, ...]] = {}

    @cached_property
    def attention_batch(self) -> AttentionBatch:
        """The step for attention kernels. May be set before its first use: to a graph's own."""
        return self.step.attention_batch(self.block_size)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        return _make_groups(self.step)

    @property
    def num_tokens(self) -> int:
        return sum(self.step.query_lens)

    def keys(self, kind: MaskKind) -> tuple[Keys, ...]:
        """Keys of each group under `kind`."""
        found = self._keys.get(kind)
        if found is None:
            found = tuple(_make_keys(self, group, kind) for group in self.groups)
            self._keys[kind] = found
        return found

    def head_masks(self, kind: MaskKind, repeats: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """Per group [n, 1, repeat * q, length] bool: the `repeat` heads that share a product."""
        found = self._head_masks.get((kind, repeats))
        if found is None:
            pairs = zip(self.keys(kind), repeats, strict=True)
            found = tuple(keys.mask.repeat(1, repeat, 1)[:, None] for keys, repeat in pairs)
            self._head_masks[kind, repeats] = found
        return found


def _make_groups(step: StepInput) -> tuple[Group, ...]:
    """Group the step's sequences; the order inside a group is that of the step."""
    by_key: dict[tuple[int, int], list[int]] = {}
    for index, q in enumerate(step.query_lens):
        key = (q, -1) if q <= SMALL_QUERY else (q, index)
        by_key.setdefault(key, []).append(index)
    starts = [0]
    for q in step.query_lens:
        starts.append(starts[-1] + q)
    groups = []
    for (q, _), members in by_key.items():
        lens = tuple(step.context_lens[i] for i in members)
        first = [starts[i] for i in members]
        groups.append(Group(tuple(members), q, _rows(first, q, step.positions.device), lens))
    return tuple(groups)


def _rows(first: list[int], q: int, device: torch.device) -> torch.Tensor | slice:
    """Rows `start .. start + q - 1` for each start in `first`."""
    if all(start == first[0] + i * q for i, start in enumerate(first)):
        return slice(first[0], first[0] + len(first) * q)
    rows = [start + i for start in first for i in range(q)]
    return torch.tensor(rows, device=device)


def _make_keys(plan: StepPlan, group: Group, kind: MaskKind) -> Keys:
    """Blocks from the first that any query of a sequence may see to the last of its context."""
    tables, size = plan.step.block_tables, plan.block_size
    first = [kind.first_key(length - group.q) // size for length in group.context_lens]
    ends = [-(-length // size) for length in group.context_lens]
    count = max(end - begin for begin, end in zip(first, ends, strict=True))
    host = torch.tensor([group.sequences, first])
    sequence, start = host.to(tables.device, non_blocking=True)
    columns = start[:, None] + torch.arange(count, device=tables.device)
    blocks = tables[sequence[:, None], columns.clamp(max=tables.shape[1] - 1)]
    offsets = torch.arange(count * size, device=tables.device)
    key = start[:, None] * size + offsets  # [n, length]
    query = plan.step.positions[group.rows].view(-1, group.q)
    mask = kind.allowed(query[:, :, None], key[:, None, :])
    return Keys(blocks.flatten(), count * size, mask)
