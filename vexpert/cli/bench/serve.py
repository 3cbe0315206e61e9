"""`vexpert bench serve`: an open-loop client; requests start on schedule, ready or not."""

import argparse
import asyncio
import time
from math import inf
from typing import TYPE_CHECKING, Any

from vexpert.cli.bench.load import POPULARITIES, arrival_times, bodies, names_asked
from vexpert.cli.bench.plot import check_plot, draw
from vexpert.cli.bench.report import heading, json_line, row, summary
from vexpert.cli.parser import add_client_options
from vexpert.cli.progress import progress
from vexpert.config import shown
from vexpert.errors import ConfigError, VexpertError

if TYPE_CHECKING:
    from vexpert.cli.client import Client, Reply

LABELS = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `vexpert bench serve`."""
    add_client_options(parser, "measure")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="to ask; default: all")
    parser.add_argument(
        "--popularity", choices=POPULARITIES, default="uniform", help="how requests draw a model"
    )
    parser.add_argument("--num-prompts", type=int, default=100, metavar="N", help="requests")
    parser.add_argument("--input-len", type=int, default=32, metavar="N", help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=32, metavar="N", help="tokens to make")
    parser.add_argument(
        "--request-rate", type=float, default=float("inf"), metavar="X", help="per second, Poisson"
    )
    parser.add_argument("--plot", metavar="FILE", help="write a picture of the run, a PNG")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="if the server does not say")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and times")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 if a request failed."""
    for name in ("num_prompts", "input_len", "output_len", "request_rate"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"{name}={getattr(args, name)}: must be above 0")
    if args.plot:
        check_plot(args.plot)
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    from vexpert.cli.client import Client

    async with Client(args.url, args.api_key) as client:
        requests = _requests(args, await client.models())
        times = arrival_times(args.request_rate, args.num_prompts, args.seed)
        start = time.perf_counter()
        outcomes = await _send_all(client, requests, times)
        seconds = time.perf_counter() - start
    replies = [outcome for outcome in outcomes if not isinstance(outcome, VexpertError)]
    errors = [outcome for outcome in outcomes if isinstance(outcome, VexpertError)]
    result = measure(replies, len(errors), seconds, args.request_rate)
    result["popularity"] = args.popularity
    result["models"] = _by_model(requests, outcomes)
    print(block(result))
    if errors:
        print(f"first error: {errors[0]}")
    if args.plot and replies:
        rate = f"{args.request_rate:g} requests/s" if args.request_rate < inf else "all at once"
        names = f"{len(result['models'])} names, {args.popularity}"
        draw(replies, f"{len(replies)} requests, {rate}, {names}", args.plot)
        print(f"plot: {args.plot}")
    print(json_line(result))
    return 1 if errors else 0


def _requests(args: argparse.Namespace, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    vocab_size = args.vocab_size or entries[0].get("vocab_size")
    if not vocab_size:
        raise ConfigError("this server does not tell its vocabulary; give --vocab-size")
    known = [entry["id"] for entry in entries]
    names = args.models or known
    unknown = [name for name in names if name.removeprefix(f"{known[0]}:") not in known]
    if unknown:
        raise ConfigError(f"models={shown(unknown)}: the server knows {shown(known, 1000)}")
    asked = names_asked(names, args.popularity, args.num_prompts, args.seed)
    return bodies(asked, vocab_size, args.input_len, args.output_len, args.seed)


def _by_model(
    requests: list[dict[str, Any]], outcomes: "list[Reply | VexpertError]"
) -> dict[str, dict[str, float]]:
    """For each name: requests answered and failed, and its median and p99 time to first token."""
    found: dict[str, list[Any]] = {}
    for body, outcome in zip(requests, outcomes, strict=True):
        found.setdefault(body["model"], []).append(outcome)
    return {name: _model_row(found[name]) for name in sorted(found)}


def _model_row(outcomes: "list[Reply | VexpertError]") -> dict[str, float]:
    replies = [outcome for outcome in outcomes if not isinstance(outcome, VexpertError)]
    first = [reply.token_times[0] - reply.started for reply in replies if reply.token_times]
    times = summary("ttft", first)
    row = {"completed": len(replies), "failed": len(outcomes) - len(replies)}
    return row | {name: round(times[name], 3) for name in ("median_ttft_ms", "p99_ttft_ms")}


async def _send_all(
    client: "Client", requests: list[dict[str, Any]], times: list[float]
) -> "list[Reply | VexpertError]":
    """Send each request at its time, in seconds from now, however many are unanswered."""
    start = time.perf_counter()

    async def send(body: dict[str, Any], at: float) -> "Reply | VexpertError":
        await asyncio.sleep(start + at - time.perf_counter())
        try:
            return await client.stream("/v1/completions", body)
        except VexpertError as error:
            return error
        finally:
            done()

    with progress("requests", len(requests)) as done:
        return list(await asyncio.gather(*map(send, requests, times)))


def measure(
    replies: "list[Reply]", failed: int, seconds: float, request_rate: float
) -> dict[str, Any]:
    """All figures of a run that took `seconds`."""
    spoken = [reply for reply in replies if reply.token_times]
    times = {
        "ttft": [reply.token_times[0] - reply.started for reply in spoken],
        "tpot": [
            (reply.ended - reply.token_times[0]) / (reply.completion_tokens - 1)
            for reply in spoken
            if reply.completion_tokens > 1
        ],
        "itl": [
            later - earlier
            for reply in spoken
            for earlier, later in zip(reply.token_times, reply.token_times[1:], strict=False)
        ],
        "e2el": [reply.ended - reply.started for reply in replies],
    }
    inputs = sum(reply.prompt_tokens for reply in replies)
    outputs = sum(reply.completion_tokens for reply in replies)
    result: dict[str, Any] = {
        "completed": len(replies),
        "failed": failed,
        "request_rate": None if request_rate == float("inf") else request_rate,
        "duration": seconds,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(replies) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
    }
    for name, values in times.items():
        result |= summary(name, values)
    return result


def block(result: dict[str, Any]) -> str:
    """The familiar block."""
    rate = result["request_rate"]
    lines = [
        heading(" Serving Benchmark Result ", "="),
        row("Successful requests", result["completed"]),
        row("Failed requests", result["failed"]),
        *([row("Request rate configured (RPS)", rate)] if rate is not None else []),
        row("Benchmark duration (s)", result["duration"]),
        row("Total input tokens", result["total_input_tokens"]),
        row("Total generated tokens", result["total_output_tokens"]),
        row("Request throughput (req/s)", result["request_throughput"]),
        row("Output token throughput (tok/s)", result["output_throughput"]),
        row("Total token throughput (tok/s)", result["total_token_throughput"]),
    ]
    for name, (title, short) in LABELS.items():
        lines.append(heading(title, "-"))
        for kind in ("mean", "median", "p99"):
            lines.append(row(f"{kind.capitalize()} {short} (ms)", result[f"{kind}_{name}_ms"]))
    return "\n".join([*lines, "=" * len(lines[0])])
