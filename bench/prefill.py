"""Prompts on one GPU: LoRA ended by who reads q, k and v, and layers replayed as a whole.

`python bench/prefill.py parts` times q, k, v with their rotation, and o with the add and norm
behind it: without adapters, with shrinks of several tiles, and with readers' tiles. CUDA graph
replays, cold L2, medians, contenders in turns; each is first checked against the first one.
`python bench/prefill.py whole` times prompts through the engine, of one length and of ever new
ones, and the host's part of a layer: parts replayed, layers replayed.
`--dry`: on a CPU, in Triton's interpreter, with tiny sizes: whether it runs.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import dense_layer
import torch
from dense_layer import Cell, make_cell

from vexpert import LLM, SamplingParams
from vexpert.bench.engine.files import find_model_shape, write_adapter, write_model
from vexpert.bench.timer import Call, make_timer
from vexpert.checkout import commit
from vexpert.engine import warmup
from vexpert.kernels.common import can_use_pdl
from vexpert.kernels.compile_ahead import compile_only
from vexpert.kernels.dense_factors import DenseDelta, ReaderTile
from vexpert.kernels.dense_shrink import DenseShrink
from vexpert.kernels.norms import Norm
from vexpert.kernels.replay import Replays
from vexpert.kernels.rms_norm import add_rms_norm
from vexpert.kernels.rope_arguments import Heads, Rope
from vexpert.kernels.rope_tiles import rope_tiles
from vexpert.kernels.rope_write import rope_write
from vexpert.models.replayed_layer import ReplayedLayer
from vexpert.ops import packed_linear as layers
from vexpert.ops.dense_plan import DensePlan

TILES = [ReaderTile(16, 4), ReaderTile(16, 2), ReaderTile(16, 8), ReaderTile(32, 4)]
SHRINKS = {
    "16 columns": DenseShrink(False, 64, 16, 1, 128, 4, 4),
    "64 columns": DenseShrink(False, 64, 64, 1, 128, 4, 4),
    "64 columns, 32 rows": DenseShrink(False, 32, 64, 1, 128, 4, 4),
    "32 rows, 2 parts": DenseShrink(False, 32, 16, 2, 128, 4, 4),
}
WAYS = "parts replayed", "layers"


Side = Callable[[torch.Tensor, DenseDelta | None], torch.Tensor]  # who reads a product


def say(*words: object) -> None:
    print(*words, flush=True)


# ---- parts ----


def attention_side(cell: Cell) -> tuple[Side, list[torch.Tensor]]:
    """q, k, v [R, .] rotated, and written to the cache that comes with it."""
    rows, device, dtype = cell.x.shape[0], cell.x.device, cell.x.dtype
    norm = Norm(torch.ones(128, dtype=dtype, device=device), 128, 1e-6, "rounded")
    sizes, pdl = [site.out_features for site in cell.lora.sites], can_use_pdl(device)
    heads = Heads(sizes[0] // 128, sizes[1] // 128, 128, norm, norm)
    angle, places = torch.rand(rows, 128, device=device), torch.arange(rows, device=device)
    angles = angle.cos().to(dtype), angle.sin().to(dtype)
    shape = rows, heads.num_kv, 128
    cache = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)]

    def run(y: torch.Tensor, rest: DenseDelta | None) -> torch.Tensor:
        q, k, v = y.split(sizes, 1)
        how = heads, Rope(128), angles, places, (cache[0], cache[1])
        if rest is not None:
            return rope_tiles(q, k, v, *how, rest, pdl)
        return rope_write(q, k, v, *how, pdl)

    return run, cache


def norm_side(cell: Cell) -> Side:
    """o [R, H] added to a residual, and normed."""
    device, dtype = cell.x.device, cell.x.dtype
    width, pdl = cell.weight.shape[0], can_use_pdl(device)
    norm = Norm(torch.ones(width, dtype=dtype, device=device), width, 1e-6, "rounded")
    residual = torch.randn(cell.x.shape[0], width, device=device).to(dtype)

    def run(y: torch.Tensor, rest: DenseDelta | None) -> torch.Tensor:
        assert rest is None
        return add_rms_norm(y, residual, norm, 1.0, pdl)[1]

    return run


def contenders(layer: str, cell: Cell) -> tuple[dict[str, Call], list[torch.Tensor]]:
    """Name -> call; the first two: without adapters, and an expand with a shrink of one site.

    And what they write besides what they return.
    """
    x, weight, order, plan = cell.x, cell.weight, cell.order, cell.plan
    side, written = attention_side(cell) if layer == "qkv" else (norm_side(cell), [])

    def today(how: DensePlan) -> Call:
        return lambda: side(layers.packed_linear(x, weight, None, cell.lora, order, how), None)

    def tiles(how: DensePlan) -> Call:
        def call() -> torch.Tensor:
            y, rest = layers.deferred_linear(x, weight, None, cell.lora, order, how, tiles=True)
            assert rest is not None
            return side(y, rest)

        return call

    calls = {"base": lambda: side(layers.packed_linear(x, weight, None, None, None, plan), None)}
    for name, shrink in SHRINKS.items():
        calls[f"expand, {name}"] = today(replace(plan, fork=False, shrink=shrink))
    for name, shrink in SHRINKS.items() if layer == "qkv" else ():
        for tile in TILES:
            how = replace(plan, fork=False, shrink=shrink, reader=tile)
            calls[f"{tile.rows} rows, {tile.heads} heads, {name}"] = tiles(how)
    return calls, written


def whole(call: Call, written: list[torch.Tensor]) -> torch.Tensor:
    """All that it gives, in float32."""
    return torch.cat([call().flatten(), *(part.flatten() for part in written)]).float()


def time_parts(given: argparse.Namespace, device: torch.device, sizes: list[int]) -> None:
    began = time.perf_counter()
    counts = (1, 8) if device.type == "cuda" else (2,)
    cells = [(name, rows, count) for rows in sizes for name in ("qkv", "o") for count in counts]
    made = {key: make_cell(*key, 16, 0.0, in_runs=True) for key in cells}
    if device.type == "cuda":
        with compile_only():
            for (name, _, _), cell in made.items():
                for call in contenders(name, cell)[0].values():
                    call()
    if given.compile:
        return
    timer = make_timer(device, given.repeats)
    say(f"compiled after {time.perf_counter() - began:.0f} s; an empty graph {timer.overhead:.1f}")
    for (name, rows, count), cell in made.items():
        if time.perf_counter() - began > given.budget:
            say("out of time before", name, rows, count)
            break
        calls, written = contenders(name, cell)
        if device.type == "cpu":
            calls = dict(list(calls.items())[:4])
        wanted, base = (whole(calls[title], written) for title in list(calls)[1::-1])
        assert error_of(base, wanted) > 1e-2, "the adapters do nothing"
        for title, call in list(calls.items())[2:]:
            got = whole(call, written)
            error, same = error_of(got, wanted), torch.equal(got, whole(call, written))
            if error > 5e-3 or not same:
                say(f"   WRONG: {title}, error {error:.1e}, repeatable: {same}")
                del calls[title]
        times = timer.time_in_turns({title: timer.prepare(call) for title, call in calls.items()})
        us = {title: timing.median for title, timing in times.items()}
        say(f"{name}, {rows} rows, {count} adapters: base {us.pop('base'):.1f} us; added by")
        least = times["base"].median
        ranked = sorted(us.items(), key=lambda pair: pair[1])
        say("  ", " | ".join(f"{title} {value - least:+.1f}" for title, value in ranked))


def error_of(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


# ---- whole ----


def make_llm(dry: bool) -> LLM:
    """An engine with two adapters, x0 and x1 ... x7 by one file's links."""
    shape = find_model_shape("tiny" if dry else "qwen3-30b-a3b-8l")
    folder = Path(tempfile.mkdtemp())
    write_model(folder / "m", shape)
    size = write_adapter(folder / "a", shape, 16, seed=0)
    names = [f"x{i}" for i in range(2 if dry else 8)]
    room = int(1.1 * len(names) * size * (2 if dry else 1)) + (1 << 20)
    options: dict[str, Any] = {
        "model": str(folder / "m"),
        "load_format": "dummy",
        "max_model_len": 8192,
        "max_num_seqs": 16,
        "kv_cache_memory": (1 << 26) if dry else (4 << 30),
        "enable_lora": True,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "dtype": "float32" if dry else "bfloat16",
        "lora_memory": room,
        "lora_host_memory": 2 * room,  # the files that are read count too
        "max_loras": len(names),
        "device": "cpu" if dry else "cuda",
    }
    llm = LLM(**options)
    for name in names:
        llm.load_adapter(name, str(folder / "a"))
    return llm


class Ways:
    """Switches an engine between the ways of running a prompt's layers."""

    def __init__(self, llm: LLM) -> None:
        forwards = [getattr(m, "forward", None) for m in llm.engine.model.model.modules()]
        self.layers = [forward.replayed for forward in forwards if hasattr(forward, "replayed")]
        self.call, self.replay = ReplayedLayer.__call__, Replays.__call__

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        ReplayedLayer.__call__ = self.call if name == "layers" else _run_parts
        Replays.__call__ = _run_replay if name == "one by one" else self.replay
        try:
            yield
        finally:
            ReplayedLayer.__call__, Replays.__call__ = self.call, self.replay


def _run_parts(self: ReplayedLayer, hidden: Any, normed: Any, angles: Any, run: Any) -> Any:
    return run()


def _run_replay(self: Replays, _: Any, __: Any, ___: Any, run: Any, unsaid: Any = None) -> Any:
    return run()


def time_whole(dry: bool, only_check: bool) -> None:
    warmup.powers = lambda most: sorted({n for n in (512, 2048, 8192) if n <= most} or {most})
    warmup.COUNTS = (1,)
    began = time.perf_counter()
    llm = make_llm(dry)
    ways, model = Ways(llm), llm.engine.model
    if not dry:
        with compile_only(), ways("layers"), torch.inference_mode():
            for signature in warmup._signatures(model):
                for tokens in (501, 512, 2031, 2048, 8192):  # classes of lengths
                    steps = warmup._Steps(model, tokens + 64, model.block_size)
                    model.raw_logits(steps.prompt(tokens, signature))
    say(f"ready after {time.perf_counter() - began:.0f} s; {len(ways.layers)} layers")
    check_whole(llm, ways, 40 if dry else 700)
    if only_check:
        return
    for prompts, tokens in [(1, 40)] if dry else [(1, 512), (1, 2048), (16, 512)]:
        for names in ([None], ["x0"], [f"x{i}" for i in range(8)])[: 2 if prompts == 1 else 3]:
            line = []
            for name in WAYS:
                with ways(name):
                    once = time_prompts(llm, prompts, tokens, names, [0] * 9)
                    new = time_prompts(llm, prompts, tokens, names, list(range(1, 10)))
                line.append(f"{name} {once:.0f} k, new lengths {new:.0f} k")
            count = len(names) if names[0] else 0
            say(f"{prompts} x {tokens}, {count} adapters:", " | ".join(line))
    if not dry:
        time_host(llm, ways)


def time_prompts(
    llm: LLM, prompts: int, tokens: int, names: list[Any], shorter: list[int]
) -> float:
    """Thousands of tokens a second, median; prompts are `shorter` by so many tokens in turn."""
    draw, found = random.Random(tokens), []
    for less in [0, 0, *shorter]:
        length = tokens - 2 * less - (less > 0)
        ids = [
            {"prompt_token_ids": [draw.randrange(2, 400) for _ in range(length)]}
            for _ in range(prompts)
        ]
        params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)
        began = time.perf_counter()
        llm.generate(ids, params, adapter=[names[i % len(names)] for i in range(prompts)])
        found.append(prompts * length / (time.perf_counter() - began) / 1e3)
    return statistics.median(found[2:])


def check_whole(llm: LLM, ways: Ways, tokens: int) -> None:
    """Log-probabilities of two prompts in all ways, without adapters and with one, against those
    of operations run one by one: whether six turns are equal bit for bit, and how far they are off.
    """
    params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0, logprobs=4)
    draw = random.Random(1)
    ids = [
        {"prompt_token_ids": [draw.randrange(2, 400) for _ in range(length)]}
        for length in (tokens, tokens // 3)
    ]

    def play(names: list[str | None]) -> list[dict[int, float]]:
        outputs = llm.generate(ids, params, adapter=names)
        rows = [row for output in outputs for row in output.outputs[0].logprobs or []]
        return [{token: entry.logprob for token, entry in row.items()} for row in rows]

    for names in ([None, None], ["x0", None]):
        play(
            names
        )  # an adapter comes to the device: its prompt is a step later, and batched otherwise
        with ways("one by one"):
            wanted = play(names)
        for way in ("one by one", *WAYS):
            with ways(way):
                turns = [play(names) for _ in range(6)]
            off = [
                max((abs(row[t] - other[t]) for row, other in zip(turn, wanted, strict=True)
                    for t in row.keys() & other.keys()), default=0.0)
                for turn in turns
            ]  # fmt: skip
            equal = sum(turn == turns[-1] for turn in turns)
            say(
                f"{names}, {way}: {equal} of 6 equal the last, off by",
                " ".join(f"{x:.4f}" for x in off),
            )


def time_host(llm: LLM, ways: Ways) -> None:
    """The host's part of a layer, us, and of a new length's step."""
    model, count = llm.engine.model, len(ways.layers)
    for tokens in (512, 2048):
        for signature in warmup._signatures(model):
            line = []
            for name in WAYS:
                with ways(name), torch.inference_mode():
                    step = warmup._Steps(model, tokens + 64, model.block_size).prompt(
                        tokens, signature
                    )
                    host = []
                    for _ in range(9):
                        torch.cuda.synchronize()
                        began = time.perf_counter()
                        model.raw_logits(step)
                        host.append(time.perf_counter() - began)
                line.append(f"{name} {statistics.median(host[2:]) * 1e6 / count:.0f}")
            what = "base" if signature is None else "LoRA"
            say(f"host, {tokens} tokens, {what}, us a layer:", " | ".join(line))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("parts", "whole"))
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="parts: nothing else")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds, of parts")
    parser.add_argument("--check", action="store_true", help="whole: bits, no times")
    given = parser.parse_args()
    say("commit", commit())
    if given.part == "whole":
        time_whole(given.dry, given.check)
        return
    device = torch.device("cpu" if given.dry else "cuda")
    if given.dry:
        dense_layer.DEVICE, dense_layer.DTYPE = "cpu", torch.float16
        layers.MOST_DEFERRED = 0
        dense_layer.LAYERS = {"qkv": ((256, 128, 128), 64), "o": ((128,), 256)}
    with torch.inference_mode():
        time_parts(given, device, [33] if given.dry else [8192, 2048, 512])


if __name__ == "__main__":
    main()
