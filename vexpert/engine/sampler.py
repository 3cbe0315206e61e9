"""From logits to tokens: one token for each sequence that has its whole context computed."""

from typing import NamedTuple

import torch

from vexpert.engine.grammar import mask_logits
from vexpert.engine.host_copy import HostCopy
from vexpert.engine.logit_adjust import add_biases, apply_min_p, apply_penalties, keep_top
from vexpert.engine.logprobs import LogprobsCopy, TokenLogprobs
from vexpert.engine.sampler_rows import SamplerRows
from vexpert.engine.sampler_state import SamplerState
from vexpert.engine.sampling_params import SamplingParams

NO_TOKEN = -1  # of a row whose logits, as adjusted, are not a distribution


class Sampled(NamedTuple):
    """Token of each row or NO_TOKEN, and its log-probabilities where the row asks for them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class Sampling:
    """Tokens that the device chooses now, and the host gets later."""

    def __init__(self, tokens: torch.Tensor, report: LogprobsCopy | None, asked: list[int]) -> None:
        """`report`: log-probabilities of the rows `asked`."""
        self.tokens = tokens  # [n] int64, on the device
        self._copy = HostCopy([tokens])
        self._report = report
        self._asked = asked

    def wait(self) -> Sampled:
        """Wait for the device."""
        token_ids = self._copy.wait()[0].tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        if self._report is not None:
            for row, found in zip(self._asked, self._report.wait(), strict=True):
                logprobs[row] = found
        return Sampled(token_ids, logprobs)


class Sampler:
    """Rows without a seed share one generator; a row with a seed draws from its own.

    Every row that is not greedy uses one uniform number, drawn on the host, and the inverse of
    its cumulative distribution: a row's tokens depend on nothing else in the batch.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._rows: SamplerRows | None = None  # of the last call

    def sample(self, logits: torch.Tensor, rows: list[SamplerState]) -> Sampled:
        """`logits` [n, V] float32, unchanged; waits for the device.

        A row gets NO_TOKEN if a logit is NaN or +inf, or none is finite, after all adjustments.
        """
        return self.begin(logits, rows).wait()

    def begin(self, logits: torch.Tensor, rows: list[SamplerState]) -> Sampling:
        """The same without the wait; `logits` may change once it returns."""
        if self._rows is None or self._rows.states != rows:
            self._rows = SamplerRows(rows, logits.device)
        seen = self._rows
        if seen.are_plain():
            return Sampling(_largest(logits), None, [])
        tokens = self._choose(self._adjust(logits, rows), seen)
        asked = seen.asked
        report = None
        if asked:
            part = seen.of(logits, asked)
            report = LogprobsCopy(part, seen.of(tokens, asked).clamp(min=0), seen.counts)
        return Sampling(tokens, report, asked)

    def rehearse(self, vocab_size: int, device: torch.device) -> None:
        """Draw one token of nothing: on a GPU the kernel is compiled."""
        state = SamplerState(SamplingParams(seed=0), [], ())
        self.begin(torch.zeros(1, vocab_size, device=device), [state])

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

    def _choose(self, logits: torch.Tensor, rows: SamplerRows) -> torch.Tensor:
        if not rows.drawn:
            return _largest(logits)
        if logits.is_cuda:
            drawn = self._draw_on_gpu(logits, rows)
        else:
            drawn = self._draw(rows.of(logits, rows.drawn), rows)
        if len(rows.drawn) == len(rows.states):
            return drawn
        tokens = _largest(logits)
        tokens[rows.index(rows.drawn)] = drawn
        return tokens

    def _draw(self, logits: torch.Tensor, rows: SamplerRows) -> torch.Tensor:
        """Tokens of the drawn rows, from their logits [d, V]."""
        scaled = logits / rows.temperature
        if rows.min_p is not None:
            scaled = apply_min_p(scaled, rows.min_p)
        if rows.ranked:
            if len(rows.ranked) == len(scaled):
                scaled = keep_top(scaled, rows.limits)
            else:
                where = rows.index(rows.ranked)
                scaled[where] = keep_top(scaled[where], rows.limits)
        cumulative = scaled.softmax(-1).cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        target = self._uniforms(rows).to(logits.device, non_blocking=True)[:, None] * total
        tokens = torch.searchsorted(cumulative, target, right=True)
        return torch.where(total.isfinite(), tokens, NO_TOKEN)[:, 0]

    def _draw_on_gpu(self, logits: torch.Tensor, rows: SamplerRows) -> torch.Tensor:
        """The same from all logits [n, V], in one launch, whatever the options."""
        from vexpert.kernels.sample import sample  # needs Triton

        uniforms = self._uniforms(rows).to(logits.device, non_blocking=True)
        return sample(logits, rows.index(rows.drawn), rows.sample_limits, uniforms)

    def _uniforms(self, rows: SamplerRows) -> torch.Tensor:
        """One number of [0, 1) for each drawn row, float64 [d], on the host."""
        return rows.uniforms(self._generator)


def _largest(logits: torch.Tensor) -> torch.Tensor:
    """The first likeliest token of each row of `logits` [n, V], or NO_TOKEN."""
    tokens = logits.argmax(-1, keepdim=True)  # of a row with NaN: the place of the NaN
    return torch.where(logits.gather(1, tokens).isfinite(), tokens, NO_TOKEN)[:, 0]
