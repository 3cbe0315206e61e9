"""An hour of traffic to hundreds of adapters, in minutes: the demo model, every answer checked.

`--adapters` names of the demo's four adapters, of which `--fit` fit on the device; requests come by
zipf as fast as the engine takes them, with reloads, unloads and aborts between, until there were
`--requests`, or for `--seconds`. Ends with 1 if an answer is another adapter's, if anything is left
behind, or if more than 3% are wrong. The last line is JSON.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers_churn import KINDS, Churn, link, open_files

from vexpert.config import EngineConfig
from vexpert.demo import adapter_paths, model_path
from vexpert.engine.engine import Engine
from vexpert.lora.manager import AdapterManager


def make_engine(options: argparse.Namespace, folder: Path) -> Engine:
    probe = Engine(EngineConfig(model=str(model_path()), device=options.device, dtype="float32"))
    size = max(probe.load_adapter(k, str(p)).host_bytes for k, p in adapter_paths().items())
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


def run(churn: Churn, options: argparse.Namespace) -> None:
    random, last = churn.random, time.monotonic()
    acts = [churn.replace, churn.unload, churn.abort, None]
    until = last + options.seconds
    while len(churn.done) < options.requests and time.monotonic() < until:
        while len(churn.asks) < 3 * options.batch and random.random() < 0.9:
            churn.ask()
        act = random.choices(acts, [3, 2, 3, 92])[0]
        if act is not None:
            act()
        if random.random() < 0.02:  # unloaded names come back
            gone = [name for name in churn._names if name not in churn.kinds]
            for name in gone[:5]:
                kind = random.choice(KINDS)
                churn.engine.register_adapter(name, str(churn.folders[kind]))
                churn.kinds[name] = kind
        churn.step()
        if time.monotonic() - last > 10:
            churn.engine.check_integrity()
            usage, last = churn.engine.stats().adapters, time.monotonic()
            print(len(churn.done), "requests,", churn.counts, usage, flush=True)
    while churn.asks:
        churn.step()


def descriptors(engine: Engine) -> int:
    """Files that the readers and the shared memory that is kept have open."""
    assert isinstance(engine._adapters, AdapterManager)
    host = engine._adapters._host
    readers = 0 if host.readers is None else len(host.readers.pids())
    return 2 * readers + (len(host._memory._slabs) if host._memory.is_shared else 0)


def leftovers(engine: Engine, files: int) -> list[str]:
    """What is not given back once every adapter is unloaded."""
    for info in engine.adapters():
        engine.unload_adapter(info.name)
    engine.check_integrity()
    stats = engine.stats()
    found = {
        "adapters": len(engine.adapters()),
        "device bytes": stats.adapters.device_used,
        "host bytes": stats.adapters.host_used,
        "KV blocks": stats.kv_blocks_used,
        "open files": open_files() - files - descriptors(engine),
    }
    return [f"{count} {what}" for what, count in found.items() if count]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--adapters", type=int, default=500)
    parser.add_argument("--fit", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="then no more requests")
    parser.add_argument("--readers", type=int, help="processes that read adapters")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "dir"
        kinds = {f"user{i}": KINDS[i % 4] for i in range(options.adapters)}
        for adapter, kind in kinds.items():
            link(kind, folder / adapter)
        began = time.perf_counter()
        engine = make_engine(options, folder)
        print(f"engine ready after {time.perf_counter() - began:.1f} s", flush=True)
        files = open_files() - descriptors(engine)
        churn = Churn(engine, Random(options.seed), kinds, adapter_paths())
        began = time.perf_counter()
        run(churn, options)
        seconds = time.perf_counter() - began
    usage = engine.stats().adapters
    result = {
        "requests": len(churn.done),
        "seconds": round(seconds, 1),
        "wrong": len(churn.wrong()),
        "another adapter's": len(churn.mixed_up()),
        "longest wait in steps": churn.longest_wait,
        "steps": churn.steps,
        "counts": churn.counts,
        "loads": usage.loads,
        "evictions": usage.evictions,
        "left": leftovers(engine, files),
    }
    print(json.dumps(result))
    bad = result["another adapter's"] or result["left"] or result["wrong"] > 0.03 * len(churn.done)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
