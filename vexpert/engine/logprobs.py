"""Log-probabilities to report: of the raw log-softmax, with ranks."""

from typing import NamedTuple

import torch
from torch.nn import functional

from vexpert.engine.host_copy import HostCopy

ALIGNED = 4  # float32 values of 16 bytes
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
    return LogprobsCopy(logits, chosen, counts).wait()


class LogprobsCopy:
    """What `token_logprobs` reports, on its way from the device."""

    def __init__(self, logits: torch.Tensor, chosen: torch.Tensor, counts: list[int]) -> None:
        vocab = logits.shape[1]
        self._counts = [vocab if count < 0 else min(count, vocab) for count in counts]
        slabs = range(0, len(counts), SLAB_ROWS)
        self._slabs = [self._begin(logits, chosen, start) for start in slabs]

    def _begin(self, logits: torch.Tensor, chosen: torch.Tensor, start: int) -> HostCopy:
        rows = slice(start, start + SLAB_ROWS)
        chosen = chosen[rows]
        logprobs = log_softmax(logits[rows].float())
        own = logprobs.gather(1, chosen[:, None])
        ranks = (logprobs > own).sum(-1) + 1
        top = logprobs.topk(max(self._counts[rows]), dim=-1)
        return HostCopy([chosen, own[:, 0], ranks, top.indices, top.values])

    def wait(self) -> list[TokenLogprobs]:
        """The report of each row."""
        result: list[TokenLogprobs] = []
        for slab in self._slabs:
            counts = self._counts[len(result) : len(result) + SLAB_ROWS]
            rows = zip(*(column.tolist() for column in slab.wait()), counts, strict=True)
            result += [TokenLogprobs(_entries(*row)) for row in rows]
        return result


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Log-softmax [n, V] of float32 logits, a row the same wherever it lies.

    On a GPU the order of PyTorch's sum follows from how a row's first element is aligned, and in
    a vocabulary of an odd size that is another for each row.
    """
    width = logits.shape[1]
    if not logits.is_cuda or width % ALIGNED == 0:
        return torch.log_softmax(logits, -1)
    padded = functional.pad(logits, (0, -width % ALIGNED), value=float("-inf"))
    return torch.log_softmax(padded, -1)[:, :width]


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
