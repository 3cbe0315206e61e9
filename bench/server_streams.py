"""The served demo over HTTP: one stream alone, 32 streams at once, 32 whole answers at once.

Starts `vexpert serve` of this checkout, or of `--root`, asks with one client process on the same
machine, and prints one JSON line. Each request makes 100 tokens of a random one of the five names.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

NAMES = ("vexpert-demo", "upper", "reverse", "sort", "shift")
TOKENS, AT_ONCE = 100, 32


def body(name: str, stream: bool) -> dict[str, Any]:
    options = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": stream}
    return {"model": name, "prompt": "abcdefgh", **options}


class Client:
    """Asks one server."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}/v1/completions"
        self.http = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=120)

    async def stream(self, name: str) -> list[float]:
        """When each piece came, seconds."""
        times = []
        async with self.http.stream("POST", self.url, json=body(name, True)) as response:
            response.raise_for_status()
            async for _ in response.aiter_raw():
                times.append(time.perf_counter())
        return times

    async def whole(self, name: str) -> None:
        (await self.http.post(self.url, json=body(name, False))).raise_for_status()

    async def alone(self, name: str, rounds: int) -> dict[str, float]:
        """Milliseconds to the first token and from token to token, medians."""
        first, between = [], []
        for _ in range(rounds):
            begun = time.perf_counter()
            times = await self.stream(name)
            first.append(times[0] - begun)
            between.append((times[-1] - times[0]) / (TOKENS - 1))
        return {
            "first_token_ms": round(1e3 * statistics.median(first), 2),
            "token_ms": round(1e3 * statistics.median(between), 3),
        }

    async def together(self, ask: Any, rounds: int) -> list[int]:
        """Tokens per second of each round, ascending."""
        rates = []
        for _ in range(rounds):
            begun = time.perf_counter()
            await asyncio.gather(*(ask(NAMES[i % len(NAMES)]) for i in range(AT_ONCE)))
            rates.append(round(AT_ONCE * TOKENS / (time.perf_counter() - begun)))
        return sorted(rates)


async def measure(url: str, rounds: int) -> dict[str, Any]:
    client = Client(url)
    for name in NAMES:  # compiles what is compiled at first use
        await client.stream(name)
    result: dict[str, Any] = {
        "base alone": await client.alone(NAMES[0], 3 * rounds),
        "adapter alone": await client.alone(NAMES[1], 3 * rounds),
        "32 streams, tokens/s": await client.together(client.stream, rounds),
        "32 whole answers, tokens/s": await client.together(client.whole, rounds),
    }
    await client.http.aclose()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    server = subprocess.Popen(
        [sys.executable, "-m", "vexpert", "serve", "--port", "0", "--disable-uvicorn-access-log"],
        env=os.environ | {"PYTHONPATH": str(args.root)},
        cwd=args.root,  # Python looks there first
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    try:
        url = server.stdout.readline().split()[2]
        print(json.dumps(asyncio.run(measure(url, args.rounds))))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
