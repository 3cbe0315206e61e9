"""`vexpert adapter {inspect,check}`: what an adapter is, and whether it is served right."""

import argparse
import dataclasses
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vexpert.cli.threads import limit_spinning
from vexpert.config import EngineConfig
from vexpert.demo import DEMO_NAME, find_model
from vexpert.log import quiet_libraries

if TYPE_CHECKING:
    from vexpert.engine.check import CheckReport
    from vexpert.lora.report import AdapterReport, ModuleRow

LAYOUTS = ("rank_major", "grouped_by_expert")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One parser for each action."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    inspect = actions.add_parser(
        "inspect",
        help="what is in the files, and what a model makes of it",
        description="What is in an adapter's files. Exit code 1: it would be refused.",
    )
    check = actions.add_parser(
        "check",
        help="compare the engine with merged weights",
        description="Run prompts through the engine and through merged weights. Exit code 1: "
        "they differ.",
    )
    for action in (inspect, check):
        action.add_argument("path", metavar="PATH", help="folder of the adapter")
        action.add_argument("--json", action="store_true", help="print one JSON object")
        action.add_argument(
            "--lora-B-layout",
            dest="lora_B_layout",
            choices=LAYOUTS,
            help="order of a fused lora_B's columns, where the file does not say",
        )
        action.add_argument("--dtype", default=None, choices=_choices("dtype"), help="of the model")
        action.add_argument("--trust-remote-code", action="store_true", help="run a model's code")
    inspect.add_argument(
        "--model",
        metavar="MODEL",
        help=f"folder or name; {DEMO_NAME}: the bundled demo; none: the files alone",
    )
    inspect.add_argument("--max-lora-rank", type=int, default=64, metavar="N", help="largest rank")
    check.add_argument(
        "--model", default="", metavar="MODEL", help="folder or name; none: the bundled demo"
    )
    check.add_argument("--device", default="auto", metavar="TEXT", help="auto, cpu, cuda or cuda:N")
    check.add_argument(
        "--tokenizer", default=None, metavar="TEXT", help="folder or name, if not the model's own"
    )
    check.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="repeatable; none: random"
    )


def _choices(name: str) -> tuple[str, ...]:
    spec = next(spec for spec in dataclasses.fields(EngineConfig) if spec.name == name)
    found: tuple[str, ...] = spec.metadata["choices"]
    return found


def run(args: argparse.Namespace) -> int:
    """Print the report; 0, or 1 where the adapter is refused or differs.

    Raises AdapterError where its folder is not there.
    """
    limit_spinning()  # before torch is imported
    _check_folder(args.path)
    options: dict[str, Any] = {
        "lora_B_layout": args.lora_B_layout,
        "trust_remote_code": args.trust_remote_code,
    }
    if args.dtype is not None:
        options["dtype"] = args.dtype
    return _inspect(args, options) if args.action == "inspect" else _check(args, options)


def _check_folder(path: str) -> None:
    from vexpert.lora.files import check_folder
    from vexpert.lora.source import check_path

    check_folder(check_path(path))


def _inspect(args: argparse.Namespace, options: dict[str, Any]) -> int:
    from vexpert.engine.inspect import inspect_adapter

    quiet_libraries()
    model = find_model(args.model) if args.model else None
    report = inspect_adapter(args.path, model, max_lora_rank=args.max_lora_rank, **options)
    _print(json.dumps(_plain(report)) if args.json else "\n".join(inspect_lines(report)))
    return int(report.is_refused)


def _check(args: argparse.Namespace, options: dict[str, Any]) -> int:
    from vexpert.engine.check import check_adapter

    quiet_libraries()

    options |= {"prompts": args.prompt or None, "device": args.device}
    if args.tokenizer is not None:
        options["tokenizer"] = args.tokenizer
    with _warnings_in_report():
        report = check_adapter(args.path, find_model(args.model), **options)
    facts = dataclasses.asdict(report) | {"verdict": report.verdict}
    _print(json.dumps(facts) if args.json else "\n".join(check_lines(report)))
    return int(not report.is_right)


@contextmanager
def _warnings_in_report() -> Iterator[None]:
    """Keep what a load warns of from being logged too: the report has it."""
    logger = logging.getLogger("vexpert.lora.host_tier")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _print(text: str) -> None:
    """Print, with escapes for what the terminal's encoding cannot hold: names in files are free."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def _plain(report: "AdapterReport") -> dict[str, Any]:
    """The report as JSON types."""
    facts = dataclasses.asdict(report)
    if report.config is not None:
        facts["config"]["fields"] = sorted(report.config.fields)
    return facts


def inspect_lines(report: "AdapterReport") -> list[str]:
    """The report for people."""
    lines = [f"adapter: {report.path}"]
    if report.config is not None:
        lines += [f"written by: {report.producer}", f"config: {_config_line(report)}"]
        lines.append(f"tensors: {report.file_bytes / 2**20:.2f} MiB")
        lines += _file_table(report)
    if report.model is not None and report.error is None:
        assert report.device_bytes is not None
        lines += ["", f"in {report.model}:", f"formats: {', '.join(report.formats)}"]
        lines += _module_table(report.modules)
        if report.extras:
            lines.append(f"beyond factors: {', '.join(report.extras)}")
        lines.append(f"device memory: {report.device_bytes / 2**20:.2f} MiB, rank {report.rank}")
    lines += [f"warning: {warning}" for warning in report.warnings]
    if report.error is not None:
        return [*lines, f"REFUSED: {report.error}"]
    return [*lines, "accepted" if report.model else "readable; --model says whether it fits"]


def _config_line(report: "AdapterReport") -> str:
    config = report.config
    assert config is not None
    flags = [name for name in ("use_rslora", "use_dora", "lora_bias") if getattr(config, name)]
    facts = [f"r={config.r}", f"lora_alpha={config.alpha:g}", *flags]
    for name in ("rank_pattern", "alpha_pattern"):
        if getattr(config, name):
            facts.append(f"{name} of {len(getattr(config, name))}")
    return ", ".join([*facts, *([f"lora_B_layout={config.layout}"] if config.layout else [])])


def _file_table(report: "AdapterReport") -> list[str]:
    rows: list[tuple[str, ...]] = [("module in the file", "part", "count", "shape", "dtype")]
    for row in report.files:
        shapes = " ".join(str(list(shape)) for shape in row.shapes[:3])
        more = " ..." if len(row.shapes) > 3 else ""
        rows.append((row.module, row.part, str(row.count), shapes + more, " ".join(row.dtypes)))
    return _table(rows)


def _module_table(modules: "tuple[ModuleRow, ...]") -> list[str]:
    """Rows that differ in their layer alone are one line."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for row in modules:
        name, layer = _without_layer(row.module)
        experts = f"{row.experts}" + (f", {row.shared} shared" if row.shared else "")
        facts = (
            f"{name}.{row.projection}".rstrip("."),
            str(row.rank),
            f"{row.scale:g}",
            f"{row.inputs} -> {row.outputs}",
            experts if row.experts else "",
        )
        groups.setdefault(facts, []).append(layer)
    rows: list[tuple[str, ...]] = [("module", "layers", "rank", "scale", "size", "experts")]
    rows += [
        (key[0], _spans(layers), key[1], key[2], key[3], key[4]) for key, layers in groups.items()
    ]
    return _table(rows)


def _without_layer(path: str) -> tuple[str, int]:
    """("model.layers.N.mlp", 3) of "model.layers.3.mlp"; layer -1: it has none."""
    found = re.search(r"(?<=\.)\d+(?=\.|$)", path)
    if found is None:
        return path, -1
    return f"{path[: found.start()]}N{path[found.end() :]}", int(found.group())


def _spans(numbers: list[int]) -> str:
    """ "0-3, 7" of 0, 1, 2, 3, 7."""
    spans: list[list[int]] = []
    for number in sorted(n for n in numbers if n >= 0):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def check_lines(report: "CheckReport") -> list[str]:
    """The report for people."""
    return [
        f"adapter: {report.path}",
        f"model: {report.model} in {report.dtype}",
        f"prompts: {report.prompts}, {report.tokens} tokens",
        f"largest difference of a log-prob to merged weights: {report.difference:.2e} "
        f"(median over places {report.median_difference:.2e}, tolerance {report.tolerance:g})",
        f"the same without the adapter: {report.base_difference:.2e}",
        f"largest change that the adapter makes: {report.effect:.2e}",
        *(f"warning: {warning}" for warning in report.warnings),
        f"verdict: {report.verdict}",
    ]
