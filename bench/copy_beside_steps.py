"""What copies from pinned host memory cost the steps beside them, by the size of their slices.

A fake step is a CUDA graph of matrix products of about `--step` ms behind one small copy from
pinned memory, as a decode step has. 256 MiB of adapters are copied on a stream of their own.

| row | what |
|---|---|
| alone | steps with nothing beside them |
| slices of N MiB | the copy is queued whole, in slices; the steps run until it has arrived |
| paced, N MiB | the same, at most two slices in the queue, from a thread of its own |
| register | `cudaHostRegister` of N MiB of shared memory on another thread while steps run |

The last line is JSON.
"""

import argparse
import json
import mmap
import os
import threading
import time
from collections.abc import Callable

import torch

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

    def __call__(self) -> float:
        began = time.perf_counter()
        self.place.copy_(self.small, non_blocking=True)
        self.graph.replay()
        torch.cuda.current_stream().synchronize()
        return 1e3 * (time.perf_counter() - began)


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


def whole(
    source: torch.Tensor, target: torch.Tensor, size: int
) -> Callable[[], Callable[[], bool]]:
    stream = torch.cuda.Stream()

    def begin() -> Callable[[], bool]:
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            queue_slices(source, target, size)
            event.record()
        return event.query

    return begin


def on_thread(
    source: torch.Tensor, target: torch.Tensor, size: int, depth: int
) -> Callable[[], Callable[[], bool]]:
    """The slices from another thread; `depth` 0: all at once."""
    stream = torch.cuda.Stream()

    def begin() -> Callable[[], bool]:
        done = threading.Event()

        def work() -> None:
            with torch.cuda.stream(stream):
                if depth == 0:
                    queue_slices(source, target, size)
                else:
                    events: list[torch.cuda.Event] = []
                    parts = zip(target.split(size), source.split(size), strict=True)
                    for a, b in parts:
                        a.copy_(b, non_blocking=True)
                        events.append(torch.cuda.Event(blocking=True))
                        events[-1].record()
                        if len(events) >= depth:
                            events.pop(0).synchronize()
            stream.synchronize()
            done.set()

        threading.Thread(target=work).start()
        return done.is_set

    return begin


def registering(nbytes: int, touched: bool) -> Callable[[], Callable[[], bool]]:
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
    for mib in (256, 32, 8, 2, 1, 0.5):
        size = int(mib * (1 << 20))
        row(f"slices of {mib} MiB", beside(step, whole(source, target, size), options.rounds))
    for mib in (8, 2, 1):
        begin = on_thread(source, target, mib << 20, 0)
        row(f"on a thread, {mib} MiB", beside(step, begin, options.rounds))
    for mib in (8, 4, 2, 1):
        begin = on_thread(source, target, mib << 20, 2)
        row(f"paced, {mib} MiB", beside(step, begin, options.rounds))
    for mib in (1024, 256, 64, 16):
        for touched in (False, True):
            label = f"register {mib} MiB{', touched' if touched else ''}"
            row(label, beside(step, registering(mib << 20, touched), 3))
    row("alone, end", summary([step() for _ in range(1000)]))
    print(json.dumps({"device": torch.cuda.get_device_name(), "ms": rows}))


if __name__ == "__main__":
    main()
