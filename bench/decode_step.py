"""Decode steps of the engine on one GPU: tokens a second, host beside GPU time, kernels of a step.

A random MoE of Qwen3-30B-A3B's shape cut to `--layers`; `--adapters` of rank 16 on q, k, v, o and
every expert's gate, up and down. 64 prompt tokens, 96 steps, greedy. Columns, for each batch:

| column | means |
|---|---|
| tok/s | of all steps after the prompts, by the wall clock |
| step | median of one `Engine.step`, us: the slower of host and GPU, since they overlap |
| GPU | one replay of the step's graph, us: 50 in a row |
| host | `Engine.step` but for its waits for the device, us |
| others | parts of a step on the host, us |

The last line is JSON.
"""

import argparse
import dataclasses
import json
import logging
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from vexpert.bench.engine.files import find_model_shape, write_adapter, write_model
from vexpert.checkout import commit
from vexpert.config import EngineConfig
from vexpert.engine.engine import Engine
from vexpert.engine.host_copy import HostCopy
from vexpert.engine.sampling_params import SamplingParams

PROMPT, STEPS = 64, 96


def make_engine(folder: Path, options: argparse.Namespace, lora: bool, eager: bool) -> Engine:
    began = time.perf_counter()
    cpu = options.device == "cpu"
    engine = Engine(
        EngineConfig(
            model=str(folder / "model"),
            device=options.device,
            dtype="float32" if cpu else "bfloat16",
            load_format="dummy",
            max_model_len=512 if cpu else 4096,
            max_num_seqs=max(options.batches),
            max_num_batched_tokens=max(options.tokens, *options.batches),
            kv_cache_memory=1 << 28 if cpu else 8 << 30,
            enable_lora=lora,
            max_loras=32 if lora else None,
            lora_memory=(1 << 28 if cpu else 10 << 30) if lora else None,
            enforce_eager=eager,
            warm_up="decode",
        )
    )
    print(f"  engine ready in {time.perf_counter() - began:.1f} s")
    return engine


def add(engine: Engine, batch: int, names: list[str | None], steps: int) -> None:
    params = SamplingParams(max_tokens=steps, ignore_eos=True, temperature=0.0)
    for i in range(batch):
        tokens = [(i * 31 + j * 7) % 1900 + 2 for j in range(PROMPT)]
        engine.add_request(str(i), None, tokens, params, names[i % len(names)])


def prefill(engine: Engine) -> None:
    """Step until all requests decode."""
    while engine.scheduler.waiting or any(
        len(s.tokens) - s.num_computed > 1 for s in engine.scheduler.running
    ):
        engine.step()


def measure(engine: Engine, batch: int, names: list[str | None], steps: int) -> dict[str, float]:
    add(engine, batch, names, 4)  # loads adapters, captures
    while engine.has_unfinished():
        engine.step()
    add(engine, batch, names, steps)
    prefill(engine)
    parts = Parts(engine)
    times = []
    began = time.perf_counter()
    tokens = 0
    while engine.has_unfinished():
        before = time.perf_counter()
        tokens += len(engine.step())
        times.append(time.perf_counter() - before)
        parts.end_step(times[-1])
    row = {"tok/s": tokens / (time.perf_counter() - began), "step": 1e6 * statistics.median(times)}
    parts.restore()
    gpu = replay_us(engine)
    return row | ({} if gpu is None else {"GPU": gpu}) | parts.medians()


class Parts:
    """Where the host's time in `Engine.step` goes, until `restore`: wraps the engine's calls."""

    def __init__(self, engine: Engine) -> None:
        self.calls = {
            "wait": (HostCopy, "wait"),
            "schedule": (engine.scheduler, "schedule"),
            "run": (engine._runner, "run"),
            "sample": (engine._sampler, "begin"),
            "commit": (engine, "_commit"),  # the wait is inside, and taken off
        }
        self.originals = {name: getattr(*where) for name, where in self.calls.items()}
        self.now = dict.fromkeys(self.calls, 0.0)
        self.seen: dict[str, list[float]] = defaultdict(list)
        for name, (owner, attribute) in self.calls.items():
            setattr(owner, attribute, self.timed(name))

    def timed(self, name: str) -> Any:
        call = self.originals[name]

        def wrapped(*args: Any) -> Any:
            before = time.perf_counter()
            result = call(*args)
            self.now[name] += time.perf_counter() - before
            return result

        return wrapped

    def end_step(self, seconds: float) -> None:
        self.now["commit"] -= self.now["wait"]
        self.seen["host"].append(seconds - self.now["wait"])
        for name, value in self.now.items():
            self.seen[name].append(value)
            self.now[name] = 0.0

    def restore(self) -> None:
        for name, (owner, attribute) in self.calls.items():
            if owner is HostCopy:
                HostCopy.wait = self.originals[name]
            else:
                delattr(owner, attribute)

    def medians(self) -> dict[str, float]:
        return {name: 1e6 * statistics.median(values) for name, values in self.seen.items()}


def replay_us(engine: Engine) -> float | None:
    """Of the graph that ran last."""
    graphs = engine._runner._graphs
    if graphs is None or graphs.last is None or not torch.cuda.is_available():
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.inference_mode(), graphs.rehearsal():
        graphs.last()
        torch.cuda.synchronize()
        start.record()
        for _ in range(50):
            graphs.last()
        end.record()
        torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 50 * 1e3


def kernels(engine: Engine, batch: int, names: list[str | None], most: int) -> list[str]:
    """A table of the kernels of one decode step, those that take longest first."""
    from torch.profiler import ProfilerActivity, profile

    add(engine, batch, names, 12)
    prefill(engine)
    for _ in range(4):
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        engine.step()
        torch.cuda.synchronize()
    while engine.has_unfinished():
        engine.step()
    found: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name].append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
    total = sum(sum(times) for times in found.values())
    wall = max(end for _, end in spans) - min(start for start, _ in spans)
    count = sum(len(times) for times in found.values())
    lines = [f"batch {batch}: {count} kernels, {total:.0f} us busy in {wall:.0f} us"]
    for name, times in sorted(found.items(), key=lambda pair: -sum(pair[1]))[:most]:
        lines.append(f"  {sum(times):8.1f} us {len(times):4d} x  {name[:88]}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a shape for a CPU")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--eager", action="store_true", help="eager steps too")
    parser.add_argument("--kernels", type=int, nargs="*", default=[], help="batches to profile")
    parser.add_argument("--most", type=int, default=25, help="kernels in each table")
    parser.add_argument("--tokens", type=int, default=2048, help="most in one step")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="  %(message)s", stream=sys.stdout)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        name = "mini" if options.small else "qwen3-30b-a3b-8l"
        shape = dataclasses.replace(find_model_shape(name), layers=options.layers)
        write_model(folder / "model", shape)
        for eager in [False, True] if options.eager else [False]:
            label = "eager" if eager else "graphs"
            print(f"base, {label}")
            engine = make_engine(folder, options, lora=False, eager=eager)
            run(engine, label, [None], options, rows)
            del engine
            torch.cuda.empty_cache()
        if options.adapters:
            print("LoRA server")
            engine = make_engine(folder, options, lora=True, eager=False)
            run(engine, "base requests", [None], options, rows)
            names: list[str | None] = []
            for index in range(options.adapters):
                write_adapter(folder / f"a{index}", shape, 16, index)
                engine.load_adapter(f"a{index}", str(folder / f"a{index}"))
                names.append(f"a{index}")
            run(engine, "1 adapter", names[:1], options, rows)
            if len(names) > 1:
                run(engine, f"{len(names)} adapters", names, options, rows)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(json.dumps({"commit": commit(), "device": where, "layers": options.layers, **rows}))


def run(
    engine: Engine,
    label: str,
    names: list[str | None],
    options: argparse.Namespace,
    rows: dict[str, Any],
) -> None:
    for batch in options.batches:
        row = rows[f"{label}, {batch}"] = measure(engine, batch, names, options.steps)
        shown = "  ".join(f"{key} {value:.0f}" for key, value in row.items())
        print(f"  {label:14s} batch {batch:4d}  {shown}", flush=True)
    for batch in options.kernels:
        print("\n".join(kernels(engine, batch, names, options.most)), flush=True)


if __name__ == "__main__":
    main()
