"""How long an adapter takes to serve, and what a read costs the Python that runs meanwhile.

A random MoE of Qwen3-30B-A3B's shape cut to `--layers`, and adapters with one pair for each expert
(rank 16 on q, k, v, o and every expert's gate, up and down: 269 MB for 8 layers in bfloat16).

| row | from | to |
|---|---|---|
| read and pack | files in the page cache | packed host memory, in one reader |
| Python, ... | | 0.2 ms of small calls: alone, and while adapters are read without a pause by |
| | | processes, and by threads of this process: what a load costs a step's Python |
| page cache to device | the request is added | its adapter is in its slot, nothing else runs |
| page cache to first token | the same | its first token; a base request's beside it |
| host to device | the request is added, the packed copy is there | its adapter is in its slot |

What loads cost the decode steps beside them is for `steps_beside_loads.py`. `--small` is a shape
for a CPU. Rows are printed as they come; the last line is JSON.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from vexpert.bench.engine.files import (
    ModelShape,
    find_model_shape,
    link_adapter,
    write_adapter,
    write_model,
)
from vexpert.checkout import commit
from vexpert.config import EngineConfig
from vexpert.engine.engine import Engine
from vexpert.engine.sampling_params import SamplingParams
from vexpert.lora.adapter_state import State
from vexpert.lora.adapter_version import Version
from vexpert.lora.manager import AdapterManager
from vexpert.lora.types import AdapterRef
from vexpert.server.engine_boot import settle

PROMPT = 32  # tokens

Row = dict[str, float]


def model_shape(small: bool, layers: int) -> ModelShape:
    name = "mini" if small else "qwen3-30b-a3b-8l"
    return dataclasses.replace(find_model_shape(name), layers=layers)


class Bench:
    """An engine with `count` registered adapters, of which `fit` fit on the device."""

    def __init__(
        self,
        folder: Path,
        device: str,
        paths: list[Path],
        nbytes: int,
        fit: float,
        host: float,
        readers: int | None = None,
        enforce_eager: bool = False,
        batch: int = 8,
    ) -> None:
        # What the rows do not need is not compiled ahead.
        names = {spec.name for spec in dataclasses.fields(EngineConfig)}
        lazily = {"warm_up": "none"} if "warm_up" in names else {}
        self.engine = Engine(
            EngineConfig(
                model=str(folder),
                device=device,
                dtype="float32" if device == "cpu" else "bfloat16",
                load_format="dummy",
                max_model_len=4096,
                max_num_seqs=batch + 1,
                kv_cache_memory=None if device != "cpu" else 1 << 28,
                lora_memory=int(fit * nbytes),
                lora_host_memory=int(host * nbytes),
                lora_readers=readers,
                enforce_eager=enforce_eager,
                **lazily,
            )
        )
        assert isinstance(self.engine._adapters, AdapterManager)
        self.manager = self.engine._adapters
        self.count = 0
        self._published = 0.0  # when the last adapter was whole on the device
        publish = self.manager.pool.publish

        def publish_and_note(slot: int) -> None:
            publish(slot)
            self._published = time.perf_counter()

        self.manager.pool.publish = publish_and_note
        for index, path in enumerate(paths):
            self.engine.register_adapter(f"a{index}", str(path))
        settle()  # as `vexpert serve` does

    def version(self, name: str) -> Version:
        return self.manager._versions[self.manager.resolve(name)]

    def add(self, adapter: str | None, max_tokens: int = 1) -> str:
        self.count += 1
        tokens = [(self.count * 31 + i * 7) % 1900 + 2 for i in range(PROMPT)]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        self.engine.add_request(str(self.count), None, tokens, params, adapter)
        return str(self.count)

    def run(self) -> None:
        while self.engine.has_unfinished():
            self.engine.step()

    def serve(self, name: str | None) -> tuple[float, float]:
        """Seconds until the adapter is in its slot, and until the first token of a request."""
        began = self._published = time.perf_counter()
        self.add(name)
        self.run()
        return self._published - began, time.perf_counter() - began

    def forget(self, name: str, host: bool) -> None:
        """Take an idle adapter off the device, and off the host if `host`."""
        with self.manager._lock:
            version = self.version(name)
            self.manager._device.remove(version)
            if host:
                self.manager._host.drop(version)

    def decode(self, steps: int, each_step: Callable[[], None] | None = None) -> list[float]:
        """Seconds of each of `steps` decode steps of what runs now, `each_step` included."""
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            if each_step is not None:
                each_step()
            outputs = self.engine.step()
            assert outputs
            times.append(time.perf_counter() - began)
        return times


class Traffic:
    """Brings `names` to the device one after another, without a request: each evicts another."""

    def __init__(self, bench: Bench, names: list[str], from_disk: bool) -> None:
        self.bench, self.names, self.from_disk = bench, names, from_disk
        self.loads = 0
        self.ref: AdapterRef | None = None

    def __call__(self) -> None:
        manager = self.bench.manager
        if self.ref is not None and self.bench.version(self.ref.name).life.slot is not None:
            manager.drop(self.ref)
            self.bench.forget(self.ref.name, host=self.from_disk)
            self.ref = None
            self.loads += 1
        if self.ref is None:
            self.ref = manager.resolve(self.names[self.loads % len(self.names)])
            manager.hold(self.ref)
        manager.prefetch([self.ref])


def percentiles(seconds: list[float]) -> Row:
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        name: 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        for name, share in at.items()
    }


def summary(seconds: Iterable[float]) -> Row:
    values = [1e3 * each for each in seconds]
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def median_ms(call: Callable[[], float], rounds: int) -> Row:
    return summary(call() for _ in range(rounds))


class Table:
    """Rows, printed as they come."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def add(self, label: str, row: Row) -> None:
        self.rows[label] = row
        line = "  ".join(f"{key} {value:9.3f}" for key, value in row.items())
        print(f"  {label:30s}", line, flush=True)


@contextmanager
def on_threads(bench: Bench) -> Iterator[None]:
    """Adapters are read on threads of this process meanwhile."""
    host = bench.manager._host
    readers, host.readers = host.readers, None
    try:
        yield
    finally:
        host.readers = readers


def measure_loads(bench: Bench, rounds: int, table: Table) -> None:
    host = bench.manager._host

    def read_and_pack() -> float:
        bench.forget("a0", host=True)
        version = bench.version("a0")
        began = time.perf_counter()
        with bench.manager._lock:
            host.ensure(version)
        host.wait(version)
        assert version.life.error is None, version.life.error
        return time.perf_counter() - began

    def from_host() -> float:
        bench.forget("a0", host=False)
        assert bench.version("a0").life.host is not None
        return bench.serve("a0")[0]

    bench.serve("a0"), bench.serve(None)  # files into the page cache, kernels compiled
    read_and_pack(), read_and_pack()  # memory that readers and slabs keep is there
    table.add("host to device", median_ms(from_host, rounds))
    served = []
    for _ in range(rounds):
        bench.forget("a0", host=True)
        served.append(bench.serve("a0"))
    table.add("page cache to device", summary(seconds for seconds, _ in served))
    table.add("page cache to first token", summary(seconds for _, seconds in served))
    table.add("base request to first token", median_ms(lambda: bench.serve(None)[1], rounds))
    table.add("read and pack", median_ms(read_and_pack, rounds))
    if host.readers is not None:
        with on_threads(bench):
            table.add("read and pack, on threads", median_ms(read_and_pack, rounds))


def python_items(seconds: float, each: Callable[[], None]) -> list[float]:
    """Seconds that each of many items of about 0.2 ms took, with `each` between them.

    An item is small calls of PyTorch: each gives the interpreter's lock away and takes it back, as
    a step's launches of kernels do.
    """
    x = torch.zeros(4)

    def work(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            x.add_(1.0)
        return time.perf_counter() - began

    count = int(200 * 0.2e-3 / statistics.median(work(200) for _ in range(50)))
    times = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        times.append(work(count))
        each()
    return times


def measure_python(bench: Bench, seconds: float, table: Table) -> None:
    table.add("Python, alone", percentiles(python_items(seconds, lambda: None)))
    host = bench.manager._host
    if host.readers is not None:
        table.add("Python, processes read", beside_reads(bench, seconds))
    with on_threads(bench):
        table.add("Python, threads read", beside_reads(bench, seconds))


def beside_reads(bench: Bench, seconds: float) -> Row:
    """The Python items while `a0` is read again and again."""
    version, host = bench.version("a0"), bench.manager._host
    reads = itertools.count()

    def again() -> None:
        if version.life.state is not State.LOADING:
            next(reads)
            bench.forget("a0", host=True)
            with bench.manager._lock:
                host.ensure(version)

    times = python_items(seconds, again)
    host.wait(version)
    return percentiles(times) | {"loads_per_s": next(reads) / seconds}


def begin_decodes(bench: Bench, batch: int) -> None:
    """Requests that run for long, every other one with the adapter a0, until all decode."""
    for index in range(batch):
        bench.add("a0" if index % 2 else None, max_tokens=4000)
    while bench.engine.scheduler.waiting or any(
        s.num_computed < PROMPT for s in bench.engine.scheduler.running
    ):
        bench.engine.step()


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `make_bench` and `begin_decodes` are told."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a shape for a CPU")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--readers", type=int, help="processes that read; 0: threads")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each row of Python items")
    return parser.parse_args()


def make_bench(options: argparse.Namespace, folder: Path) -> tuple[Bench, int]:
    """The engine, and the bytes of one adapter's files."""
    shape = model_shape(options.small, options.layers)
    write_model(folder / "model", shape)
    nbytes = write_adapter(folder / "adapter0", shape, options.rank, 0)
    paths = [folder / "adapter0"]
    for index in range(1, options.adapters):
        paths.append(link_adapter(folder / f"adapter{index}", paths[0]))
    wide = 2 if options.device == "cpu" else 1  # float32 there, bfloat16 in the files
    host = options.adapters + 1.5  # all copies, and the files of the one that is read
    bench = Bench(
        *(folder / "model", options.device, paths, wide * nbytes, 2.2, host),
        *(options.readers, options.enforce_eager, options.batch),
    )
    return bench, nbytes


def main() -> None:
    options, began, table = parse(), time.perf_counter(), Table()
    with tempfile.TemporaryDirectory() as name:
        bench, nbytes = make_bench(options, Path(name))
        took = time.perf_counter() - began
        print(
            f"adapter of {nbytes / 1e6:.0f} MB, {options.layers} layers, on {options.device}; ms "
            f"(engine ready after {took:.1f} s)",
            flush=True,
        )
        measure_loads(bench, options.rounds, table)
        measure_python(bench, options.seconds, table)
        gc.unfreeze()
    where = torch.cuda.get_device_name() if options.device != "cpu" else platform.processor()
    shape = {key: getattr(options, key) for key in ("layers", "rank", "batch", "small")}
    shape["readers"] = (
        0 if bench.manager._host.readers is None else bench.engine.config.lora_readers
    )
    shape["seconds"] = round(time.perf_counter() - began, 1)
    rows = table.rows
    print(json.dumps({"commit": commit(), "device": where, "nbytes": nbytes, **shape, "ms": rows}))


if __name__ == "__main__":
    main()
