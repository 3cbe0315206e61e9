"""What copies from pinned host memory cost the steps beside them, by the way they are made.

A fake step is a CUDA graph of matrix products of about `--step` ms behind one small copy from
pinned memory, as a decode step has. 256 MiB of adapters are copied on a stream of their own.

| row | what |
|---|---|
| alone | steps with nothing beside them |
| queued, N MiB | the copy is queued whole, in slices of N MiB |
| one by one, N MiB | the next slice is queued when the one before has arrived, by a thread |
| chained, N MiB | queued whole, with an empty kernel between any two slices |
| kernel, N programs | a kernel of N programs reads the host's memory |
| register N MiB | `cudaHostRegister` of shared memory on another thread |

A copy engine works off what one stream has queued before it looks at another: a step's own small
copy waits for all of it. The last line is JSON.
"""

import argparse
import json
import mmap
import os
import threading
import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl

NBYTES = 256 << 20


def shared(nbytes: int) -> torch.Tensor:
    """Anonymous shared memory, uint8 [nbytes], as a reader process fills it."""
    fd = os.memfd_create("bench", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    mapping = mmap.mmap(fd, nbytes)
    os.close(fd)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def register(buffer: torch.Tensor) -> None:
    status = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    assert status == 0, status


class Step:
    """About `milliseconds`: a small copy from pinned memory, then a graph, then a sync."""

    def __init__(self, milliseconds: float) -> None:
        self.x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        self.small = torch.zeros(16384, dtype=torch.int64).pin_memory()
        self.place = torch.zeros(16384, dtype=torch.int64, device="cuda")
        self.x @ self.x
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            self.x @ self.x
        torch.cuda.synchronize()
        one = (time.perf_counter() - began) / 20 * 1e3
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.place.add_(1)
            for _ in range(max(1, round(milliseconds / one))):
                self.x @ self.x
        for _ in range(20):
            self()

    def fill(self) -> None:
        self.place.copy_(self.small, non_blocking=True)

    def __call__(self) -> float:
        began = time.perf_counter()
        self.fill()
        self.graph.replay()
        torch.cuda.current_stream().synchronize()
        return 1e3 * (time.perf_counter() - began)


class Pageable(Step):
    """The small copy comes from memory that is not pinned."""

    def fill(self) -> None:
        self.place[:1024].copy_(torch.zeros(1024, dtype=torch.int64), non_blocking=True)


class Mapped(Step):
    """A kernel reads the pinned memory itself: no copy engine."""

    def fill(self) -> None:
        _copy[(4,)](self.small, self.place, 16384, 4, 2048, num_warps=4)


def summary(times: list[float], **more: float) -> dict[str, float]:
    ordered = sorted(times)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    found = {k: ordered[min(len(ordered) - 1, int(s * len(ordered)))] for k, s in at.items()}
    return {k: round(v, 4) for k, v in {**found, "n": len(times), **more}.items()}


def queue_slices(source: torch.Tensor, target: torch.Tensor, slice_bytes: int) -> None:
    pairs = (list(x.split(slice_bytes)) for x in (target, source))
    torch._foreach_copy_(*pairs, non_blocking=True)


def beside(step: Step, begin: Callable[[], Callable[[], bool]], rounds: int) -> dict[str, float]:
    """Steps that ran while what `begin` starts was not done."""
    times, took = [], []
    for _ in range(rounds):
        step()
        began = time.perf_counter()
        is_done = begin()
        while not is_done():
            times.append(step())
        took.append(1e3 * (time.perf_counter() - began))
    return summary(times, copy_ms=sorted(took)[len(took) // 2])


Begin = Callable[[], Callable[[], bool]]


def whole(source: torch.Tensor, target: torch.Tensor, size: int) -> Begin:
    stream = torch.cuda.Stream()

    def begin() -> Callable[[], bool]:
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            queue_slices(source, target, size)
            event.record()
        return event.query

    return begin


def on_thread(call: Callable[[], None]) -> Begin:
    """`call` on another thread, with a stream of its own; it is done when the stream is empty."""
    stream = torch.cuda.Stream()

    def begin() -> Callable[[], bool]:
        done = threading.Event()

        def work() -> None:
            with torch.cuda.stream(stream):
                call()
            stream.synchronize()
            done.set()

        threading.Thread(target=work).start()
        return done.is_set

    return begin


def one_by_one(source: torch.Tensor, target: torch.Tensor, size: int) -> Begin:
    event = torch.cuda.Event(blocking=True)

    def call() -> None:
        for a, b in zip(target.split(size), source.split(size), strict=True):
            a.copy_(b, non_blocking=True)
            event.record()
            event.synchronize()

    return on_thread(call)


def chained(source: torch.Tensor, target: torch.Tensor, size: int) -> Begin:
    def call() -> None:
        for a, b in zip(target.split(size), source.split(size), strict=True):
            a.copy_(b, non_blocking=True)
            torch.cuda._sleep(1)

    return on_thread(call)


@triton.jit
def _copy(source, target, count, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """count int64 at target[...] = source[...]; a multiple of PROGRAMS * BLOCK."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    for at in tl.range(start, count, PROGRAMS * BLOCK, num_stages=1):
        tl.store(target + at + lane, tl.load(source + at + lane, eviction_policy="evict_first"))


def by_kernel(source: torch.Tensor, target: torch.Tensor, programs: int, low: bool) -> Begin:
    stream = torch.cuda.Stream(priority=0 if low else -1)
    words = source.view(torch.int64), target.view(torch.int64)

    def begin() -> Callable[[], bool]:
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            _copy[(programs,)](*words, words[0].numel(), programs, 2048, num_warps=4)
            event.record()
        return event.query

    begin()
    torch.cuda.synchronize()
    target.zero_()
    begin()
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), source)
    return begin


def registering(nbytes: int, touched: bool) -> Begin:
    def begin() -> Callable[[], bool]:
        buffer = shared(nbytes)
        if touched:
            buffer.zero_()
        done = threading.Event()

        def work() -> None:
            register(buffer)
            done.set()
            time.sleep(0.05)
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())

        thread = threading.Thread(target=work)
        thread.start()

        def is_done() -> bool:
            if done.is_set():
                thread.join()
            return done.is_set()

        return is_done

    return begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step", type=float, default=0.6)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--rows", type=float, nargs="*", default=[4, 2, 1, 0.5], help="MiB")
    parser.add_argument("--register", action="store_true", help="time cudaHostRegister too")
    options = parser.parse_args()
    step = Step(options.step)
    source = shared(NBYTES)
    source.random_(0, 255)
    began = time.perf_counter()
    register(source)
    print(f"register 256 MiB, touched: {1e3 * (time.perf_counter() - began):.1f} ms", flush=True)
    target = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    target.copy_(source)
    assert torch.equal(target.cpu(), source)
    rows: dict[str, dict[str, float]] = {}

    def row(label: str, values: dict[str, float]) -> None:
        rows[label] = values
        print(f"{label:32s}", "  ".join(f"{k} {v}" for k, v in values.items()), flush=True)

    row("alone", summary([step() for _ in range(1000)]))
    for mib in options.rows:
        size = int(mib * (1 << 20))
        row(f"queued, {mib:g} MiB", beside(step, whole(source, target, size), options.rounds))
        row(
            f"one by one, {mib:g} MiB",
            beside(step, one_by_one(source, target, size), options.rounds),
        )
        row(f"chained, {mib:g} MiB", beside(step, chained(source, target, size), options.rounds))
    for programs in (4, 8, 16, 32):
        for low in (False, True):
            begin = by_kernel(source, target, programs, low)
            label = f"kernel, {programs} programs{', low' if low else ''}"
            row(label, beside(step, begin, options.rounds))
    step = Pageable(options.step)
    row("alone, pageable", summary([step() for _ in range(1000)]))
    row("pageable, queued, 8 MiB", beside(step, whole(source, target, 8 << 20), options.rounds))
    step = Mapped(options.step)
    row("alone, mapped", summary([step() for _ in range(1000)]))
    row("mapped, queued, 8 MiB", beside(step, whole(source, target, 8 << 20), options.rounds))
    for mib in (64, 16) if options.register else ():
        row(f"register {mib} MiB, touched", beside(step, registering(mib << 20, True), 3))
    row("alone, end", summary([step() for _ in range(1000)]))
    print(json.dumps({"device": torch.cuda.get_device_name(), "ms": rows}))


if __name__ == "__main__":
    main()
