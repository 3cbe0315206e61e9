"""`vexpert bench kernel`: one MoE layer without and with LoRA, beside the floor of its bytes."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vexpert.cli.parser import finite
from vexpert.cli.threads import limit_spinning
from vexpert.config import DTYPES
from vexpert.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from vexpert.bench.cases import Case, Grid
    from vexpert.bench.measure import Bench, Row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `vexpert bench kernel`."""
    _add_cases(parser.add_argument_group("cases"))
    group = parser.add_argument_group("method")
    group.add_argument("--device", metavar="TEXT", help="default: cuda if there is one, else cpu")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: bfloat16 on a GPU")
    group.add_argument("--lora-backend", default="auto", metavar="TEXT", help="as for a server")
    group.add_argument("--kernel-plans", metavar="FILE", help="as for a server")
    group.add_argument("--batch-invariant", action="store_true", help="as for a server")
    group.add_argument("--repeats", type=int, default=20, metavar="N", help="the median counts")
    group.add_argument(
        "--classic", action="store_true", help="the path of one adapter after another as well"
    )
    group.add_argument(
        "--bandwidth", type=finite, default=4.3, metavar="TB/s", help="of the byte floors"
    )
    group.add_argument(
        "--compile-only", action="store_true", help="compile what the cases launch, measure nothing"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="the last line's object, kept row by row")
    output.add_argument("--csv", metavar="FILE", help="one line per row")


def _add_cases(group: Any) -> None:
    group.add_argument(
        "--preset",
        metavar="NAME",
        help="full, goals, claims, shapes or small; default: full on a GPU, small on a CPU. "
        "The options below replace its lists",
    )
    group.add_argument(
        "--shapes", nargs="+", metavar="NAME", help="layers; an unknown one lists all"
    )
    group.add_argument(
        "--ranks", nargs="+", type=_ranks, metavar="N", help="8,16,64: mixed over the slots"
    )
    group.add_argument("--adapters", nargs="+", type=int, metavar="N", help="in one batch")
    group.add_argument("--tokens", nargs="+", type=int, metavar="N", help="rows of the layer")
    group.add_argument(
        "--base-shares", nargs="+", type=finite, metavar="X", help="of tokens without adapter"
    )
    group.add_argument(
        "--popularities",
        nargs="+",
        metavar="NAME",
        help="of adapters among tokens: uniform, zipf, identical, distinct",
    )
    group.add_argument(
        "--expert-popularity", metavar="NAME", help="uniform (default), zipf, identical"
    )
    group.add_argument("--slots", type=int, metavar="N", help="to allocate; default: as adapters")
    group.add_argument(
        "--shared-a", action="store_true", help="gate and up share A, as in fused checkpoints"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and routing")
    group.add_argument("--draws", type=int, default=1, metavar="N", help="routings of each case")


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of ranks like 16 or 8,16"
        ) from None


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 if a row failed or gave a wrong result."""
    limit_spinning()

    import torch

    from vexpert.bench.header import describe

    for path in filter(None, (args.json, args.csv)):
        if not Path(path).parent.is_dir():
            raise ConfigError(f"{path!r}: its folder does not exist; make it first")
    device = find_device(args.device)
    cases = choose_cases(args, device.type == "cuda")
    bench = _bench(args, device)
    facts = describe(device) | {
        "dtype": str(bench.dtype).removeprefix("torch."),
        "backend": bench.backend.name,
        "method": bench.timer.method,
        "repeats": str(args.repeats),
        "bandwidth_tb_s": str(args.bandwidth),
        "overhead_us": f"{bench.timer.overhead:.1f}",
    }
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), flush=True)
    with torch.inference_mode():
        if args.compile_only:
            print(f"kernels compiled in {bench.compile_ahead(cases)} s")
            return 0
        return report(bench, cases, facts, args.json, args.csv)


def find_device(name: str | None) -> "torch.device":
    """The device of that name; None: a GPU if there is one. Raises ConfigError."""
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ConfigError(f"device={name!r}: no such device; use cuda or cpu") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: torch sees no GPU; use cpu")
    return device


def _bench(args: argparse.Namespace, device: "torch.device") -> "Bench":
    import torch

    from vexpert.bench.contenders import CLASSIC, DEFAULT
    from vexpert.bench.measure import Bench
    from vexpert.bench.timer import make_timer
    from vexpert.ops.backend import select_backend

    if args.bandwidth <= 0:
        raise ConfigError(f"bandwidth={args.bandwidth}: must be above 0")
    auto = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, auto if args.dtype == "auto" else args.dtype)
    return Bench(
        device,
        dtype,
        select_backend(args.lora_backend, device, dtype, args.kernel_plans, args.batch_invariant),
        make_timer(device, args.repeats),
        (*DEFAULT, CLASSIC) if args.classic else DEFAULT,
        args.bandwidth * 1e12,
    )


def choose_cases(args: argparse.Namespace, is_gpu: bool) -> "list[Case]":
    """The cases that the options describe. Raises ConfigError."""
    from vexpert.bench.cases import GRIDS, goal_cases, with_draws
    from vexpert.bench.claims import claim_cases

    names = ("shapes", "ranks", "adapters", "tokens", "base_shares", "popularities", "slots")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    preset = args.preset or ("full" if is_gpu else "small")
    fixed_rows = {"goals": goal_cases, "claims": claim_cases}
    if preset in fixed_rows:
        if given:
            raise ConfigError(f"preset={preset!r} has its own rows; leave out {', '.join(given)}")
        cases = fixed_rows[preset]()
    elif preset in GRIDS:
        cases = _grid_cases(GRIDS[preset], given)
    else:
        known = ", ".join((*GRIDS, *fixed_rows))
        raise ConfigError(f"preset={preset!r}: unknown; use one of {known}")
    more = {"expert_popularity": args.expert_popularity or "uniform", "shared_a": args.shared_a}
    cases = [dataclasses.replace(case, **more) for case in cases]
    return with_draws(cases, args.seed, args.draws)


def _grid_cases(grid: "Grid", given: dict[str, Any]) -> "list[Case]":
    from vexpert.bench.shapes import find_shape

    lists: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
    for shape in lists.get("shapes", ()):
        find_shape(shape)
    cases = dataclasses.replace(grid, **lists).cases()
    if not cases:
        raise ConfigError("no case: a single token always has an adapter; add base share 0")
    return cases


def report(
    bench: "Bench",
    cases: "Sequence[Case]",
    facts: dict[str, str],
    json_path: str | None = None,
    csv_path: str | None = None,
) -> int:
    """Print a line per row, the verdict and one JSON line; the exit code."""
    from vexpert.bench.claims import check_claims, claim_line, make_claims
    from vexpert.bench.contenders import CLASSIC
    from vexpert.bench.peers import SHAPE
    from vexpert.bench.table import columns, heading, line
    from vexpert.bench.verdict import verdict, verdict_lines

    shown = columns(CLASSIC in bench.contenders, any(case.shape == SHAPE for case in cases))
    seconds = bench.compile_ahead(cases)
    if seconds:
        print(f"kernels compiled in {seconds} s", flush=True)
    print(heading(shown), flush=True)
    rows: list[Row] = []
    for row in bench.rows(cases):
        rows.append(row)
        print(line(row, shown), flush=True)
        if json_path:
            Path(json_path).write_text(json.dumps(_result(facts, rows)) + "\n")
    counts, claims = verdict(rows), check_claims(make_claims(), rows)
    print("\n".join([*verdict_lines(rows), *map(claim_line, claims)]))
    if csv_path:
        _write_csv(Path(csv_path), facts, rows)
    print(json.dumps(_result(facts, rows) | counts | {"claims": claims}))
    return 1 if counts["failed"] else 0


def _result(facts: dict[str, str], rows: "Sequence[Row]") -> dict[str, Any]:
    """Facts of the run, and its rows with figures rounded to 4 digits after the point."""
    from vexpert.bench.header import stamp

    figures = [
        stamp(facts)
        | {
            k: round(v, 4) if isinstance(v, float) and abs(v) > 1 else v
            for k, v in r.figures().items()
        }
        for r in rows
    ]
    return {**facts, "results": figures}


def _write_csv(path: Path, facts: dict[str, str], rows: "Sequence[Row]") -> None:
    import csv

    from vexpert.bench.header import stamp

    figures = [stamp(facts) | row.figures() for row in rows]
    names = list(dict.fromkeys(name for row in figures for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(figures)
