"""What loads cost the decode steps beside them: the 99th percentile, with a confidence interval.

The model and the adapters of `adapter_load.py`. `--batch` requests decode, every other one with an
adapter, in rounds of `--steps` steps a condition; conditions take turns, in another order in each
round, and each round begins its requests anew, so that drift and growing contexts are the same for
all. One load at a time, without a pause:

| condition | beside the steps |
|---|---|
| alone | nothing |
| host | adapters come to the device from host memory, and evict others |
| reads | adapters are read from files to host memory, and dropped |
| files | adapters come to the device from files, and evict others |

`--slices` adds host and files with other slices: KiB of a copy that are under way at once.

`rise`: the 99th percentile of all steps over that of `alone`, in percent; `low` and `high` hold
95% of 2,000 draws of the rounds with replacement, the same rounds for both. The verdict, before the
last line, which is JSON: whether `high` of host and files is at most `--most`, `low` above it, or
neither.
"""

import argparse
import dataclasses
import gc
import json
import platform
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from adapter_load import Bench, Traffic, add_options, begin_decodes, make_bench

from vexpert.checkout import commit
from vexpert.lora.adapter_state import State

CONDITIONS = ("alone", "host", "reads", "files")
JUDGED = ("host", "files")  # alone, or with a slice: "host, 512"
FEWEST = 6  # rounds
DRAWS = 2000


class Reads:
    """Reads `names` to host memory one after another; nothing goes to the device."""

    def __init__(self, bench: Bench, names: list[str]) -> None:
        self.bench, self.names = bench, names
        self.loads = 0
        self._is_reading = False

    def __call__(self) -> None:
        version = self.bench.version(self.names[self.loads % len(self.names)])
        if version.life.state is State.LOADING:
            return
        if self._is_reading:
            self.loads += 1
            version = self.bench.version(self.names[self.loads % len(self.names)])
        self.bench.forget(version.ref.name, host=True)
        with self.bench.manager._lock:
            self.bench.manager._host.ensure(version)
        self._is_reading = True

    def end(self) -> None:
        for name in self.names:
            self.bench.manager._host.wait(self.bench.version(name))


def end_traffic(bench: Bench, traffic: Traffic) -> None:
    """Step until nothing is on its way any more."""
    while traffic.ref is not None and bench.version(traffic.ref.name).life.slot is None:
        bench.manager.prefetch([traffic.ref])
        bench.engine.step()
    if traffic.ref is not None:
        bench.manager.drop(traffic.ref)
        traffic.ref = None


@dataclasses.dataclass
class Seen:
    """Of one condition: seconds of the steps of each round, and loads a second."""

    rounds: list[list[float]] = dataclasses.field(default_factory=list)
    loads: int = 0
    seconds: float = 0.0


class Turns:
    """Runs the conditions in turns."""

    def __init__(self, bench: Bench, options: argparse.Namespace, names: list[str]) -> None:
        self.bench, self.names = bench, names
        self.batch, self.steps = options.batch, options.steps
        more = [f"{kind}, {size}" for size in options.slices for kind in JUDGED]
        self.seen = {condition: Seen() for condition in (*CONDITIONS, *more)}
        self._pace = bench.manager._device._pace
        self._draw = random.Random(0)

    def round(self, counts: bool = True) -> None:
        begin_decodes(self.bench, self.batch)
        order = self._draw.sample(list(self.seen), len(self.seen))
        for condition in order:
            seen = self.seen[condition] if counts else Seen()
            kind, _, size = condition.partition(", ")
            least = int(size) << 10 if size else self._pace.least
            self.bench.manager._device._pace = dataclasses.replace(self._pace, least=least)
            self._run(kind, seen)
        self.bench.manager._device._pace = self._pace
        for request_id in list(self.bench.engine._requests):
            self.bench.engine.abort(request_id)
        self.bench.run()

    def _fill_host(self) -> None:
        """Read what conditions before dropped."""
        host = self.bench.manager._host
        for name in self.names:
            version = self.bench.version(name)
            with self.bench.manager._lock:
                host.ensure(version)
            host.wait(version)

    def _run(self, condition: str, seen: Seen) -> None:
        bench, steps = self.bench, self.steps
        if condition == "host":
            self._fill_host()
        each: Callable[[], None] | None = None
        traffic = Traffic(bench, self.names, condition == "files")
        reads = Reads(bench, self.names)
        if condition != "alone":
            each = reads if condition == "reads" else traffic
        bench.decode(10, each)
        began = time.perf_counter()
        seen.rounds.append(bench.decode(steps, each))
        seen.seconds += time.perf_counter() - began
        seen.loads += traffic.loads + reads.loads
        end_traffic(bench, traffic)
        if condition == "reads":
            reads.end()
        bench.decode(10)


def p99(times: np.ndarray) -> float:
    """In the middle between two order statistics; times [n]."""
    return float(np.quantile(times, 0.99))


def rise(seen: np.ndarray, alone: np.ndarray) -> dict[str, float]:
    """Percent, with its interval; both [rounds, steps] seconds."""
    draw = np.random.default_rng(0)
    count = len(seen)
    drawn = []
    for _ in range(DRAWS):
        rounds = draw.integers(0, count, count)
        drawn.append(p99(seen[rounds]) / p99(alone[rounds]))
    low, high = np.quantile(drawn, [0.025, 0.975])
    found = {"rise": p99(seen) / p99(alone), "low": low, "high": high}
    return {key: round(100 * (float(value) - 1), 2) for key, value in found.items()}


def report(turns: Turns, most: float) -> dict[str, dict[str, float]]:
    """Rows, printed, and the verdict."""
    tables = {name: np.array(seen.rounds) for name, seen in turns.seen.items()}
    rows = {}
    for name, table in tables.items():
        seen = turns.seen[name]
        at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
        row = {key: round(1e3 * float(np.quantile(table, q)), 4) for key, q in at.items()}
        row["loads_per_s"] = round(seen.loads / seen.seconds, 1)
        if name != "alone":
            row |= rise(table, tables["alone"])
        rows[name] = row
        print(f"  {name:12s}", "  ".join(f"{key} {value:8.3f}" for key, value in row.items()))
    for name in (each for each in rows if each.startswith(JUDGED)):
        row = rows[name]
        verdict = "undecided"
        if row["high"] <= most:
            verdict = "PASS"
        elif row["low"] > most:
            verdict = "FAIL"
        span = f"{row['rise']:+.1f}% ({row['low']:+.1f} to {row['high']:+.1f})"
        print(f"loads from {name}: {verdict}: p99 {span}, asked at most +{most:g}%")
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--seconds", type=float, default=75.0, help="in all")
    parser.add_argument("--steps", type=int, default=200, help="of one condition in one round")
    parser.add_argument("--slices", type=int, nargs="*", default=[], help="KiB")
    parser.add_argument("--most", type=float, default=5.0, help="percent")
    return parser.parse_args()


def main() -> None:
    options, began = parse(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        bench, nbytes = make_bench(options, Path(folder))
        names = [f"a{i}" for i in range(1, options.adapters)]
        for name in ["a0", *names]:
            bench.serve(name)
        turns = Turns(bench, options, names)
        turns.round(counts=False)  # captures, memory that readers and slabs keep
        took = time.perf_counter() - began
        print(
            f"adapter of {nbytes / 1e6:.0f} MB on {options.device}; ready after {took:.1f} s; ms",
            flush=True,
        )
        count = 0
        while count < FEWEST or time.perf_counter() - began < options.seconds:
            turns.round()
            count += 1
        bench.engine.check_integrity()
        rows = report(turns, options.most)
        gc.unfreeze()
    where = torch.cuda.get_device_name() if options.device != "cpu" else platform.processor()
    rounds = len(turns.seen["alone"].rounds)
    shape = {key: getattr(options, key) for key in ("layers", "rank", "batch", "steps", "small")}
    result = {"commit": commit(), "device": where, "nbytes": nbytes, "rounds": rounds}
    print(json.dumps({**result, **shape, "ms": rows}))


if __name__ == "__main__":
    main()
