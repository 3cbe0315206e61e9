"""Streaming over HTTP beside the same engine offline: many streams at once, many adapters.

A random model of `--shape` and `--adapters` adapters of rank 16; `--requests` requests of 64 random
prompt tokens and `--tokens` tokens each, adapters in turn. First in this process (`LLM.generate`,
all at once), then by `vexpert serve`, `--streams` at once, asked by `--clients` processes of
`streams_client.py`. Both engines run `--streams` sequences at once, and start at the same time.

| figure | of |
|---|---|
| lost | streams that did not end as asked |
| tokens/s | from the first request to the last token; best of `--rounds`, offline and streamed |
| first token | ms from a request to its first event |
| per token | ms from the first event of a stream to its last, over its tokens but the first |
| gap | ms between two events of a stream |
| tokens an event | more than 1 where a client's or the server's turn came after several steps |

The verdict, before the last line, which is JSON: nothing lost, and at least `--least` of offline.
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from streams_client import Stream, ask_all

from vexpert import LLM, SamplingParams
from vexpert.bench.engine.files import (
    ModelShape,
    find_model_shape,
    link_adapter,
    write_adapter,
    write_model,
)
from vexpert.checkout import commit
from vexpert.server.engine_boot import settle

ROOT = Path(__file__).parents[1]
PROMPT = 64  # tokens

Body = dict[str, Any]


class Workload:
    """The files, and requests that never repeat a prompt."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.shape: ModelShape = find_model_shape(options.shape)
        self.options, self._draw = options, random.Random(0)
        self.model = folder / self.shape.name
        write_model(self.model, self.shape)
        nbytes = write_adapter(folder / "a0", self.shape, 16, 0)
        wide = 2 if options.dtype == "float32" else 1
        self.adapter_bytes = int(1.1 * wide * options.adapters * nbytes) + (1 << 20)
        self.paths = {"a0": folder / "a0"}
        for i in range(1, options.adapters):
            self.paths[f"a{i}"] = link_adapter(folder / f"a{i}", folder / "a0")

    def config(self) -> dict[str, Any]:
        """Engine options, the same for both."""
        return {
            "device": self.options.device,
            "dtype": self.options.dtype,
            "load_format": "dummy",
            "max_model_len": 2048,
            "max_num_seqs": self.options.streams,
            "kv_cache_memory": self.options.kv_memory,
            "lora_memory": self.adapter_bytes,
            "lora_host_memory": self.adapter_bytes,
        }

    def requests(self, count: int) -> list[tuple[str, list[int]]]:
        """(adapter, prompt) of each."""
        names = list(self.paths)
        prompts = [self._draw.choices(range(2, self.shape.vocab), k=PROMPT) for _ in range(count)]
        return [(names[i % len(names)], prompt) for i, prompt in enumerate(prompts)]


def start_server(work: Workload) -> "subprocess.Popen[str]":
    flags = []
    for key, value in work.config().items():
        flags += [f"--{key.replace('_', '-')}", str(value)]
    modules = [f"{name}={path}" for name, path in work.paths.items()]
    command = [sys.executable, "-m", "vexpert", "serve", str(work.model), "--port", "0"]
    return subprocess.Popen(
        [*command, *flags, "--disable-uvicorn-access-log", "--no-web", "--lora-modules", *modules],
        env=os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", "") + f":{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
    )


def port_of(server: "subprocess.Popen[str]") -> int:
    """Wait until the server is ready."""
    assert server.stdout is not None
    line = server.stdout.readline()
    assert line, "the server did not start"
    return int(line.split()[2].rpartition(":")[2].strip("/"))


def start_offline(work: Workload) -> LLM:
    llm = LLM(model=str(work.model), **work.config())
    for name, path in work.paths.items():
        llm.load_adapter(name, str(path))
    settle()
    return llm


def offline(work: Workload, llm: LLM) -> list[float]:
    """Tokens a second of each round, after one that warms up."""
    options = work.options
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    rates = []
    for _ in range(options.rounds + 1):
        requests = work.requests(options.requests)
        prompts = [{"prompt_token_ids": prompt} for _, prompt in requests]
        began = time.perf_counter()
        llm.generate(prompts, params, adapter=[name for name, _ in requests])
        rates.append(options.requests * options.tokens / (time.perf_counter() - began))
    return rates[1:]


def ask(work: Workload, port: int, count: int) -> list[Stream]:
    options = work.options
    fixed = {"max_tokens": options.tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    bodies: list[Body] = [
        {"model": name, "prompt": prompt, **fixed} for name, prompt in work.requests(count)
    ]
    return ask_all(port, "/v1/completions", bodies, options.streams, options.clients)


def tokens_a_second(streams: list[Stream], tokens: int) -> float:
    began = min(stream.asked for stream in streams)
    ended = max(stream.event_times[-1] for stream in streams if stream.event_times)
    return len(streams) * tokens / (ended - began)


def spread(seconds: list[float]) -> dict[str, float]:
    """Mean, median and 99th percentile in ms."""
    values = 1e3 * np.array(seconds)
    p50, p99 = np.quantile(values, [0.5, 0.99])
    return {
        name: round(float(value), 3)
        for name, value in (("mean", values.mean()), ("median", p50), ("p99", p99))
    }


def latencies(streams: list[Stream], tokens: int) -> dict[str, Any]:
    first = [stream.event_times[0] - stream.asked for stream in streams]
    each = [(s.event_times[-1] - s.event_times[0]) / (tokens - 1) for s in streams]
    gaps = [gap for s in streams for gap in np.diff(s.event_times)]
    events = sum(len(stream.event_times) for stream in streams)
    shown = {"first token": spread(first), "per token": spread(each), "gap": spread(gaps)}
    return shown | {"tokens an event": round(len(streams) * tokens / events, 2)}


def streamed(work: Workload, port: int) -> dict[str, Any]:
    """Figures of the fastest of the rounds; those lost are of all."""
    options, lost = work.options, 0
    best: dict[str, Any] = {"tokens/s": 0.0}
    for counts in [False] + [True] * options.rounds:
        streams = ask(work, port, options.requests)
        whole = [stream for stream in streams if stream.is_whole]
        lost += options.requests - len(whole)
        rate = round(tokens_a_second(streams, options.tokens))
        print(f"  round: {rate} tokens/s, {len(whole)} of {options.requests} whole", flush=True)
        if counts and rate > best["tokens/s"] and whole:
            best = {"tokens/s": rate, **latencies(whole, options.tokens)}
    return best | {"lost": lost}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-30b-a3b-8l")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--streams", type=int, default=256, help="at once")
    parser.add_argument("--requests", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clients", type=int, default=4, help="processes that ask")
    parser.add_argument("--kv-memory", type=int, default=8 << 30, help="bytes")
    parser.add_argument("--least", type=float, default=0.9, help="share of offline")
    return parser.parse_args()


def main() -> int:
    options, began = parse(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        work = Workload(Path(folder), options)
        server = start_server(work)
        try:
            llm = start_offline(work)
            port = port_of(server)  # both are ready: neither disturbs the other
            print(f"both ready after {time.perf_counter() - began:.0f} s", flush=True)
            rates = [round(rate) for rate in offline(work, llm)]
            print(f"offline: {rates} tokens/s", flush=True)
            found = streamed(work, port)
        finally:
            server.terminate()
            server.wait()
            gc.unfreeze()
    for name, value in found.items():
        print(f"  {name}: {value}")
    share = found["tokens/s"] / max(rates)
    is_well = share >= options.least and not found["lost"]
    verdict = "PASS" if is_well else "FAIL"
    print(f"streaming: {verdict}: {share:.1%} of offline, {found['lost']} lost")
    fixed = {key: getattr(options, key) for key in ("shape", "adapters", "streams", "tokens")}
    print(json.dumps({"commit": commit(), **fixed, "offline": rates, "streamed": found}))
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
