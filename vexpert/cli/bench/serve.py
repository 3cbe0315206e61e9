"""`vexpert bench serve`: an open-loop client; requests start on schedule, ready or not."""

import argparse
import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

from vexpert.cli.bench.report import heading, json_line, row, summary
from vexpert.cli.parser import add_client_options
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
    parser.add_argument("--models", nargs="+", metavar="NAME", help="drawn at random; default: all")
    parser.add_argument("--num-prompts", type=int, default=100, metavar="N", help="requests")
    parser.add_argument("--input-len", type=int, default=32, metavar="N", help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=32, metavar="N", help="tokens to make")
    parser.add_argument(
        "--request-rate", type=float, default=float("inf"), metavar="X", help="per second, Poisson"
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="if the server does not say")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and times")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 if no request succeeded."""
    for name in ("num_prompts", "input_len", "output_len", "request_rate"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"{name}={getattr(args, name)}: must be above 0")
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    from vexpert.cli.client import Client

    async with Client(args.url, args.api_key) as client:
        requests = _requests(args, await client.models())
        start = time.perf_counter()
        outcomes = await _send_all(client, requests, args)
        seconds = time.perf_counter() - start
    replies = [outcome for outcome in outcomes if not isinstance(outcome, VexpertError)]
    errors = [outcome for outcome in outcomes if isinstance(outcome, VexpertError)]
    result = measure(replies, len(errors), seconds, args.request_rate)
    print(block(result))
    if errors:
        print(f"first error: {errors[0]}")
    print(json_line(result))
    return 0 if replies else 1


def _requests(args: argparse.Namespace, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bodies with random token ids, so that lengths are exact and no prefix is shared."""
    names = args.models or [entry["id"] for entry in entries]
    vocab_size = args.vocab_size or entries[0].get("vocab_size")
    if not vocab_size:
        raise ConfigError("this server does not tell its vocabulary; give --vocab-size")
    draw = random.Random(args.seed)
    return [
        {
            "model": draw.choice(names),
            "prompt": [draw.randrange(vocab_size) for _ in range(args.input_len)],
            "max_tokens": args.output_len,
            "temperature": 0,
            "ignore_eos": True,
        }
        for _ in range(args.num_prompts)
    ]


async def _send_all(
    client: "Client", requests: list[dict[str, Any]], args: argparse.Namespace
) -> "list[Reply | VexpertError]":
    draw = random.Random(args.seed + 1)
    tasks = []
    for body in requests:
        tasks.append(asyncio.ensure_future(_send(client, body)))
        if args.request_rate != float("inf"):
            await asyncio.sleep(draw.expovariate(args.request_rate))
    return list(await asyncio.gather(*tasks))


async def _send(client: "Client", body: dict[str, Any]) -> "Reply | VexpertError":
    try:
        return await client.stream("/v1/completions", body)
    except VexpertError as error:
        return error


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
    lines = [
        heading(" Serving Benchmark Result ", "="),
        row("Successful requests", result["completed"]),
        row("Failed requests", result["failed"]),
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
