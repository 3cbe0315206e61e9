"""An hour of traffic to hundreds of adapters, in minutes: the demo model, every answer checked.

`--adapters` names of the demo's four adapters, of which `--fit` fit on the device; requests come
by zipf as fast as the engine takes them, with reloads, unloads, aborts and clients that go away
between, until there were `--requests`, or for `--seconds`. The line before the last says whether
all of this held, and is the exit code; the last one is JSON.

| held | means |
|---|---|
| answers | each is its own adapter's, of the version it began with: never another's, and |
| | at most 3% are wrong at all (the demo's own mistakes) |
| starvation | no request was passed by more newer ones than `MAX_PASSED`, or took `--longest` |
| leaks | adapters, KV blocks, device and host bytes, files, threads: nothing is left when all are |
| | unloaded; the process and the device did not grow in the second half of the traffic |
| deadlock | there were never ten seconds without a token |
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers_churn import KINDS, Churn, link, open_files, vexpert_threads

from vexpert.config import EngineConfig
from vexpert.demo import adapter_paths, model_path
from vexpert.engine.admission import MAX_PASSED
from vexpert.engine.engine import Engine
from vexpert.lora.manager import AdapterManager

GROWTH = 128 << 20  # bytes that the second half of the traffic may add: what it records itself
STALL = 10.0  # seconds without a token, while requests run
THREADS_END = 10.0  # seconds for idle threads to end


def adapter_bytes() -> int:
    """Bytes of the largest of the four."""
    probe = Engine(EngineConfig(model=str(model_path()), device="cpu", dtype="float32"))
    return max(probe.load_adapter(k, str(p)).host_bytes for k, p in adapter_paths().items())


def make_engine(options: argparse.Namespace, folder: Path) -> Engine:
    size = adapter_bytes()
    return Engine(
        EngineConfig(
            model=str(model_path()),
            device=options.device,
            dtype="float32",
            kv_cache_memory=1 << 26,
            lora_memory=options.fit * size,
            lora_host_memory=4 * options.fit * size,
            lora_dir=str(folder),
            lora_dir_interval=86_400.0,
            max_num_seqs=options.batch,
            max_requests_per_lora=max(2, options.batch // 2),
            lora_readers=options.readers,
        )
    )


def memory() -> dict[str, int]:
    """Bytes that this process and the device's allocator hold."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    device = torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0
    return {"process": resident, "device": device}


class Traffic:
    """Runs a churn until its end, with looks at the engine's integrity, stalls and memory."""

    def __init__(self, churn: Churn, options: argparse.Namespace) -> None:
        self.churn, self.options = churn, options
        self.longest_stall = 0.0  # seconds
        self.at_half: dict[str, int] = {}
        self.began = self._told = self._moved = time.monotonic()
        self._tokens = 0

    @property
    def share(self) -> float:
        """How much of the traffic is over, 0 to 1."""
        done = len(self.churn.done) / self.options.requests
        return max(done, (time.monotonic() - self.began) / self.options.seconds)

    def run(self) -> None:
        while self.share < 1:
            self.act()
            self.step()
            if not self.at_half and self.share >= 0.5:
                self.at_half = memory()
        while self.churn.asks:
            self.step()

    def act(self) -> None:
        churn, random = self.churn, self.churn.random
        while len(churn.asks) < 3 * self.options.batch and random.random() < 0.9:
            churn.ask()
        acts = [churn.replace, churn.unload, churn.abort, churn.disconnect, self.bring_back, None]
        act = random.choices(acts, [3, 2, 3, 1, 2, 89])[0]
        if act is not None:
            act()

    def bring_back(self) -> None:
        """Names that were unloaded are registered again."""
        churn = self.churn
        gone = [name for name in churn._names if name not in churn.kinds]
        for name in gone[:5]:
            kind = churn.random.choice(KINDS)
            churn.engine.register_adapter(name, str(churn.folders[kind]))
            churn.kinds[name] = kind

    def step(self) -> None:
        self.churn.step()
        now, engine = time.monotonic(), self.churn.engine
        if engine._generation_tokens != self._tokens:
            self._tokens, self._moved = engine._generation_tokens, now
        self.longest_stall = max(self.longest_stall, now - self._moved)
        if self.longest_stall > STALL:
            raise SystemExit(f"churn: FAIL: no token for {STALL} s, {engine.stats()}")
        if now - self._told > 5:
            engine.check_integrity()
            usage, self._told = engine.stats().adapters, now
            print(len(self.churn.done), "requests,", self.churn.counts, usage, flush=True)


def descriptors(engine: Engine) -> int:
    """Files that the readers and the shared memory that is kept have open."""
    assert isinstance(engine._adapters, AdapterManager)
    host = engine._adapters._host
    readers = 0 if host.readers is None else len(host.readers.pids())
    slabs = len(host._memory._slabs) if host._memory.is_shared else 0
    return 2 * readers + 2 * slabs  # a slab's own, and that of its mapping


def leftovers(engine: Engine, files: int) -> list[str]:
    """What is not given back once every adapter is unloaded."""
    for info in engine.adapters():
        engine.unload_adapter(info.name)
    engine.check_integrity()
    until = time.monotonic() + THREADS_END
    while "vexpert-loader" in vexpert_threads() and time.monotonic() < until:
        time.sleep(0.1)
    stats, kept = engine.stats(), ("vexpert-copier", "vexpert-lora-dir")
    found = {
        "adapters": len(engine.adapters()),
        "device bytes": stats.adapters.device_used,
        "host bytes": stats.adapters.host_used,
        "KV blocks": stats.kv_blocks_used,
        "open files": open_files() - files - descriptors(engine),
        "threads": len([name for name in vexpert_threads() if name not in kept]),
        "threads that stay": max(0, len(vexpert_threads()) - len(kept)),
    }
    return [f"{count} {what}" for what, count in found.items() if count]


def faults(result: dict[str, Any], longest: float) -> list[str]:
    """What of the table above did not hold."""
    held = {
        "answers of another adapter": result["another adapter's"] == 0,
        "more than 3% wrong": result["wrong"] <= 0.03 * result["requests"],
        "starvation": result["most passed"] <= MAX_PASSED and result["longest s"] <= longest,
        f"left: {result['left']}": not result["left"],
        f"growth: {result['growth']}": all(each <= GROWTH for each in result["growth"].values()),
        "nothing was evicted": result["evictions"] > 0,
    }
    return [what for what, is_well in held.items() if not is_well]


@contextmanager
def made(options: argparse.Namespace) -> Iterator[tuple[Engine, Churn]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "dir"
        kinds = {f"user{i}": KINDS[i % 4] for i in range(options.adapters)}
        for adapter, kind in kinds.items():
            link(kind, folder / adapter)
        began = time.perf_counter()
        engine = make_engine(options, folder)
        print(f"engine ready after {time.perf_counter() - began:.1f} s", flush=True)
        churn = Churn(engine, Random(options.seed), kinds, adapter_paths())
        churn.ask()  # readers, streams and what a device opens at its first use
        while churn.asks:
            churn.step()
        yield engine, churn


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--adapters", type=int, default=500)
    parser.add_argument("--fit", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="then no more requests")
    parser.add_argument("--longest", type=float, default=60.0, help="seconds of one request")
    parser.add_argument("--readers", type=int, help="processes that read adapters")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    options = parse()
    with made(options) as (engine, churn):
        files = open_files() - descriptors(engine)
        traffic = Traffic(churn, options)
        traffic.run()
        seconds = time.monotonic() - traffic.began
        now = memory()
    usage = engine.stats().adapters
    result = {
        "device": options.device,
        "requests": len(churn.done),
        "seconds": round(seconds, 1),
        "requests per s": round(len(churn.done) / seconds),
        "wrong": len(churn.wrong()),
        "another adapter's": len(churn.mixed_up()),
        "longest wait in steps": churn.longest_wait,
        "longest s": round(churn.longest_seconds, 2),
        "longest stall s": round(traffic.longest_stall, 2),
        "most passed": churn.most_passed,
        "steps": churn.steps,
        "counts": churn.counts,
        "loads": usage.loads,
        "evictions": usage.evictions,
        "growth": {key: now[key] - traffic.at_half[key] for key in now},
        "left": leftovers(engine, files),
    }
    found = faults(result, options.longest)
    print("churn: " + (f"FAIL: {'; '.join(found)}" if found else "PASS"))
    print(json.dumps(result))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
