"""Times callables: on a GPU as replays of a CUDA graph with a cold L2, on a CPU by the clock.

GPU method: capture once; before each replay read a buffer larger than the L2, outside of the timed
events; the median counts. Contenders take turns, so that a slow phase of the machine hits them all.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vexpert.errors import ConfigError

Call = Callable[[], Any]
cuda: Any = torch.cuda  # its streams and events are not typed
FLUSH_BYTES = 192 << 20  # several times the L2 of an H200 (50 MB)
WARM_UP = 3


@dataclass(frozen=True)
class Timing:
    """Microseconds over the repeats of one callable."""

    median: float
    low: float  # the smallest
    p10: float
    p90: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Timing":
        """Of at least two values in microseconds."""
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), min(values), tenths[0], tenths[-1], len(values))


@dataclass(frozen=True)
class Prepared:
    """A callable ready to be timed; `run` returns its output, which the next run overwrites."""

    run: Call


class Timer(Protocol):
    """Prepares callables, then times those prepared."""

    method: str
    overhead: float  # us that a callable doing next to nothing reads; not subtracted

    def prepare(self, call: Call) -> Prepared:
        """Warm `call` up and make it ready."""

    def time_in_turns(self, prepared: Mapping[str, Prepared]) -> dict[str, Timing]:
        """Microseconds of each, one run of each per round."""


class ClockTimer:
    """Wall clock of direct calls: for a CPU."""

    method = "wall clock, calls in turns"

    def __init__(self, repeats: int, clock: Callable[[], float] = time.perf_counter) -> None:
        _check_repeats(repeats)
        self.repeats = repeats
        self.clock = clock
        self.overhead = self.time_in_turns({"nothing": Prepared(lambda: None)})["nothing"].median

    def prepare(self, call: Call) -> Prepared:
        for _ in range(WARM_UP):
            call()
        return Prepared(call)

    def time_in_turns(self, prepared: Mapping[str, Prepared]) -> dict[str, Timing]:
        values: dict[str, list[float]] = {name: [] for name in prepared}
        for _ in range(self.repeats):
            for name, contender in prepared.items():
                start = self.clock()
                contender.run()
                values[name].append((self.clock() - start) * 1e6)
        return {name: Timing.of(times) for name, times in values.items()}


class GraphTimer:
    """CUDA graph replays on `device`, the L2 flushed before each."""

    method = f"CUDA graph replays in turns, cold L2 ({FLUSH_BYTES >> 20} MiB read before each)"

    def __init__(self, device: torch.device, repeats: int) -> None:
        _check_repeats(repeats)
        self.device = device
        self.repeats = repeats
        self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        one = torch.zeros(1, device=device)
        nothing = self.prepare(lambda: one.add_(1))
        self.overhead = self.time_in_turns({"nothing": nothing})["nothing"].median

    def prepare(self, call: Call) -> Prepared:
        """Capture `call`; its allocations stay alive as long as what is returned."""
        stream = cuda.Stream(self.device)
        stream.wait_stream(cuda.current_stream(self.device))
        with cuda.stream(stream):
            for _ in range(WARM_UP):
                call()
        cuda.current_stream(self.device).wait_stream(stream)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            output = call()

        def replay() -> Any:
            graph.replay()
            return output

        return Prepared(replay)

    def time_in_turns(self, prepared: Mapping[str, Prepared]) -> dict[str, Timing]:
        events = {name: [_event_pair() for _ in range(self.repeats)] for name in prepared}
        for turn in range(self.repeats):
            for name, contender in prepared.items():
                start, end = events[name][turn]
                # The flush also keeps the device busy until the replay is queued behind it.
                self._flush.max()
                start.record()
                contender.run()
                end.record()
        cuda.synchronize(self.device)
        return {
            name: Timing.of([start.elapsed_time(end) * 1e3 for start, end in pairs])
            for name, pairs in events.items()
        }


def _event_pair() -> tuple[Any, Any]:
    return cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)


def _check_repeats(repeats: int) -> None:
    if repeats < 2:
        raise ConfigError(f"repeats={repeats}: must be at least 2, for a median and a spread")


def make_timer(device: torch.device, repeats: int) -> Timer:
    """The timer of `device`."""
    return GraphTimer(device, repeats) if device.type == "cuda" else ClockTimer(repeats)
