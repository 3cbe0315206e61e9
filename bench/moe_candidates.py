"""Ways to add LoRA to a MoE layer that no packaged plan takes: timed beside that plan, in turns.

`python bench/moe_candidates.py [--cells 1x4096 ...] [--names "ahead 8" ...] [--budget SECONDS]`.
A candidate is the packaged row of a cell with some of its fields changed; `VARIANTS` is all there
is to them, with what each was expected to add before it was run. Each is checked against
`vexpert/bench/reference.py`, and 20 replays must be bitwise equal; then all of a cell are timed in
turns, as `vexpert bench kernel` does. Prints a table a cell, the fastest row, and one line of JSON.
`--compile-only` compiles them in processes of their own, as a run does first, and says which spill;
`--budget` counts that too, and cuts off what comes after it.
`--dry`: with tiny sizes on a CPU, in Triton's interpreter (TRITON_INTERPRET=1): whether it runs.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from vexpert.bench.cases import Case
from vexpert.bench.draw import Draw, draw
from vexpert.bench.header import describe
from vexpert.bench.layer import BenchLayer, layer_key
from vexpert.bench.measure import triton_errors
from vexpert.bench.reference import BOUNDS, largest_error, reference
from vexpert.bench.timer import Prepared, Timer, Timing, make_timer
from vexpert.bench.tune.compiling import Compilers, Job
from vexpert.bench.tune.moe import kernel_of, lora_of, run_plan
from vexpert.bench.tune.rows import plan_row
from vexpert.ops.backend import select_backend
from vexpert.ops.moe_plan import MoePlan, lora_plan
from vexpert.ops.plan_rows import Row

BASE, PACKAGED = "base", "packaged"


@dataclass(frozen=True)
class Cell:
    """Tokens, over the adapters at random; `goal`: us that LoRA may add."""

    adapters: int
    tokens: int
    rank: int
    goal: float

    def case(self, shape: str) -> Case:
        return Case(shape, (self.rank,), self.adapters, self.tokens, self.adapters)


@dataclass(frozen=True)
class Variant:
    """Fields of a plan's row to change, and the us that LoRA was expected to add with them."""

    name: str
    expected: float
    changes: Row


def delta(
    piece: int, gate_up: tuple[int, ...], down: tuple[int, ...] | None = None, first: bool = True
) -> Row:
    """LoRA as deltas; of a shape the fields by `names`."""
    names = "block_k", "block_n", "num_warps", "num_stages", "share", "programs", "together"
    shapes = [
        {name: bool(value) if name == "together" else value for name, value in given}
        for given in (zip(names, shape, strict=True) for shape in (gate_up, down or gate_up))
    ]
    return {"delta": {"piece": piece, "gate_up": shapes[0], "down": shapes[1], "first": first}}


PLAIN = (128, 128, 4, 3, 0, 4, 0)  # the packaged shape for 32 adapters, as one list
DEEP, DEEP_DOWN = (128, 128, 4, 5, 0, 4, 0), (128, 128, 4, 5, 0, 5, 0)
BOTH, SMALL = (128, 64, 4, 5, 0, 4, 1), (64, 64, 4, 6, 0, 5, 1)
WIDE, WIDE_DOWN = (256, 128, 4, 3, 0, 3, 0), (256, 128, 4, 3, 0, 4, 0)
CELLS = {
    "1x4096": Cell(1, 4096, 16, 60),
    "8x4096": Cell(8, 4096, 16, 120),
    "32x4096": Cell(32, 4096, 16, 360),
    "8x4096r64": Cell(8, 4096, 64, 370),
    "1x128": Cell(1, 128, 16, 16),
    "32x512": Cell(32, 512, 16, 215),
}
VARIANTS = {
    "1x4096": [  # packaged: 107
        Variant("ahead 8", 70, {"ahead": 8, "down_ahead": 8}),
        Variant("ahead 24", 72, {"ahead": 24, "down_ahead": 18}),
        Variant("ahead 8, gate_up alone", 84, {"ahead": 8}),
        Variant("ahead 8, down alone", 93, {"down_ahead": 8}),
    ],
    "8x4096": [  # packaged: 215 to 239
        Variant("delta of 32", 180, delta(32, (128, 64, 4, 4, 0, 4, 1))),
        Variant("delta of 32, small steps", 180, delta(32, (64, 64, 4, 5, 0, 4, 1))),
        Variant("delta of 64", 180, delta(64, (64, 64, 4, 5, 0, 3, 0))),
        Variant("delta of 32 at the end", 210, delta(32, (128, 64, 4, 4, 0, 4, 1), first=False)),
        Variant("runs, places ahead", 205, {"prefetch": True}),
        Variant("runs, places ahead, 3 stages", 210, {"prefetch": True, "item_stages": 3}),
    ],
    "32x4096": [  # packaged: 484
        Variant("share of 17", 440, delta(16, (128, 128, 4, 3, 17, 4, 0), first=False)),
        Variant("list", 430, delta(16, PLAIN, first=False)),
        Variant("list, first", 390, delta(16, PLAIN)),
        Variant("list, first, deep", 370, delta(16, DEEP, DEEP_DOWN)),
        Variant("list, first, deep, both", 355, delta(16, BOTH, DEEP_DOWN)),
        Variant("list, first, small steps, both", 365, delta(16, SMALL, DEEP_DOWN)),
        Variant("list, first, wide", 375, delta(16, WIDE, WIDE_DOWN)),
    ],
    "8x4096r64": [  # packaged: 469 to 503
        Variant("delta of 64", 430, delta(64, (64, 64, 4, 3, 0, 2, 0), (64, 64, 4, 3, 0, 4, 0))),
        Variant("delta of 32", 450, delta(32, (64, 64, 4, 4, 0, 2, 1), (64, 64, 4, 4, 0, 3, 0))),
    ],
    "1x128": [  # packaged: 17.1
        Variant("ahead 8", 16, {"ahead": 8, "down_ahead": 8}),
        Variant("ahead 8, down alone", 16, {"down_ahead": 8}),
    ],
    "32x512": [  # packaged: 205
        Variant("list, deep", 190, delta(16, DEEP, DEEP_DOWN, first=False)),
        Variant("list, deep, both", 185, delta(16, BOTH, DEEP_DOWN, first=False)),
    ],
}
DRY_CELLS = {"1x24": Cell(1, 24, 4, 0), "3x24": Cell(3, 24, 4, 0)}
DRY_VARIANTS = {
    "1x24": [Variant("ahead 2", 0, {"by_run": True, "ahead": 2, "down_ahead": 1})],
    "3x24": [
        Variant("list, first, both", 0, {"by_run": True} | delta(16, (32, 32, 4, 2, 0, 2, 1))),
        Variant(
            "share of 3", 0, {"by_run": True} | delta(16, (32, 32, 4, 2, 3, 2, 0), None, False)
        ),
    ],
}


def say(*words: object) -> None:
    print(*words, flush=True)


@dataclass(frozen=True)
class Step:
    """A cell's layer and rows; plans by name, the packaged one first."""

    case: Case
    layer: BenchLayer
    rows: Draw
    plans: dict[str, MoePlan]

    def call(self, name: str) -> Callable[[], torch.Tensor]:
        """The whole layer, by the plan of that name, or without adapters."""
        plan = self.plans[PACKAGED if name == BASE else name]
        return partial(run_plan, self.layer, self.rows, plan, name != BASE)


@dataclass
class Runs:
    """How to run, and until when."""

    device: torch.device
    dtype: torch.dtype
    shape: str
    timer: Timer | None  # None: nothing is run
    compilers: Compilers
    end: float  # of time.monotonic()
    replays: int  # that must be bitwise equal
    _layer: tuple[Case, BenchLayer] | None = None

    def has_time(self) -> bool:
        return time.monotonic() < self.end

    def step(self, cell: Cell, variants: Sequence[Variant]) -> Step:
        """Cells that can share a layer come one after another."""
        case = cell.case(self.shape)
        if self._layer is None or layer_key(self._layer[0]) != layer_key(case):
            self._layer = None  # its memory is needed for the next
            backend = select_backend("triton", self.device, self.dtype)
            self._layer = case, BenchLayer(case, self.device, self.dtype, backend)
        layer, rows = self._layer[1], draw(case, self.device, self.dtype)
        usual = kernel_of(layer).choose(rows.topk_ids, lora_of(layer, rows))
        plans = {PACKAGED: usual}
        for variant in variants:
            changed = lora_plan({**plan_row(usual.lora), **variant.changes})
            plans[variant.name] = replace(usual, lora=changed)
        return Step(case, layer, rows, plans)

    def usable(self, cells: Mapping[str, tuple[Cell, Sequence[Variant]]]) -> dict[str, list[str]]:
        """Names of each cell's plans that compile without a fault; the packaged one always is."""
        jobs: dict[tuple[str, str], Job] = {}
        for name, (cell, variants) in cells.items():
            step = self.step(cell, variants)
            packaged = step.plans[PACKAGED]
            jobs[name, BASE] = Job(step.case, self.dtype, packaged, False)
            for each, plan in step.plans.items():
                jobs[name, each] = Job(step.case, self.dtype, plan, True)
        faults = dict(zip(jobs, self.compilers.faults(list(jobs.values())), strict=True))
        for (name, each), fault in faults.items():
            if fault is not None:
                say(f"{name}, {each}: {fault}")
        return {
            cell: [
                each
                for (name, each), fault in faults.items()
                if name == cell and each != BASE and (fault is None or each == PACKAGED)
            ]
            for cell in cells
        }

    def prepared(self, step: Step, names: Sequence[str]) -> Iterator[tuple[str, Prepared, float]]:
        """(name, ready to be timed, error) of what is right, as long as there is time."""
        assert self.timer is not None
        expected = {kind: reference(step.layer, step.rows, kind) for kind in (False, True)}
        for name in (BASE, *names):
            if not self.has_time():
                say(f"   out of time before {name}")
                return
            try:
                ready = self.timer.prepare(step.call(name))
            except triton_errors() as fault:
                say(f"   cannot run: {name}: {' '.join(str(fault).split())[:160]}")
                continue
            first = ready.run().clone()
            error = largest_error(first, expected[name != BASE])
            same = all(torch.equal(ready.run(), first) for _ in range(self.replays))
            if error > BOUNDS[self.dtype] or not same:
                say(f"   WRONG: {name}, error {error:.1e}, repeatable: {same}")
                continue
            yield name, ready, error

    def measure(
        self, step: Step, names: Sequence[str]
    ) -> tuple[dict[str, Timing], dict[str, float]]:
        """Times and errors by name."""
        assert self.timer is not None
        found = list(self.prepared(step, names))
        ready = {name: prepared for name, prepared, _ in found}
        times = self.timer.time_in_turns(ready) if len(ready) > 1 else {}
        return times, {name: error for name, _, error in found}


def show(
    name: str, cell: Cell, variants: Sequence[Variant], step: Step, times: dict[str, Timing]
) -> dict[str, Any]:
    """Prints a cell's table, and gives what JSON holds of it."""
    if BASE not in times:
        return {}
    base, expected = times[BASE].median, {each.name: each.expected for each in variants}
    added = {each: timing.median - base for each, timing in times.items() if each != BASE}
    say(f"{name}, rank {cell.rank}: base {base:.1f} us, goal {cell.goal:.0f}")
    say("      added (expected)       p10 to p90")
    for each, value in sorted(added.items(), key=lambda pair: pair[1]):
        spread = f"{times[each].p10 - base:.1f} to {times[each].p90 - base:.1f}"
        known = f"{expected[each]:.0f}" if each in expected else "-"
        say(f"   {value:8.1f} ({known:>4}) {spread:>18}  {each}")
    best = min(added, key=lambda each: added[each], default=None)
    row = None if best is None else plan_row(step.plans[best].lora)
    say("   fastest row:", json.dumps(row))
    return {"base_us": base, "goal_us": cell.goal, "added_us": added, "best": best, "row": row}


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", nargs="+", help=f"of {', '.join(CELLS)}")
    parser.add_argument("--names", nargs="+", help="of variants; all")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args(words)
    known = DRY_CELLS if given.dry else CELLS
    unknown = set(given.cells or ()) - set(known)
    if unknown:
        parser.error(f"--cells {' '.join(sorted(unknown))}: unknown; known: {', '.join(known)}")
    return given


def make_runs(given: argparse.Namespace) -> Runs:
    device = torch.device("cpu" if given.dry else "cuda")
    return Runs(
        device,
        torch.float32 if given.dry else torch.bfloat16,
        "tiny" if given.dry else "qwen3-30b-a3b",
        None if given.compile_only else make_timer(device, given.repeats),
        Compilers(0 if given.dry else None),
        time.monotonic() + given.budget,
        2 if given.dry else 20,
    )


def main(words: Sequence[str] | None = None) -> None:
    given = parse(words)
    cells, variants = (DRY_CELLS, DRY_VARIANTS) if given.dry else (CELLS, VARIANTS)
    chosen = {
        name: (
            cells[name],
            [each for each in variants[name] if not given.names or each.name in given.names],
        )
        for name in given.cells or cells
    }
    runs, found = make_runs(given), {}
    facts = describe(runs.device)
    say(", ".join(f"{key} {value}" for key, value in facts.items()))
    try:
        usable = runs.usable(chosen)
        for name, (cell, tried) in chosen.items():
            found[name] = {"usable": usable[name]}
            if given.compile_only:
                continue
            if not runs.has_time():
                say("out of time before", name)
                break
            step = runs.step(cell, tried)
            times, errors = runs.measure(step, usable[name])
            found[name] |= {**show(name, cell, tried, step, times), "errors": errors}
    finally:
        runs.compilers.close()
    say(json.dumps({**facts, "cells": found}))


if __name__ == "__main__":
    with torch.inference_mode():
        main(sys.argv[1:])
