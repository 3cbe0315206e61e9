"""Log-probabilities to report: of the raw log-softmax, with ranks."""

from typing import NamedTuple

import torch

SLAB_ROWS = 128  # rows whose [rows, V] log-softmax lives at once: 78 MB for V = 152k


class TokenLogprobs(NamedTuple):
    """One position: (token, log-probability, rank) of the chosen token, then of the likeliest.

    The rank is 1 + the number of likelier tokens; equally likely tokens share a rank.
    """

    entries: list[tuple[int, float, int]]


def token_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, counts: list[int]
) -> list[TokenLogprobs]:
    """Report `counts[i]` likeliest tokens (-1: all) and `chosen` [n] of raw `logits` [n, V]."""
    result: list[TokenLogprobs] = []
    for start in range(0, len(counts), SLAB_ROWS):
        stop = start + SLAB_ROWS
        result += _slab(logits[start:stop], chosen[start:stop], counts[start:stop])
    return result


def _slab(logits: torch.Tensor, chosen: torch.Tensor, counts: list[int]) -> list[TokenLogprobs]:
    vocab = logits.shape[1]
    counts = [vocab if count < 0 else min(count, vocab) for count in counts]
    logprobs = torch.log_softmax(logits.float(), -1)
    own = logprobs.gather(1, chosen[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    top = logprobs.topk(max(counts), dim=-1)
    columns = (chosen, own[:, 0], ranks, top.indices, top.values)
    rows = zip(*(column.tolist() for column in columns), counts, strict=True)
    return [TokenLogprobs(_entries(*row)) for row in rows]


def _entries(
    token: int, logprob: float, rank: int, ids: list[int], values: list[float], count: int
) -> list[tuple[int, float, int]]:
    entries = [(token, logprob, rank)]
    shared = 1
    for position in range(count):
        if position and values[position] < values[position - 1]:
            shared = position + 1
        if ids[position] != token:
            entries.append((ids[position], values[position], shared))
    return entries
