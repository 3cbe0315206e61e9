"""What the sampler remembers of one sequence: its options, generator and token counts."""

from collections.abc import Iterable

import numpy as np
import torch

from vexpert.engine.grammar import Matcher
from vexpert.engine.sampling_params import SamplingParams

NEVER = float("-inf")


class TokenCounts:
    """Distinct tokens seen and how often each is in the output; O(1) per new token."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        distinct = sorted(set(prompt_token_ids))
        self.size = len(distinct)
        self.tokens = np.zeros(max(64, 2 * self.size), dtype=np.int64)  # [capacity]
        self.counts = np.zeros(len(self.tokens), dtype=np.float32)  # [capacity], output only
        self.tokens[: self.size] = distinct
        self._index = {token: index for index, token in enumerate(distinct)}

    def add(self, token: int) -> None:
        index = self._index.get(token)
        if index is None:
            index = self._index[token] = self.size
            self.size += 1
            if self.size > len(self.tokens):
                self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)])
                self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
            self.tokens[index] = token
        self.counts[index] += 1


class SamplerState:
    """One row of the sampler. `observe` must see every sampled token, in order."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: list[int],
        eos_token_ids: tuple[int, ...],
        index: int = 0,
        matcher: Matcher | None = None,
    ) -> None:
        """`index`: which of the request's n completions; it offsets the seed."""
        self.params = params
        self.matcher = matcher
        self.generator: torch.Generator | None = None
        if params.seed is not None:
            self.generator = torch.Generator().manual_seed((params.seed + index) % 2**64)
        self.has_penalties = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        repeats = params.repetition_penalty != 1.0
        self.token_counts = TokenCounts(prompt_token_ids if repeats else ())
        self._stop_tokens = (*eos_token_ids, *params.stop_token_ids)
        self._num_output = 0
        self.is_greedy = params.is_greedy
        self.is_ranked = params.top_k > 0 or params.top_p < 1.0
        self._adjusts = self.has_penalties or bool(params.logit_bias) or matcher is not None
        self.may_adjust = self._adjusts or params.min_tokens > 0  # whether `is_adjusted` ever is

    @property
    def is_adjusted(self) -> bool:
        """Whether biases, penalties or a grammar change the next logits."""
        return self._adjusts or self._num_output < self.params.min_tokens

    def overrun(self) -> str | None:
        """Why the sequence cannot go on: its grammar takes too long."""
        return None if self.matcher is None else self.matcher.overrun

    def biases(self) -> dict[int, float]:
        """What to add to the next logits, by token; stop tokens before min_tokens get -inf."""
        if self._num_output >= self.params.min_tokens:
            return self.params.logit_bias
        return {**self.params.logit_bias, **dict.fromkeys(self._stop_tokens, NEVER)}

    def observe(self, token: int) -> None:
        self._num_output += 1
        if self.has_penalties:
            self.token_counts.add(token)
        if self.matcher is not None:
            self.matcher.accept(token)
