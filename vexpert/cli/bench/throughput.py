"""`vexpert bench throughput`: decode and prefill of a whole engine, base and adapters."""

import argparse
import dataclasses
import gc
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vexpert.cli.parser import add_engine_options, engine_config, finite
from vexpert.cli.progress import progress
from vexpert.cli.serve import add_lora_modules, resolve_model
from vexpert.cli.threads import limit_spinning
from vexpert.config import EngineConfig
from vexpert.demo import DEMO_NAME
from vexpert.errors import ConfigError
from vexpert.log import quiet_libraries
from vexpert.server.interface import LoraModule

if TYPE_CHECKING:
    from vexpert.bench.engine.cells import Cell, Mix, Timing
    from vexpert.bench.engine.files import ModelShape

LEGEND = "adapters: in one batch; off: LoRA switched off, which `of base` compares with"
ONE_ROUND = "one round: says nothing of noise; see --repeats"
KV_TOKENS = 1 << 19  # of a shape's cache, in all: more than any cell needs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `vexpert bench throughput`."""
    parser.add_argument(
        "model", nargs="?", default="", metavar="MODEL", help="default: the bundled demo"
    )
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--shape",
        metavar="NAME",
        help="random weights and random adapters of this shape instead of MODEL, such as"
        " qwen3-30b-a3b-8l; an unknown one lists all",
    )
    numbers: dict[str, Any] = {"type": int, "nargs": "*", "metavar": "N"}
    group.add_argument("--num-prompts", **numbers, default=[1, 8, 32], help="batch sizes")
    group.add_argument("--input-len", type=int, default=64, metavar="N", help="prompt tokens")
    group.add_argument("--output-len", type=int, default=96, metavar="N", help="decode steps")
    group.add_argument(
        "--prefill", nargs="*", default=[], metavar="BxN", help="prompts to time alone: 16x512"
    )
    group.add_argument(
        "--adapters", **numbers, help="in one batch; 0: base requests; default: 0 and all that fit"
    )
    group.add_argument("--popularity", default="distinct", help="of adapters: distinct (default),"
                       " uniform, zipf, identical")  # fmt: skip
    group.add_argument("--base-share", type=finite, default=0.0, metavar="X", help="of requests")
    group.add_argument("--lora-rank", type=int, default=16, metavar="N", help="with --shape")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="the median counts")
    group.add_argument("--json", metavar="FILE", help="the last line's object")
    parser.usage = "vexpert bench throughput [MODEL] [options]"
    add_lora_modules(add_engine_options(parser)["lora"])


def run(args: argparse.Namespace) -> int:
    """Measure and print; the exit code."""
    limit_spinning()
    from vexpert.bench.engine.cells import Mix

    mix = Mix(args.popularity, args.base_share)
    with tempfile.TemporaryDirectory() as folder, _subject(args, Path(folder)) as subject:
        config, modules, shape, rank = subject
        cells = _cells(args, len(modules))
        quiet_libraries()
        return _report(args, config, modules, shape, rank, cells, mix)


@contextmanager
def _subject(
    args: argparse.Namespace, folder: Path
) -> Iterator[tuple[EngineConfig, list[LoraModule], "ModelShape | None", int]]:
    """What is measured: options, adapters, shape and its rank; without a shape, files tell it."""
    if args.shape is None:
        config, modules, _ = resolve_model(engine_config(args), args.lora_modules, [])
        yield config, modules, None, 0
        return
    from vexpert.bench.engine.files import find_model_shape, write_adapter, write_model

    if args.model or args.lora_modules:
        raise ConfigError("--shape is given with a model or with adapters; leave them out")
    shape = find_model_shape(args.shape)
    write_model(folder / shape.name, shape)
    count = max(args.adapters or [0])
    modules, nbytes = [], 0
    if count:
        nbytes = write_adapter(folder / "adapter", shape, args.lora_rank, seed=0)
        path = str(folder / "adapter")
        modules = [LoraModule(f"adapter-{i}", path) for i in range(count)]
    config = dataclasses.replace(engine_config(args), model=str(folder / shape.name))
    yield _sized(config, shape, count, nbytes), modules, shape, args.lora_rank


def _sized(config: EngineConfig, shape: "ModelShape", count: int, nbytes: int) -> EngineConfig:
    """Room for every adapter and cell, where the options leave it open."""
    wide = 2 if config.dtype == "float32" else 1  # the files are in bfloat16
    room = max(1 << 20, int(1.1 * count * nbytes * wide))
    per_token = 4 * shape.layers * shape.kv_heads * shape.head_dim * wide
    chosen: dict[str, Any] = {
        "load_format": "dummy",
        "max_model_len": config.max_model_len or 8192,
        "kv_cache_memory": config.kv_cache_memory or KV_TOKENS * per_token,
        "lora_memory": config.lora_memory or room,
        "lora_host_memory": config.lora_host_memory or room,
        "max_lora_rank": max(config.max_lora_rank, 1),
    }
    return dataclasses.replace(config, **chosen)


def _cells(args: argparse.Namespace, given: int) -> list["Cell"]:
    from vexpert.bench.engine.cells import Cell

    for name in ("input_len", "output_len", "repeats", "lora_rank"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name}={getattr(args, name)}: must be at least 1")
    for count in args.adapters or ():
        if not 0 <= count <= given:
            raise ConfigError(f"adapters={count}: {given} are given; see --lora-modules")
    shapes = [(batch, args.input_len, args.output_len) for batch in args.num_prompts]
    shapes += [(*_prefill(word), 0) for word in args.prefill]
    if not shapes or min(batch for batch, _, _ in shapes) < 1:
        raise ConfigError("num_prompts and prefill: give batch sizes of at least 1")
    cells = [
        Cell(*shape, count)
        for shape in shapes
        for count in args.adapters or sorted({0, min(given, shape[0])})
        if count <= shape[0]
    ]
    if not cells:
        raise ConfigError(f"adapters={min(args.adapters)}: more than any batch has requests")
    return cells


def _prefill(word: str) -> tuple[int, int]:
    batch, _, length = word.partition("x")
    if not (batch.isdigit() and length.isdigit() and int(batch) and int(length)):
        raise ConfigError(f"prefill={word!r}: give prompts x tokens, such as 16x512")
    return int(batch), int(length)


def _report(
    args: argparse.Namespace,
    config: EngineConfig,
    modules: list[LoraModule],
    shape: "ModelShape | None",
    rank: int,
    cells: Sequence["Cell"],
    mix: "Mix",
) -> int:
    from vexpert.bench.engine.report import CellRow, Columns, is_peers_model

    alone = [dataclasses.replace(cell, adapters=0) for cell in cells]
    columns = Columns(
        has_floor=shape is not None,
        has_peer=shape is not None and is_peers_model(shape.name, rank),
    )
    rows: list[CellRow] = []

    def show(row: CellRow) -> None:
        rows.append(row)
        print(row.line(columns), flush=True)

    base, _ = _measure(args, dataclasses.replace(config, enable_lora=False), [], alone, mix)
    is_whole = _is_whole(base, args.repeats, alone)
    print(LEGEND)
    if args.repeats == 1:
        print(ONE_ROUND)
    print(columns.heading())
    for cell, timing in base.items():
        show(CellRow(cell, "base", timing, None, None))
    lora: dict[Cell, Timing] = {}
    largest = 0
    if config.enable_lora and is_whole:
        lora, largest = _measure(args, config, modules, cells, mix)
        is_whole = _is_whole(lora, args.repeats, cells)
    for cell, timing in lora.items():
        floor = _floor(shape, cell, rank, mix)
        beside = base[dataclasses.replace(cell, adapters=0)]
        show(CellRow(cell, "lora", timing, beside, floor))
    _print_json(args, rows, shape, max(rank, largest), mix)
    if not is_whole:
        print("interrupted", file=sys.stderr)
    return 0 if is_whole else 130


def _is_whole(found: "dict[Cell, Timing]", repeats: int, cells: Sequence["Cell"]) -> bool:
    """Whether no round of any cell is missing."""
    return all(cell in found and len(found[cell].seconds) == repeats for cell in cells)


def _floor(shape: "ModelShape | None", cell: "Cell", rank: int, mix: "Mix") -> float | None:
    from vexpert.bench.engine.floor import step_bytes

    if shape is None or not cell.steps or not cell.adapters:
        return None
    context = cell.input_len + cell.steps // 2
    return step_bytes(shape, cell.batch, cell.adapters, rank, context, mix.base_share).share


def _measure(
    args: argparse.Namespace,
    config: EngineConfig,
    modules: list[LoraModule],
    cells: Sequence["Cell"],
    mix: "Mix",
) -> tuple[dict["Cell", "Timing"], int]:
    """All cells on one engine, which is gone afterwards; and the largest rank of its adapters."""
    from vexpert import LLM
    from vexpert.bench.engine.cells import CellTimer, time_cells
    from vexpert.server.engine_boot import settle

    cells = list(dict.fromkeys(cells))
    llm: LLM | None = LLM(**dataclasses.asdict(config))
    assert llm is not None
    rank = 0
    for module in modules:
        info = llm.load_adapter(module.name, module.path, lora_B_layout=module.lora_B_layout)
        rank = max(rank, info.rank)
    settle()  # as `vexpert serve` does
    timer: CellTimer | None = CellTimer(llm, [module.name for module in modules], mix)
    assert timer is not None
    label = "with LoRA" if config.enable_lora else "base"
    with progress(label, (args.repeats + 1) * len(cells)) as done:
        found = time_cells(timer, cells, args.repeats, done)
    llm = timer = None
    gc.unfreeze()
    _free_device_memory(config)
    return found, rank


def _free_device_memory(config: EngineConfig) -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available() and config.device != "cpu":
        torch.cuda.empty_cache()


def _print_json(
    args: argparse.Namespace, rows: Sequence[Any], shape: Any, rank: int, mix: "Mix"
) -> None:
    import torch

    from vexpert.bench.header import describe, stamp

    name = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    facts = describe(torch.device(name))
    result = {
        **facts,
        "model": args.model or (shape.name if shape else DEMO_NAME),
        "lora_rank": rank,
        "popularity": mix.popularity,
        "base_share": mix.base_share,
        "cells": [stamp(facts) | row.as_json() for row in rows],
    }
    text = json.dumps(result)
    if args.json:
        Path(args.json).write_text(text + "\n")
    print(text)
