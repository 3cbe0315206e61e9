"""Changes of the logits before sampling: biases, minimum length, penalties, truncation."""

from typing import NamedTuple

import numpy as np
import torch

from vexpert.engine.sampler_rows import TopLimits
from vexpert.engine.sampler_state import SamplerState

FIRST_WIDTH = 256  # candidates to sort before all: for 32 rows of 32k tokens 3 ms instead of 73


class Changes(NamedTuple):
    """Of m logits, no two the same: divided by `factors`, or multiplied if negative, then less."""

    rows: np.ndarray  # [m] int64
    tokens: np.ndarray  # [m] int64
    factors: np.ndarray  # [m]
    shifts: np.ndarray  # [m]

    def packed(self) -> torch.Tensor:
        """As the kernel takes them, [3, m] int64 on the host."""
        amounts = np.stack([self.factors, self.shifts], 1).astype(np.float32)
        entries = [self.rows, self.tokens, amounts.view(np.int64)[:, 0]]
        return torch.from_numpy(np.stack(entries))


def bias_changes(rows: list[SamplerState]) -> Changes | None:
    """Each row's biases."""
    entries = [(i, token, b) for i, row in enumerate(rows) for token, b in row.biases().items()]
    if not entries:
        return None
    index, tokens, values = (np.array(column) for column in zip(*entries, strict=True))
    return Changes(index, tokens, np.ones(len(entries)), -values)


def add_biases(logits: torch.Tensor, rows: list[SamplerState]) -> None:
    """Add each row's biases to `logits` [n, V], in place."""
    changes = bias_changes(rows)
    if changes is not None:
        index, tokens, _, shifts = (torch.from_numpy(part) for part in changes)
        logits[index, tokens] -= shifts.to(logits.dtype)


def penalty_changes(rows: list[SamplerState]) -> Changes | None:
    """Penalties of the tokens that rows have seen.

    Repetition divides positive logits and multiplies negative ones, for tokens of prompt and
    output; then frequency * count and presence are subtracted, for tokens of the output.
    """
    index, tokens, factors, shifts = [], [], [], []
    for i, row in enumerate(rows):
        if row.has_penalties:
            seen, params = row.token_counts, row.params
            counts = seen.counts[: seen.size]
            index.append(np.full(seen.size, i))
            tokens.append(seen.tokens[: seen.size])
            factors.append(np.full(seen.size, params.repetition_penalty))
            penalty = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
            shifts.append(penalty)
    if not index:
        return None
    return Changes(*(np.concatenate(part) for part in (index, tokens, factors, shifts)))


def apply_penalties(logits: torch.Tensor, rows: list[SamplerState]) -> None:
    """Penalise seen tokens of `logits` [n, V], in place."""
    changes = penalty_changes(rows)
    if changes is None:
        return
    index, tokens = torch.from_numpy(changes.rows), torch.from_numpy(changes.tokens)
    factor, shift = (
        torch.from_numpy(part).to(logits.dtype) for part in (changes.factors, changes.shifts)
    )
    values = logits[index, tokens]
    values = torch.where(values > 0, values / factor, values * factor) - shift
    logits[index, tokens] = values


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Copy of `logits` [n, V], after temperature; less likely than min_p * the likeliest: -inf.

    min_p [n, 1] float32.
    """
    floor = logits.amax(-1, keepdim=True) + min_p.log()
    return logits.masked_fill(logits < floor, float("-inf"))


def keep_top(logits: torch.Tensor, limits: TopLimits) -> torch.Tensor:
    """Copy of `logits` [n, V], after temperature and min-p; outside top-k or top-p: -inf.

    Top-k keeps the k likeliest; top-p keeps the fewest whose probability, of what top-k left,
    reaches p. Of equal tokens those of lower id are likelier.
    """
    vocab = logits.shape[1]
    for width in (max(FIRST_WIDTH, limits.most_k), vocab):
        values = _largest(logits, min(width, vocab))
        counts, is_decided = _count_kept(logits, values, limits)
        if is_decided:
            break
    return _keep_likeliest(logits, values, counts)


def _largest(logits: torch.Tensor, width: int) -> torch.Tensor:
    if width == logits.shape[1]:
        return logits.sort(-1, descending=True).values
    return logits.topk(width, dim=-1).values


def _count_kept(
    logits: torch.Tensor, values: torch.Tensor, limits: TopLimits
) -> tuple[torch.Tensor, bool]:
    """Tokens to keep in each row [n, 1], and whether `values`, sorted [n, w], were enough."""
    width, vocab = values.shape[1], logits.shape[1]
    k, p = limits.top_k, limits.top_p
    in_top_k = torch.arange(width, device=logits.device) < k
    values = values.double().masked_fill(~in_top_k, float("-inf"))
    total = values.logsumexp(-1, keepdim=True)
    if width < vocab:
        total = torch.where(k > width, logits.logsumexp(-1, keepdim=True).double(), total)
    probs = (values - total).exp()
    cumulative = probs.cumsum(-1)
    counts = (in_top_k & (cumulative - probs < p)).sum(-1, keepdim=True).clamp(min=1)
    is_decided = width == vocab or bool(((k <= width) | (cumulative[:, -1:] >= p)).all())
    return counts, is_decided


def _keep_likeliest(
    logits: torch.Tensor, values: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Mask all but the `counts` [n, 1] likeliest; values [n, w]: sorted, descending."""
    last = values.gather(1, counts - 1)
    above = logits > last
    ties = logits == last
    ties &= ties.cumsum(-1) <= counts - above.sum(-1, keepdim=True)
    return logits.masked_fill(~(above | ties), float("-inf"))
