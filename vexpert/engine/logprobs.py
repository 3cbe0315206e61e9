"""Log-probabilities to report: of the raw log-softmax, with ranks."""

from typing import Any, NamedTuple

import torch

from vexpert.engine.host_copy import HostCopy

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

    def _begin(self, logits: torch.Tensor, chosen: torch.Tensor, start: int) -> "_Slab":
        rows = slice(start, start + SLAB_ROWS)
        logprobs = torch.log_softmax(logits[rows].float(), -1)
        return _Slab(logprobs, chosen[rows], max(self._counts[rows]))

    def wait(self) -> list[TokenLogprobs]:
        """The report of each row."""
        result: list[TokenLogprobs] = []
        for slab in self._slabs:
            counts = self._counts[len(result) : len(result) + SLAB_ROWS]
            rows = zip(*slab.wait(), counts, strict=True)
            result += [TokenLogprobs(_entries(*row)) for row in rows]
        return result


class _Slab:
    """Some rows' report in one buffer, so that one copy brings it to the host."""

    def __init__(self, logprobs: torch.Tensor, chosen: torch.Tensor, width: int) -> None:
        self._size = len(chosen), width
        count = len(chosen)
        nbytes = count * ((2 + width) * 8 + (1 + width) * 4)
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=logprobs.device)
        tokens, own, above, ids, values = self._parts(buffer)
        tokens.copy_(chosen)
        torch.gather(logprobs, 1, chosen[:, None], out=own[:, None])
        torch.sum(logprobs > own[:, None], -1, out=above)
        torch.topk(logprobs, width, dim=-1, out=(values, ids))
        self._copy = HostCopy([buffer])

    def _parts(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Token, its log-probability, how many are likelier; ids and values of the likeliest."""
        count, width = self._size
        split = count * (2 + width) * 8
        ints, floats = buffer[:split].view(torch.int64), buffer[split:].view(torch.float32)
        ids, values = ints[2 * count :].view(count, width), floats[count:].view(count, width)
        return ints[:count], floats[:count], ints[count : 2 * count], ids, values

    def wait(self) -> list[list[Any]]:
        """The columns of the report."""
        tokens, own, above, ids, values = self._parts(self._copy.wait()[0])
        return [part.tolist() for part in (tokens, own, above + 1, ids, values)]


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
