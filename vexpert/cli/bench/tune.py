"""`vexpert bench tune`: measures kernel plans for one MoE shape, and writes those that win."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from vexpert.cli.bench.kernel import find_device
from vexpert.cli.parser import finite
from vexpert.config import DTYPES
from vexpert.errors import ConfigError

if TYPE_CHECKING:
    from vexpert.bench.tune.run import Tuner


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `vexpert bench tune`."""
    group = parser.add_argument_group("cells")
    group.add_argument(
        "--shape",
        default="qwen3-30b-a3b",
        metavar="NAME",
        help="a layer by name, or HxIxExK: hidden, intermediate, experts, experts of a token",
    )
    group.add_argument(
        "--tokens", nargs="+", type=int, default=[1, 8, 32, 128, 512, 4096], metavar="N"
    )
    group.add_argument("--adapters", nargs="+", type=int, default=[1, 8, 32], metavar="N")
    group.add_argument("--ranks", nargs="+", type=int, default=[16], metavar="N")
    group = parser.add_argument_group("method")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: bfloat16")
    group.add_argument("--minutes", type=finite, default=10.0, metavar="X", help="at most")
    group.add_argument("--repeats", type=int, default=11, metavar="N", help="the median counts")
    group.add_argument(
        "--processes", type=int, metavar="N", help="that compile; default: as cores, at most 15"
    )
    parser.add_argument_group("output").add_argument(
        "--output", default="kernel_plans.json", metavar="FILE", help="for --kernel-plans"
    )


def run(args: argparse.Namespace) -> int:
    """Tune, print a line per cell, and write the file after each of them."""
    import torch

    from vexpert.bench.header import describe
    from vexpert.bench.tune.rows import write_rows
    from vexpert.bench.tune.run import Cell, families

    if not Path(args.output).parent.is_dir():
        raise ConfigError(f"output={args.output!r}: its folder does not exist; make it first")
    tuner = _tuner(args)
    facts = describe(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    facts |= {"shape": args.shape, "method": tuner.timer.method}
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), flush=True)
    cells: list[Cell] = []
    try:
        with torch.inference_mode():
            for cell in tuner.cells():
                cells.append(cell)
                print(cell.line(), flush=True)
                write_rows(args.output, families(cells, tuner.dtype), facts)
    finally:
        tuner.compilers.close()
    won = sum(cell.row is not None for cell in cells)
    print(f"{won} of {len(cells)} cells have a better plan, in {args.output}")
    print(json.dumps(facts | {"cells": len(cells), "won": won, "output": args.output}))
    return 0


def _tuner(args: argparse.Namespace) -> "Tuner":
    """Raises ConfigError for bad options, UnsupportedError where no Triton kernel runs."""
    import torch

    from vexpert.bench.shapes import find_shape
    from vexpert.bench.timer import make_timer
    from vexpert.bench.tune.compiling import Compilers
    from vexpert.bench.tune.run import Grid, Tuner, deadline
    from vexpert.ops.backend import select_backend

    for name in ("tokens", "adapters", "ranks"):
        if min(getattr(args, name)) < 1:
            raise ConfigError(f"{name}={getattr(args, name)}: must all be at least 1")
    if args.minutes <= 0:
        raise ConfigError(f"minutes={args.minutes}: must be above 0")
    find_shape(args.shape)
    device = find_device(None)
    auto = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, auto if args.dtype == "auto" else args.dtype)
    grid = Grid(args.shape, *(tuple(sorted(set(getattr(args, n)))) for n in GRID))
    return Tuner(
        grid,
        dtype,
        select_backend("triton", device, dtype),
        make_timer(device, args.repeats),
        make_timer(device, 3 * args.repeats),
        Compilers(args.processes if device.type == "cuda" else 0),
        deadline(args.minutes),
        lambda text: print(f"  {text}", flush=True),
    )


GRID = ("tokens", "adapters", "ranks")
