"""Measures cases: build, check, time, and put the figures beside floor, goal and peers."""

import importlib.util
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from vexpert.bench.bound import bound_us
from vexpert.bench.cases import Case
from vexpert.bench.contenders import BASE, CLASSIC, DEFAULT, LORA, Contender
from vexpert.bench.draw import Draw, draw
from vexpert.bench.floor import BANDWIDTH, FLOPS, Floor, count_floor
from vexpert.bench.layer import BenchLayer, layer_key
from vexpert.bench.peers import Peer, find_peer
from vexpert.bench.reference import BOUNDS, largest_error, reference
from vexpert.bench.timer import Prepared, Timer, Timing
from vexpert.errors import VexpertError
from vexpert.ops.backend import LoraBackend


@dataclass(frozen=True)
class Row:
    """What one case gave. Without `times`, `failure` says why."""

    case: Case
    times: dict[str, Timing] = field(default_factory=dict)  # by contender
    errors: dict[str, float] = field(default_factory=dict)  # largest relative error of a token
    floor: Floor | None = None
    peer: Peer | None = None
    failure: str | None = None
    bandwidth: float = BANDWIDTH  # bytes/s
    flops: float = FLOPS  # 1/s

    def median(self, contender: str) -> float | None:
        """Microseconds, or None if it took no part."""
        return self.times[contender].median if contender in self.times else None

    def added(self, contender: str = LORA.name) -> float | None:
        """What LoRA adds to the base layer, in microseconds."""
        base, total = self.median(BASE.name), self.median(contender)
        return None if base is None or total is None else total - base

    def figures(self) -> dict[str, Any]:
        """Flat, for JSON and CSV; microseconds unless the name says otherwise."""
        shown: dict[str, Any] = asdict(self.case)
        shown["ranks"] = ",".join(map(str, self.case.ranks))
        shown |= {"failure": self.failure, "added_us": self.added()}
        for name, timing in self.times.items():
            shown |= {f"{name}_us": timing.median, f"{name}_min_us": timing.low}
            shown |= {f"{name}_p10_us": timing.p10, f"{name}_p90_us": timing.p90}
        shown["classic_added_us"] = self.added(CLASSIC.name)
        shown |= {f"{name}_error": error for name, error in self.errors.items()}
        if self.floor is not None:
            shown |= asdict(self.floor)
            shown["base_floor_us"] = self.floor.base_us(self.bandwidth)
            shown["base_arithmetic_floor_us"] = self.floor.arithmetic_us(self.flops)
            shown["lora_floor_us"] = self.floor.lora_us(self.bandwidth)
            shown["added_to_floor"] = self.added_to_floor()
            shown["bound_us"] = self.bound()
        return shown | (self.peer.figures() if self.peer else {})

    def added_to_floor(self) -> float | None:
        """What LoRA adds, in multiples of its byte floor."""
        added = self.added()
        if added is None or self.floor is None:
            return None
        return added / self.floor.lora_us(self.bandwidth)

    def bound(self) -> float | None:
        """What LoRA may add by the rule of bytes, in microseconds."""
        return None if self.floor is None else bound_us(self.floor, self.bandwidth)


# Of one case; the others still run.
FAILURES: tuple[type[Exception], ...] = (VexpertError, torch.OutOfMemoryError)


def triton_errors() -> tuple[type[Exception], ...]:
    """What a kernel raises that does not compile, or does not fit on the device."""
    if importlib.util.find_spec("triton") is None:
        return ()
    from triton.errors import TritonError

    return (TritonError,)


@dataclass(frozen=True)
class Bench:
    """How to measure; the same for all cases."""

    device: torch.device
    dtype: torch.dtype
    backend: LoraBackend
    timer: Timer
    contenders: tuple[Contender, ...] = DEFAULT
    bandwidth: float = BANDWIDTH
    flops: float = FLOPS

    def rows(self, cases: Sequence[Case]) -> Iterator[Row]:
        """One row per case, as soon as it is measured. A case that cannot run gives a failure."""
        layers, failures = _Layers(self), FAILURES + triton_errors()
        for case in cases:
            try:
                yield self.measure(case, layers.of(case))
            except failures as error:
                yield Row(case, failure=" ".join(str(error).split()))

    def compile_ahead(self, cases: Sequence[Case]) -> int:
        """Compile what `rows` of the same cases will launch, in as many threads as cores.

        Returns the seconds that it took, 0 where nothing is compiled. The classic path is left
        out: it reads from the device what no launch has written then.
        """
        if self.backend.name != "triton" or self.device.type != "cuda":
            return 0
        from vexpert.kernels.compile_ahead import compile_only

        start = time.perf_counter()
        layers = _Layers(self)
        contenders = [contender for contender in self.contenders if contender != CLASSIC]
        with compile_only():
            for case in cases:
                try:
                    layer, step = layers.of(case), draw(case, self.device, self.dtype)
                except FAILURES:
                    continue  # `rows` says so
                for contender in contenders:
                    contender.make(layer, step)()
        return round(time.perf_counter() - start)

    def measure(self, case: Case, layer: BenchLayer) -> Row:
        """Check every contender, then time them; a wrong one leaves the row without times."""
        step = draw(case, self.device, self.dtype)
        prepared = {c.name: self.timer.prepare(c.make(layer, step)) for c in self.contenders}
        errors = self._errors(layer, step, prepared)
        bound = BOUNDS[self.dtype]
        wrong = [f"{n} (error {e:.1e}, bound {bound:.0e})" for n, e in errors.items() if e > bound]
        failure = f"wrong: {', '.join(wrong)}" if wrong else None
        times = {} if wrong else self.timer.time_in_turns(prepared)
        return Row(
            case,
            times,
            errors,
            count_floor(layer, step),
            find_peer(case) if self.dtype is torch.bfloat16 else None,
            failure,
            self.bandwidth,
            self.flops,
        )

    def _errors(
        self, layer: BenchLayer, step: Draw, prepared: dict[str, Prepared]
    ) -> dict[str, float]:
        """Largest error of each contender that has a reference."""
        expected: dict[bool, torch.Tensor] = {}
        errors = {}
        for contender in self.contenders:
            kind = contender.with_lora
            if kind is None:
                continue
            if kind not in expected:
                expected[kind] = reference(layer, step, kind)
            errors[contender.name] = largest_error(prepared[contender.name].run(), expected[kind])
        return errors


class _Layers:
    """The layer of the last case: cases that can share one come one after another."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.key: Case | None = None
        self.layer: BenchLayer | None = None

    def of(self, case: Case) -> BenchLayer:
        """Built anew where the last one will not do."""
        if self.layer is None or layer_key(case) != self.key:
            self.layer = None  # its memory is needed for the next
            bench = self.bench
            self.layer = BenchLayer(case, bench.device, bench.dtype, bench.backend)
            self.key = layer_key(case)
        return self.layer
