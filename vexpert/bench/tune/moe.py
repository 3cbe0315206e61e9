"""One step of one MoE layer as something to tune: runs a plan, checks it, times many in turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from vexpert.bench.cases import Case
from vexpert.bench.draw import Draw
from vexpert.bench.layer import BenchLayer
from vexpert.bench.measure import triton_errors
from vexpert.bench.reference import BOUNDS, largest_error, reference
from vexpert.bench.timer import Prepared, Timer
from vexpert.ops.fused_experts import FusedExpertsKernel, fused_experts
from vexpert.ops.moe_plan import MoePlan, fit_plan
from vexpert.ops.types import ExpertsLora

AT_ONCE = 24  # graphs whose memory is held together


def kernel_of(layer: BenchLayer) -> FusedExpertsKernel:
    """The layer as one operation of the Triton backend."""
    fused = layer.fused
    assert isinstance(fused, FusedExpertsKernel), fused
    return fused


def lora_of(layer: BenchLayer, step: Draw) -> ExpertsLora:
    """The step's adapters."""
    return ExpertsLora(step.slots, step.active_slots, *layer.sites)


def run_plan(layer: BenchLayer, step: Draw, plan: MoePlan, with_lora: bool) -> torch.Tensor:
    """The layer's output [T, H] by `plan`."""
    kernel = kernel_of(layer)
    fitted = fit_plan(plan, kernel.shape(step.topk_ids))
    lora = lora_of(layer, step) if with_lora else None
    given = step.hidden, step.topk_ids, step.topk_weights
    return fused_experts(kernel.experts, *given, lora, fitted)


@dataclass(frozen=True)
class MoeStep:
    """What is measured: one case, with or without its adapters."""

    case: Case
    layer: BenchLayer
    step: Draw
    with_lora: bool
    timer: Timer
    faults: Callable[[Sequence[MoePlan]], Sequence[str | None]]  # of candidates, before any runs
    report: Callable[[str], None]

    def measure(self, plans: Sequence[MoePlan]) -> list[float | None]:
        """Times in multiples of the first plan's; None: it cannot be used, or is wrong."""
        # The first is in use: it stays, whatever is said of it.
        faults = [None, *self.faults(plans[1:])]
        ratios: list[float | None] = []
        for start in range(0, len(plans), AT_ONCE):
            chunk = [
                None if fault else plan
                for plan, fault in zip(
                    plans[start : start + AT_ONCE], faults[start : start + AT_ONCE], strict=True
                )
            ]
            ratios += self._chunk(plans[0], chunk)
        return ratios

    @cached_property
    def _expected(self) -> torch.Tensor:
        return reference(self.layer, self.step, self.with_lora)

    def _chunk(self, first: MoePlan, plans: Sequence[MoePlan | None]) -> list[float | None]:
        prepared = {"first": self.timer.prepare(self._call(first))}
        for i, plan in enumerate(plans):
            ready = None if plan is None else self._prepare(plan)
            if ready is not None:
                prepared[str(i)] = ready
        times = self.timer.time_in_turns(prepared)
        unit = times["first"].median
        return [times[str(i)].median / unit if str(i) in times else None for i in range(len(plans))]

    def _prepare(self, plan: MoePlan) -> Prepared | None:
        """Ready to be timed, or None if it cannot run or is wrong."""
        try:
            prepared = self.timer.prepare(self._call(plan))
        except triton_errors() as error:
            self.report(f"cannot run: {' '.join(str(error).split())[:160]}: {plan}")
            return None
        error_found = largest_error(prepared.run(), self._expected)
        if error_found > BOUNDS[self.layer.dtype]:
            self.report(f"wrong (error {error_found:.1e}): {plan}")
            return None
        return prepared

    def _call(self, plan: MoePlan) -> Callable[[], torch.Tensor]:
        return partial(run_plan, self.layer, self.step, plan, self.with_lora)

    def duel(self, old: MoePlan, new: MoePlan, timer: Timer) -> tuple[float, float]:
        """Microseconds of both, in turns."""
        ready = {"old": timer.prepare(self._call(old)), "new": timer.prepare(self._call(new))}
        times = timer.time_in_turns(ready)
        return times["old"].median, times["new"].median
