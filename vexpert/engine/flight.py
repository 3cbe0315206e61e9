"""A step under way: begun on the device, its tokens not yet taken to their sequences."""

from dataclasses import dataclass

import torch

from vexpert.engine.request import Sequence
from vexpert.engine.runner import StepResult
from vexpert.engine.sampler import Sampling
from vexpert.engine.scheduler import Chunk, Scheduler


@dataclass(frozen=True)
class Flight:
    """What a step was begun with, and where its results will be."""

    chunks: list[Chunk]
    result: StepResult
    sampling: Sampling | None  # None: no sequence's next token is due

    @property
    def sampled(self) -> list[Sequence]:
        return self.result.sampled

    @property
    def chosen(self) -> torch.Tensor | None:
        """Tokens of `sampled` on the device, [m] int64; the next step may overwrite them."""
        return None if self.sampling is None else self.sampling.tokens


def may_overlap(flight: Flight, scheduler: Scheduler) -> bool:
    """Whether the next step may be scheduled before the tokens of `flight` are known.

    Not when one of its sequences needs them for its next logits (penalties, a grammar, min_tokens),
    nor when a sequence might have to be preempted.
    """
    if scheduler.pool.num_available < len(scheduler.running):
        return False
    return not any(sequence.sampling.is_adjusted for sequence in flight.sampled)
