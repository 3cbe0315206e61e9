"""From logits to tokens: one token for each sequence that has its whole context computed."""

from typing import NamedTuple

import torch

from vexpert.engine.grammar import mask_logits
from vexpert.engine.logit_adjust import add_biases, apply_min_p, apply_penalties, keep_top
from vexpert.engine.logprobs import TokenLogprobs, token_logprobs
from vexpert.engine.sampler_state import SamplerState

NO_TOKEN = -1  # of a row whose logits, as adjusted, are not a distribution
BELOW_ONE = 1.0 - 2.0**-50  # keeps u * total below total after rounding


class Sampled(NamedTuple):
    """Token of each row or NO_TOKEN, and its log-probabilities where the row asks for them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Rows without a seed share one generator; a row with a seed draws from its own.

    Every row that is not greedy uses one uniform number, drawn on the host, and the inverse of
    its cumulative distribution: a row's tokens depend on nothing else in the batch.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def sample(self, logits: torch.Tensor, rows: list[SamplerState]) -> Sampled:
        """`logits` [n, V] float32, unchanged; one host sync.

        A row gets NO_TOKEN if a logit is NaN or +inf, or none is finite, after all adjustments.
        """
        if all(row.is_plain for row in rows):
            return Sampled(_largest(logits).tolist(), [None] * len(rows))
        adjusted = self._adjust(logits, rows)
        tokens = self._choose(adjusted, rows)
        return Sampled(tokens.tolist(), self._report(logits, tokens, rows))

    def _adjust(self, logits: torch.Tensor, rows: list[SamplerState]) -> torch.Tensor:
        if not any(row.is_adjusted for row in rows):
            return logits
        logits = logits.clone()
        add_biases(logits, rows)
        apply_penalties(logits, rows)
        matchers = [(i, row.matcher) for i, row in enumerate(rows) if row.matcher is not None]
        if matchers:
            mask_logits(logits, matchers)
        return logits

    def _choose(self, logits: torch.Tensor, rows: list[SamplerState]) -> torch.Tensor:
        drawn = [i for i, row in enumerate(rows) if not row.is_greedy]
        if not drawn:
            return _largest(logits)
        if len(drawn) == len(rows):
            return self._draw(logits, rows)
        where = torch.tensor(drawn, device=logits.device)
        tokens = _largest(logits)
        tokens[where] = self._draw(logits[where], [rows[i] for i in drawn])
        return tokens

    def _draw(self, logits: torch.Tensor, rows: list[SamplerState]) -> torch.Tensor:
        temperature = torch.tensor([row.params.temperature for row in rows], device=logits.device)
        scaled = logits / temperature[:, None]
        if any(row.params.min_p > 0.0 for row in rows):
            scaled = apply_min_p(scaled, rows)
        ranked = [i for i, row in enumerate(rows) if row.is_ranked]
        if len(ranked) == len(rows):
            scaled = keep_top(scaled, rows)
        elif ranked:
            where = torch.tensor(ranked, device=logits.device)
            scaled[where] = keep_top(scaled[where], [rows[i] for i in ranked])
        cumulative = scaled.softmax(-1).cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        target = self._uniforms(rows).to(logits.device)[:, None] * total
        tokens = torch.searchsorted(cumulative, target, right=True)
        return torch.where(total.isfinite(), tokens, NO_TOKEN)[:, 0]

    def _uniforms(self, rows: list[SamplerState]) -> torch.Tensor:
        """One number of [0, 1) for each row, float64 [n], on the host."""
        uniforms = torch.empty(len(rows), dtype=torch.float64)
        for i, row in enumerate(rows):
            uniforms[i : i + 1].uniform_(generator=row.generator or self._generator)
        return uniforms.clamp_(max=BELOW_ONE)

    def _report(
        self, logits: torch.Tensor, tokens: torch.Tensor, rows: list[SamplerState]
    ) -> list[TokenLogprobs | None]:
        asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        report: list[TokenLogprobs | None] = [None] * len(rows)
        if asked:
            where = torch.tensor(asked, device=logits.device)
            counts = [rows[i].params.logprobs or 0 for i in asked]
            chosen = tokens[where].clamp(min=0)
            for i, row in zip(asked, token_logprobs(logits[where], chosen, counts), strict=True):
                report[i] = row
        return report


def _largest(logits: torch.Tensor) -> torch.Tensor:
    """The first likeliest token of each row of `logits` [n, V], or NO_TOKEN."""
    tokens = logits.argmax(-1, keepdim=True)  # of a row with NaN: the place of the NaN
    return torch.where(logits.gather(1, tokens).isfinite(), tokens, NO_TOKEN)[:, 0]
