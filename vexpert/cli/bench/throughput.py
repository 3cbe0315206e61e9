"""`vexpert bench throughput`: tokens/s of base requests and of mixed adapters, in this process."""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vexpert.cli.bench.report import json_line
from vexpert.cli.parser import add_engine_options, engine_config
from vexpert.cli.progress import progress
from vexpert.cli.serve import add_lora_modules, resolve_model
from vexpert.cli.threads import limit_spinning
from vexpert.errors import ConfigError
from vexpert.log import quiet_libraries
from vexpert.server.interface import LoraModule

if TYPE_CHECKING:
    from vexpert import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `vexpert bench throughput`."""
    parser.add_argument(
        "model", nargs="?", default="", metavar="MODEL", help="default: the bundled demo"
    )
    group = parser.add_argument_group("benchmark")
    group.add_argument("--num-prompts", type=int, default=32, metavar="N", help="requests")
    group.add_argument("--input-len", type=int, default=32, metavar="N", help="prompt tokens")
    group.add_argument("--output-len", type=int, default=32, metavar="N", help="tokens to make")
    group.add_argument("--adapters", type=int, metavar="N", help="to mix; default: all given")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="the median counts")
    parser.usage = "vexpert bench throughput [MODEL] [options]"
    add_lora_modules(add_engine_options(parser)["lora"])


def run(args: argparse.Namespace) -> int:
    """Measure and print; the exit code."""
    for name in ("num_prompts", "input_len", "output_len", "repeats"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name}={getattr(args, name)}: must be at least 1")
    config, modules, _ = resolve_model(engine_config(args), args.lora_modules, [])
    modules = _chosen(modules, args.adapters)

    limit_spinning()

    import dataclasses

    from vexpert import LLM

    quiet_libraries()
    llm = LLM(**dataclasses.asdict(config))
    for module in modules:
        llm.load_adapter(module.name, module.path, lora_B_layout=module.lora_B_layout)
    base, mixed = _medians(args, llm, [module.name for module in modules])
    result = {
        "num_prompts": args.num_prompts,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "adapters": len(modules),
        "base_tokens_per_second": base,
    }
    print(f"base:  {base:.1f} generated tokens/s")
    if mixed is not None:
        share = mixed / base
        print(
            f"mixed: {mixed:.1f} generated tokens/s, {len(modules)} adapters, {share:.0%} of base"
        )
        result |= {"mixed_tokens_per_second": mixed, "mixed_share_of_base": share}
    print(json_line(result))
    return 0


def _chosen(modules: list[LoraModule], count: int | None) -> list[LoraModule]:
    if count is None:
        return modules
    if not 0 <= count <= len(modules):
        raise ConfigError(f"adapters={count}: {len(modules)} are given; see --lora-modules")
    return modules[:count]


def _prompts(args: argparse.Namespace, llm: "LLM") -> list[list[dict[str, Any]]]:
    """One list of random prompts for each run, so that no run finds the prefixes of another."""
    draw = random.Random(0)
    vocab_size = llm.engine.model_info.vocab_size

    def prompt() -> dict[str, Any]:
        return {"prompt_token_ids": [draw.randrange(vocab_size) for _ in range(args.input_len)]}

    return [[prompt() for _ in range(args.num_prompts)] for _ in range(2 * args.repeats)]


def _medians(args: argparse.Namespace, llm: "LLM", names: list[str]) -> tuple[float, float | None]:
    """Median generated tokens/s of the base rounds and, with `names`, of the mixed rounds.

    The two take turns, so that a slow phase of the machine hits both.
    """
    prompts = _prompts(args, llm)
    base, mixed = [], []
    with progress("rounds", args.repeats) as done:
        for _ in range(args.repeats):
            base.append(_tokens_per_second(args, llm, prompts.pop(), [None]))
            if names:
                mixed.append(_tokens_per_second(args, llm, prompts.pop(), names))
            done()
    return statistics.median(base), statistics.median(mixed) if mixed else None


def _tokens_per_second(
    args: argparse.Namespace, llm: "LLM", prompts: list[dict[str, Any]], names: Sequence[str | None]
) -> float:
    """Generated tokens/s of one run over `prompts`, the prompts' own time included."""
    from vexpert import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
    adapters = [names[i % len(names)] for i in range(args.num_prompts)]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, adapter=adapters)
    seconds = time.perf_counter() - start
    return sum(len(o.outputs[0].token_ids) for o in outputs) / seconds
