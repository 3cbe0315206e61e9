"""Changes of the logits before sampling: biases, minimum length, penalties, truncation."""

import numpy as np
import torch

from vexpert.engine.sampler_state import SamplerState


def add_biases(logits: torch.Tensor, rows: list[SamplerState]) -> None:
    """Add each row's biases to `logits` [n, V], in place."""
    entries = [(i, token, b) for i, row in enumerate(rows) for token, b in row.biases().items()]
    if entries:
        index, tokens, values = zip(*entries, strict=True)
        where = torch.tensor([index, tokens], device=logits.device)
        bias = torch.tensor(values, dtype=logits.dtype, device=logits.device)
        logits[where[0], where[1]] += bias


def apply_penalties(logits: torch.Tensor, rows: list[SamplerState]) -> None:
    """Penalise seen tokens of `logits` [n, V], in place.

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
        return
    where = torch.from_numpy(np.stack([np.concatenate(index), np.concatenate(tokens)]))
    change = torch.from_numpy(np.stack([np.concatenate(factors), np.concatenate(shifts)]))
    row_index, token_index = where.to(logits.device)
    factor, shift = change.to(logits.device, logits.dtype)
    values = logits[row_index, token_index]
    values = torch.where(values > 0, values / factor, values * factor) - shift
    logits[row_index, token_index] = values


def truncate(logits: torch.Tensor, rows: list[SamplerState]) -> torch.Tensor:
    """Set tokens outside min-p, then top-k, then top-p to -inf; logits [n, V] after temperature.

    Each rule keeps a prefix of the tokens in descending order, equal ones by ascending id. Top-p
    keeps the fewest whose probability, of what min-p and top-k left, reaches p. Returns a copy.
    """
    device = logits.device
    min_p = torch.tensor([row.params.min_p for row in rows], device=device)
    floor = logits.amax(-1) + min_p.log()
    logits = logits.masked_fill(logits < floor[:, None], float("-inf"))
    top_k = [row.params.top_k if row.params.top_k > 0 else logits.shape[1] for row in rows]
    width = min(max(top_k), logits.shape[1])
    values = _largest(logits, width)  # [n, width], descending
    rank = torch.arange(width, device=device)
    in_top_k = rank < torch.tensor(top_k, device=device)[:, None]
    probs = values.masked_fill(~in_top_k, float("-inf")).softmax(-1, dtype=torch.float64)
    before = probs.cumsum(-1) - probs
    # 2: above any sum of probabilities, so that rounding never cuts where top-p is off
    top_p = [row.params.top_p if row.params.top_p < 1.0 else 2.0 for row in rows]
    keep = in_top_k & (before < torch.tensor(top_p, dtype=torch.float64, device=device)[:, None])
    return _keep_likeliest(logits, values, keep.sum(-1, keepdim=True).clamp(min=1))


def _largest(logits: torch.Tensor, width: int) -> torch.Tensor:
    if width == logits.shape[1]:
        return logits.sort(-1, descending=True).values
    return logits.topk(width, dim=-1).values


def _keep_likeliest(
    logits: torch.Tensor, values: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Mask all but the `counts` [n, 1] likeliest; values [n, w]: sorted, descending."""
    last = values.gather(1, counts - 1)
    above = logits > last
    ties = logits == last
    ties &= ties.cumsum(-1) <= counts - above.sum(-1, keepdim=True)
    return logits.masked_fill(~(above | ties), float("-inf"))
