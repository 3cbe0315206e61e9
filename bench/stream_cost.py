"""What the server's process takes for a streamed token, and how many it can take a second.

`vexpert serve` with a fake engine, which makes a token of each of `--streams` requests at each
step, in a process of its own; the clients are `streams_client.py`'s. CPU time is that of the
server's process alone, user and system.

| row | steps a second |
|---|---|
| paced | `--rate`: few enough that each token goes out by itself |
| flooded | as many as the fake engine makes: what waits for a client goes out together |

The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from streams_client import ask_all

ROOT = Path(__file__).parents[1]
TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def measure(options: argparse.Namespace, rate: float, tokens: int) -> dict[str, Any]:
    """One server's life."""
    environment = {"PYTHONPATH": f"{options.root}:{options.root}/tests:{ROOT}/bench"}
    command = [sys.executable, str(ROOT / "bench" / "fake_server.py"), str(rate)]
    arguments = ["--port", "0", "--max-num-seqs", str(options.streams), "--no-web"]
    server = subprocess.Popen(
        [*command, "serve", *arguments, "--disable-uvicorn-access-log"],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=None if options.verbose else subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline().split()[2].rpartition(":")[2].strip("/"))
        body = {"prompt": "abcdefgh", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        bodies = [{"model": "vexpert-demo", "temperature": 0, **body}] * options.streams
        ask_all(port, "/v1/completions", [b | {"max_tokens": 4} for b in bodies], 16)
        before, began = cpu_seconds(server.pid), time.perf_counter()
        streams = ask_all(port, "/v1/completions", bodies, options.streams, options.clients)
        seconds = time.perf_counter() - began
        used = cpu_seconds(server.pid) - before
    finally:
        server.terminate()
        server.wait()
    assert all(stream.is_whole for stream in streams), [s.status for s in streams if not s.is_whole]
    begun = min(stream.event_times[0] for stream in streams)
    lasted = max(stream.event_times[-1] for stream in streams) - begun
    count = options.streams * tokens
    events = sum(len(stream.event_times) for stream in streams)
    return {
        "us a token": round(1e6 * used / count, 1),
        "tokens/s": round(count / lasted),
        "tokens an event": round(count / events, 2),
        "seconds": round(seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=150, help="of each stream, paced")
    parser.add_argument("--rate", type=float, default=25.0, help="steps a second, paced")
    parser.add_argument("--clients", type=int, default=1, help="processes that ask")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout to serve")
    parser.add_argument("--rows", nargs="+", default=["paced", "flooded"])
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    rows = {}
    for name in options.rows:
        rate, tokens = (options.rate, options.tokens) if name == "paced" else (0.0, 800)
        rows[name] = measure(options, rate, tokens)
        print(f"  {name:8s}", "  ".join(f"{k} {v}" for k, v in rows[name].items()), flush=True)
    print(json.dumps({"streams": options.streams, **rows}))


if __name__ == "__main__":
    main()
