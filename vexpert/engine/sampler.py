"""From logits to tokens: one token for each sequence that has its whole context computed."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from vexpert.engine.grammar import BITS, fill_mask, mask_logits
from vexpert.engine.host_copy import HostCopy, Landing, Largest, to_device
from vexpert.engine.logit_adjust import (
    add_biases,
    apply_min_p,
    apply_penalties,
    bias_changes,
    keep_top,
    penalty_changes,
)
from vexpert.engine.logprobs import LogprobsCopy, TokenLogprobs
from vexpert.engine.sampler_rows import SamplerRows, find_matchers
from vexpert.engine.sampler_state import SamplerState
from vexpert.engine.sampling_params import SamplingParams
from vexpert.models.types import ModelInfo

if TYPE_CHECKING:
    from vexpert.kernels.argmax import Scratch

NO_TOKEN = -1  # of a row whose logits, as adjusted, are not a distribution


class Sampled(NamedTuple):
    """Token of each row or NO_TOKEN, and its log-probabilities where the row asks for them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class Sampling:
    """Tokens that the device chooses now, and the host gets later."""

    def __init__(
        self,
        tokens: torch.Tensor,
        report: LogprobsCopy | None,
        asked: list[int],
        landing: Landing | None = None,
    ) -> None:
        """`report`: log-probabilities of the rows `asked`. `landing`: the tokens; None: not yet."""
        self.tokens = tokens  # [n] int64, on the device
        # The next step may write its own there: on a GPU, after this copy.
        self._copy = landing or HostCopy([tokens if tokens.is_cuda else tokens.clone()])
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

    def __init__(self, seed: int, use_kernels: bool | None = None) -> None:
        """`use_kernels`: where the logits are on a GPU, unless given."""
        self._generator = torch.Generator().manual_seed(seed)
        self._rows: SamplerRows | None = None  # of the last call
        self._use_kernels = use_kernels
        self._scratch: Scratch | None = None  # of the kernel that finds the largest

    def sample(self, logits: torch.Tensor, rows: list[SamplerState]) -> Sampled:
        """`logits` [n, V], float32 on a CPU, unchanged; waits for the device.

        A row gets NO_TOKEN if a logit is NaN or +inf, or none is finite, after all adjustments.
        """
        return self.begin(logits, rows).wait()

    def begin(
        self,
        logits: torch.Tensor,
        rows: list[SamplerState],
        largest: Largest | None = None,
    ) -> Sampling:
        """The same without the wait; `logits` may change once it returns.

        `largest`, where kernels are used: of `logits`, where it is known. On the device it becomes
        the chosen tokens, in place.
        """
        if self._rows is None or self._rows.states != rows:
            self._rows = SamplerRows(rows, logits.device)
        seen = self._rows
        if seen.are_plain() and largest is not None:
            return Sampling(largest.tokens, None, [], largest.landing)
        if logits.is_cuda if self._use_kernels is None else self._use_kernels:
            known = None if largest is None else largest.tokens
            tokens = self._choose_by_kernels(logits, seen, known)
        else:
            assert largest is None, "it is only known where kernels are used"
            tokens = self._choose(self._adjust(logits, rows), seen)
        asked = seen.asked
        report = None
        if asked:
            part = seen.of(logits, asked)
            report = LogprobsCopy(part, seen.of(tokens, asked).clamp(min=0), seen.counts)
        return Sampling(tokens, report, asked)

    def rehearse(self, info: ModelInfo) -> None:
        """Choose tokens of nothing: on a GPU the kernels are compiled."""
        logits = torch.zeros(1, info.vocab_size, dtype=info.logits_dtype, device=info.device)
        for temperature in (0.0, 1.0):
            for bias in ({}, {0: 1.0}):
                params = SamplingParams(seed=0, temperature=temperature, logit_bias=bias)
                self.begin(logits, [SamplerState(params, [], ())])
        if info.device.type == "cuda":
            from vexpert.kernels.adjust_logits import mask_rows  # needs Triton

            words = -(-info.vocab_size // BITS)
            mask = torch.zeros(1, words, dtype=torch.int32, device=info.device)
            mask_rows(logits.float(), torch.zeros(1, dtype=torch.int64, device=info.device), mask)

    def _adjust(self, logits: torch.Tensor, rows: list[SamplerState]) -> torch.Tensor:
        if not any(row.is_adjusted for row in rows):
            return logits
        logits = logits.clone()
        add_biases(logits, rows)
        apply_penalties(logits, rows)
        matchers = find_matchers(rows)
        if matchers:
            mask_logits(logits, matchers)
        return logits

    def _choose(self, logits: torch.Tensor, rows: SamplerRows) -> torch.Tensor:
        if not rows.drawn:
            return _largest(logits)
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

    def _choose_by_kernels(
        self, logits: torch.Tensor, rows: SamplerRows, largest: torch.Tensor | None
    ) -> torch.Tensor:
        """The tokens [n], in place of `largest` if it is given; see `begin`."""
        from vexpert.kernels.sample import sample  # needs Triton

        tokens, is_known = largest, largest is not None
        if rows.are_adjusted():
            logits, is_known = _adjust_by_kernels(logits, rows), False
        if len(rows.drawn) < len(rows.states) and not is_known:
            tokens = self._largest_by_kernel(logits, tokens)
        if tokens is None:
            tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if rows.drawn:
            uniforms = self._uniforms(rows).to(logits.device, non_blocking=True)
            sample(logits, rows.index(rows.drawn), rows.sample_limits, uniforms, tokens)
        return tokens

    def _largest_by_kernel(self, logits: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
        """What `_largest` gives, in `tokens` [n] if they are given."""
        from vexpert.kernels.argmax import Scratch, argmax_rows  # needs Triton

        rows, vocab = logits.shape
        if self._scratch is None or not self._scratch.holds(rows, vocab):
            self._scratch = Scratch.empty(rows, vocab, logits.device)
        return argmax_rows(logits, self._scratch, tokens)

    def _uniforms(self, rows: SamplerRows) -> torch.Tensor:
        """One number of [0, 1) for each drawn row, float64 [d], on the host."""
        return rows.uniforms(self._generator)


def _adjust_by_kernels(logits: torch.Tensor, rows: SamplerRows) -> torch.Tensor:
    """A copy of `logits` as biases, penalties and grammars leave them, float32."""
    from vexpert.kernels.adjust_logits import change_logits, mask_rows  # needs Triton

    device = logits.device
    logits = logits.to(torch.float32, copy=True)
    for changes in (bias_changes(rows.states), penalty_changes(rows.states)):
        if changes is not None:
            change_logits(logits, to_device(changes.packed(), device))
    if rows.matchers:
        constrained = rows.index([row for row, _ in rows.matchers])
        mask = fill_mask([matcher for _, matcher in rows.matchers], logits.shape[1])
        mask_rows(logits, constrained, to_device(mask, device))
    return logits


def _largest(logits: torch.Tensor) -> torch.Tensor:
    """The first likeliest token of each row of `logits` [n, V], or NO_TOKEN."""
    tokens = logits.argmax(-1, keepdim=True)  # of a row with NaN: the place of the NaN
    return torch.where(logits.gather(1, tokens).isfinite(), tokens, NO_TOKEN)[:, 0]
