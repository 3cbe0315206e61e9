"""Tunes the plans of one MoE shape: base by tokens, then LoRA by rank, adapters and tokens."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from vexpert.bench.cases import Case
from vexpert.bench.draw import draw
from vexpert.bench.layer import BenchLayer, layer_key
from vexpert.bench.shapes import find_shape
from vexpert.bench.timer import Timer
from vexpert.bench.tune.compiling import Compilers, Job
from vexpert.bench.tune.moe import MoeStep, kernel_of, lora_of
from vexpert.bench.tune.rows import plan_row, ranges, shape_facts, up_to, within
from vexpert.bench.tune.search import LEAST_GAIN, descend
from vexpert.bench.tune.space import Space, Variants
from vexpert.ops.backend import LoraBackend
from vexpert.ops.moe_plan import MoePlan, MoeShape, fit_plan
from vexpert.ops.plan_rows import Row


@dataclass(frozen=True)
class Grid:
    """What is tuned. Every combination of rank, adapters and tokens is a cell."""

    shape: str
    tokens: tuple[int, ...]
    adapters: tuple[int, ...]
    ranks: tuple[int, ...]

    def case(self, tokens: int, adapters: int, rank: int) -> Case:
        return Case(self.shape, (rank,), adapters, tokens, adapters)


@dataclass(frozen=True)
class Cell:
    """One outcome; microseconds of the whole layer by the packaged plan and by the one found."""

    case: Case
    with_lora: bool
    packaged_us: float
    tuned_us: float
    row: Row | None  # None: the packaged plan is as good

    def line(self) -> str:
        case = self.case
        what = f"rank {case.ranks[0]}, {case.adapters} adapters" if self.with_lora else "base"
        kept = "" if self.row else ", the packaged plan stays"
        times = f"{self.packaged_us:.1f} -> {self.tuned_us:.1f} us"
        return f"{case.tokens} tokens, {what}: {times}{kept}"


@dataclass
class Tuner:
    """How to tune. `has_time` is asked before each coordinate."""

    grid: Grid
    dtype: torch.dtype
    backend: LoraBackend
    timer: Timer
    final: Timer  # of the last comparison: more repeats
    compilers: Compilers
    has_time: Callable[[], bool]
    report: Callable[[str], None]
    space: Space = field(default_factory=Space)
    _layer: tuple[Case, BenchLayer] | None = None
    _base: dict[int, MoePlan] = field(default_factory=dict)  # found, by tokens

    def cells(self) -> Iterator[Cell]:
        """Every cell as soon as it is done; ends when there is no time left."""
        grid = self.grid
        first = grid.adapters[0], grid.ranks[0]
        todo = [(grid.case(tokens, *first), False) for tokens in grid.tokens]
        todo += [
            (grid.case(tokens, adapters, rank), True)
            for rank in grid.ranks
            for adapters in grid.adapters
            for tokens in grid.tokens
        ]
        for case, with_lora in todo:
            if not self.has_time():
                self.report("no time left for the other cells")
                return
            yield self._cell(case, with_lora)

    def _cell(self, case: Case, with_lora: bool) -> Cell:
        step = self._step(case, with_lora)
        kernel = kernel_of(step.layer)
        shape = kernel.shape(step.step.topk_ids)
        default = kernel.choose(step.step.topk_ids, lora_of(step.layer, step.step))
        if with_lora:
            base = self._base.get(case.tokens, default).base
            default = fit_plan(MoePlan(base, default.lora), shape)
            coordinates = self.space.lora(must_run=default.base.order_chunk > 0)
        else:
            per_expert = shape.pairs / shape.num_experts
            coordinates = self.space.base(per_expert, self.dtype.itemsize)
        fitted = {name: _fitted(variants, shape) for name, variants in coordinates.items()}
        found = descend(default, fitted, step.measure, self.has_time, self.report)
        old, new = step.duel(default, found, self.final)
        better = found != default and new < old * (1 - LEAST_GAIN)
        if better and not with_lora:
            self._base[case.tokens] = found
        row = self._row(case, with_lora, found) if better else None
        return Cell(case, with_lora, old, new, row)

    def _step(self, case: Case, with_lora: bool) -> MoeStep:
        if self._layer is None or layer_key(self._layer[0]) != layer_key(case):
            self._layer = None  # its memory is needed for the next
            device = self._device
            self._layer = case, BenchLayer(case, device, self.dtype, self.backend)
        layer = self._layer[1]

        def faults(plans: Sequence[MoePlan]) -> Sequence[str | None]:
            jobs = [Job(case, self.dtype, plan, with_lora) for plan in plans]
            found = self.compilers.faults(jobs)
            for fault in dict.fromkeys(fault for fault in found if fault):
                self.report(f"  {found.count(fault)} skipped: {fault}")
            return found

        step = draw(case, self._device, self.dtype)
        return MoeStep(case, layer, step, with_lora, self.timer, faults, self.report)

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def _row(self, case: Case, with_lora: bool, plan: MoePlan) -> Row:
        grid = self.grid
        row = shape_facts(find_shape(case.shape))
        row |= within("tokens", ranges(grid.tokens)[case.tokens])
        if not with_lora:
            return row | plan_row(plan.base)
        row |= within("adapters", ranges(grid.adapters)[case.adapters])
        row |= within("rank", up_to(grid.ranks, case.ranks[0]))
        return row | plan_row(plan.lora)


def _fitted(variants: Variants, shape: MoeShape) -> Callable[[MoePlan], Iterable[MoePlan]]:
    """The variants as the shape can run them: some become equal, and are measured once."""
    return lambda plan: (fit_plan(variant, shape) for variant in variants(plan))


def families(cells: Sequence[Cell], dtype: torch.dtype) -> dict[str, dict[str, list[Row]]]:
    """The rows of a plan file."""
    kind = "float32" if dtype == torch.float32 else "half"
    rows: dict[str, list[Row]] = {f"base {kind}": [], f"lora {kind}": []}
    for cell in cells:
        if cell.row is not None:
            rows[f"{'lora' if cell.with_lora else 'base'} {kind}"].append(cell.row)
    return {"moe": rows}


def deadline(minutes: float) -> Callable[[], bool]:
    """Whether there is time left, from now on."""
    end = time.monotonic() + 60 * minutes
    return lambda: time.monotonic() < end
