"""`vexpert bench KIND`."""

import argparse
import importlib

from vexpert.cli.examples import EXAMPLES, examples

KINDS = {
    "kernel": ("vexpert.cli.bench.kernel", "one MoE layer without and with LoRA, beside its floor"),
    "tune": ("vexpert.cli.bench.tune", "kernel plans for one MoE shape, measured on this GPU"),
    "throughput": ("vexpert.cli.bench.throughput", "tokens/s of a model in this process"),
    "serve": ("vexpert.cli.bench.serve", "latency and throughput of a running server"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One parser for each kind."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (module, help) in KINDS.items():
        epilog = examples(f"vexpert bench {name}", EXAMPLES[f"bench {name}"])
        kind = kinds.add_parser(name, help=help, description=help, epilog=epilog)
        importlib.import_module(module).add_arguments(kind)
        kind.set_defaults(bench=module)


def run(args: argparse.Namespace) -> int:
    """Run the chosen kind; the exit code."""
    return int(importlib.import_module(args.bench).run(args))
