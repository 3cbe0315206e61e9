"""The options of a batch of rows as tensors: made once, used while the same rows are sampled."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from vexpert.engine.grammar import Matcher
from vexpert.engine.sampler_state import SamplerState

if TYPE_CHECKING:
    from vexpert.kernels.sample import SampleLimits

BELOW_ONE = 1.0 - 2.0**-50  # keeps u * total below total after rounding
# Above any sum of probabilities, so that rounding never cuts where top-p is off.
NO_TOP_P = 2.0


@dataclass(frozen=True)
class TopLimits:
    """Top-k and top-p of n rows, each with one of them or both."""

    top_k: torch.Tensor  # [n, 1] int64; where it is off, more than any vocabulary
    top_p: torch.Tensor  # [n, 1] float64; where it is off, NO_TOP_P
    most_k: int  # the largest of those that are not off; 0: there is none

    @classmethod
    def of(cls, rows: Sequence[SamplerState], device: torch.device) -> "TopLimits":
        given = [row.params.top_k for row in rows]
        top_k = [k if k > 0 else 1 << 62 for k in given]
        top_p = [row.params.top_p if row.params.top_p < 1.0 else NO_TOP_P for row in rows]
        return cls(
            torch.tensor(top_k, device=device)[:, None],
            torch.tensor(top_p, dtype=torch.float64, device=device)[:, None],
            max(0, *given),
        )


def find_matchers(states: Sequence[SamplerState]) -> list[tuple[int, Matcher]]:
    """The rows that a grammar constrains, each with its matcher."""
    return [(i, row.matcher) for i, row in enumerate(states) if row.matcher is not None]


class SamplerRows:
    """What the sampler knows of `states` whatever their logits. Tensors are on `device`."""

    def __init__(self, states: list[SamplerState], device: torch.device) -> None:
        self.states = list(states)
        self._device = device
        self._index: dict[tuple[int, ...], torch.Tensor] = {}
        self.drawn = [i for i, row in enumerate(states) if not row.is_greedy]
        drawn = [states[i] for i in self.drawn]
        self._drawn = drawn
        self.ranked = [i for i, row in enumerate(drawn) if row.is_ranked]  # of the drawn rows
        self.asked = [i for i, row in enumerate(states) if row.params.logprobs is not None]
        self.counts = [states[i].params.logprobs or 0 for i in self.asked]
        self._is_simple = not self.drawn and not self.asked
        self.matchers = find_matchers(states)
        self._may_adjust = [row for row in states if row.may_adjust]

    def are_plain(self) -> bool:
        """Whether all next tokens are the argmax of the raw logits, and nothing is reported."""
        return self._is_simple and not self.are_adjusted()

    def are_adjusted(self) -> bool:
        """Whether biases, penalties or a grammar change the logits of any row."""
        return any(row.is_adjusted for row in self._may_adjust)

    def index(self, rows: list[int]) -> torch.Tensor:
        """`rows` as a tensor."""
        key = tuple(rows)
        if key not in self._index:
            self._index[key] = torch.tensor(rows, device=self._device)
        return self._index[key]

    def of(self, tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Those rows of a tensor with one row a state; itself if they are all."""
        return tensor if len(rows) == len(self.states) else tensor[self.index(rows)]

    @cached_property
    def temperature(self) -> torch.Tensor:
        """[d, 1] of the drawn rows."""
        given = [row.params.temperature for row in self._drawn]
        return torch.tensor(given, device=self._device)[:, None]

    @cached_property
    def min_p(self) -> torch.Tensor | None:
        """[d, 1] of the drawn rows; None: off in all."""
        given = [row.params.min_p for row in self._drawn]
        return torch.tensor(given, device=self._device)[:, None] if any(given) else None

    @cached_property
    def limits(self) -> TopLimits:
        """Of the ranked rows."""
        return TopLimits.of([self._drawn[i] for i in self.ranked], self._device)

    @cached_property
    def sample_limits(self) -> "SampleLimits":
        """Of the drawn rows, as the kernel takes them."""
        from vexpert.kernels.sample import SampleLimits  # needs Triton

        limits = TopLimits.of(self._drawn, self._device)
        min_p = [row.params.min_p for row in self._drawn]
        return SampleLimits(
            self.temperature.view(-1),
            torch.tensor(min_p, dtype=torch.float32).log().to(self._device),
            limits.top_k.view(-1),
            limits.top_p.view(-1),
        )

    def uniforms(self, shared: torch.Generator) -> torch.Tensor:
        """One number of [0, 1) for each drawn row, float64 [d], on the host."""
        pin = self._device.type == "cuda"
        result = torch.empty(len(self._drawn), dtype=torch.float64, pin_memory=pin)
        for i, row in enumerate(self._drawn):
            result[i : i + 1].uniform_(generator=row.generator or shared)
        return result.clamp_(max=BELOW_ONE)
