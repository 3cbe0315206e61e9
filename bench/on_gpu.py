"""All that a GPU alone can show, in one call that ends in time: tests and benchmarks as parts.

`python bench/on_gpu.py --output FOLDER --seconds 580 tests churn loads` runs these parts one after
another, from a source tree, each with a limit of its own and none beyond `--seconds`. A part that
runs out of time is interrupted, which most of them answer with what they have, and killed if that
does not help. FOLDER gets NAME.log of each; the table and the last line, which is JSON, say how
each part ended. `--list` shows the parts with their commands. Exit code: whether all ended with 0.

What many processes can compile is compiled first, in a part's time.
"""

import argparse
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
LEAST = 15.0  # seconds: with less left, a part is not begun
GRACE = 20.0  # seconds between the interrupt of a part and its end by force
CORES = os.cpu_count() or 1
Command = Sequence[str]


@dataclass(frozen=True)
class Part:
    """One command with its limit, and what is to be compiled before it."""

    limit: float  # seconds
    command: Command
    compile: list[Command] = field(default_factory=list)  # all at once


@dataclass(frozen=True)
class End:
    """How a part ended."""

    name: str
    how: str  # "0", another exit code, "out of time", "killed" or "not begun"
    seconds: float = 0.0


def script(name: str, arguments: str = "") -> Command:
    return sys.executable, f"bench/{name}.py", *arguments.split()


def vexpert(arguments: str) -> Command:
    return sys.executable, "-m", "vexpert", *arguments.split()


def gpu_tests() -> list[str]:
    """Files that have tests marked `gpu`: others may need packages that a GPU's machine lacks."""
    files = sorted(ROOT.glob("tests/test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "mark.gpu" in file.read_text()]


def tests(selection: str | None) -> Command:
    """What `selection` names as a command line does, or all GPU tests, slow ones first."""
    given = gpu_tests() if selection is None else shlex.split(selection)
    options = ("-m", "gpu", "-n", str(max(1, CORES - 2)), "-v", "--tb=short", "--maxfail=12")
    return sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", *given


def kernel(arguments: str, grid: str = "full") -> Part:
    """`vexpert bench kernel`; a preset's grid is compiled by one process a number of tokens."""
    sizes = 1, 8, 32, 128, 512, 4096
    first = f"bench kernel --preset {grid} --compile-only --tokens"
    return Part(200, vexpert(f"bench kernel {arguments}"), [vexpert(f"{first} {n}") for n in sizes])


THROUGHPUT = (
    "bench throughput --shape qwen3-30b-a3b-8l --num-prompts 1 8 32 128 --adapters 0 1 8 32 "
    "--max-num-seqs 128 --max-loras 32"
)
CHURN = "--device cuda --requests 100000"
SANITIZED = "plain-torch.bfloat16] or test_graph_replay_equals_eager and mixed"


def parts(selection: str | None = None) -> dict[str, Part]:
    sanitize = (
        sys.executable, "-m", "pytest", "-m", "gpu", "-q", "tests/test_ops_gpu.py", "-k",
        SANITIZED, "-p", "no:cacheprovider", "--timeout=0",
    )  # fmt: skip
    checked = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
    return {
        "tests": Part(330, tests(selection)),
        # Traffic meets kernels for ranks that no warm-up knows: they are compiled before it counts.
        "churn": Part(
            150,
            script("churn", f"{CHURN} --seconds 45"),
            [script("churn", f"{CHURN} --seconds 30 --seed {seed}") for seed in range(1, 9)],
        ),
        "loads": Part(120, script("steps_beside_loads", "--seconds 90")),
        "load": Part(60, script("adapter_load", "--rounds 3")),
        "layers": Part(120, script("prefill", "whole")),
        "replays": Part(60, script("prefill", "whole --check")),
        "readers": Part(120, script("prefill", "parts --budget 90")),
        "throughput": Part(160, vexpert(f"{THROUGHPUT} --prefill 16x512 1x2048 1x512 --repeats 3")),
        "whole-model": Part(
            170,
            vexpert(
                "bench throughput --shape qwen3-30b-a3b --num-prompts 1 8 32 128 --adapters 0 1 8 "
                "--prefill 16x512 1x2048 --max-num-seqs 128 --max-loras 8 --repeats 1"
            ),
        ),
        "streams": Part(150, script("streams_of_a_model", "--adapters 32 --streams 256")),
        "goals": kernel("--preset goals"),
        "claims": kernel("--preset claims --draws 2"),
        "grid": kernel("--preset full"),
        "shapes": kernel("--preset shapes", "shapes"),
        "classic": Part(
            60, vexpert("bench kernel --ranks 16 --adapters 32 --tokens 128 --classic")
        ),
        "invariant": Part(
            120,
            vexpert(
                "bench throughput --shape qwen3-30b-a3b-8l --num-prompts 1 8 32 --adapters 0 8 "
                "--prefill 16x512 --max-num-seqs 32 --max-loras 8 --repeats 1 --batch-invariant"
            ),
        ),
        "profile": Part(60, script("decode_step", "--kernels 1 128")),
        "attention": Part(60, script("attention")),
        "head": Part(40, script("lm_head")),
        "sanitize": Part(240, (*checked, *sanitize), [sanitize]),
    }


def environment() -> dict[str, str]:
    """Of the parts: the source tree before what is installed, and output as it is written."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def begin(command: Command, log: IO[str]) -> subprocess.Popen[str]:
    """In a process group of its own: what it starts ends with it."""
    log.write(f"$ {shlex.join(command)}\n")
    log.flush()
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT, text=True,
        process_group=0,
    )  # fmt: skip


def send(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """To the whole group, of which the leader may have ended before the others."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def finish(process: subprocess.Popen[str], seconds: float, grace: float = GRACE) -> str:
    """Waits so long at most, `grace` more after an interrupt, then kills; how it ended."""
    try:
        return str(process.wait(max(0.0, seconds)))
    except subprocess.TimeoutExpired:
        send(process, signal.SIGINT)
    try:
        process.wait(grace)
        return "out of time"
    except subprocess.TimeoutExpired:
        return "killed"
    finally:
        send(process, signal.SIGKILL)
        process.wait()


def run_part(name: str, part: Part, seconds: float, folder: Path) -> End:
    """Within so many seconds, its grace among them."""
    began = time.monotonic()
    limit = min(part.limit, seconds - GRACE)
    with (folder / f"{name}.log").open("w") as log:
        compiling = [begin(command, log) for command in part.compile]
        for process in compiling:
            if (how := finish(process, limit - (time.monotonic() - began), 1.0)) != "0":
                log.write(f"compiling: {how}\n")
        process = begin(part.command, log)
        try:
            how = finish(process, limit - (time.monotonic() - began))
        except BaseException:
            send(process, signal.SIGKILL)
            raise
    return End(name, how, round(time.monotonic() - began, 1))


def run_parts(chosen: dict[str, Part], seconds: float, folder: Path) -> Iterator[End]:
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for name, part in chosen.items():
        left = seconds - (time.monotonic() - began)
        yield (
            run_part(name, part, left, folder) if left >= LEAST + GRACE else End(name, "not begun")
        )


def last_lines(log: Path, count: int = 16, width: int = 160) -> list[str]:
    """What a log ends with, its lines shortened: verdicts, and the names of tests that failed."""
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    return [re.sub(r"\s+", " ", line)[:width] for line in lines[-count:]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *parts()], metavar="PART")
    parser.add_argument("--output", type=Path, default=Path("on_gpu"))
    parser.add_argument("--seconds", type=float, default=580.0, help="in all")
    parser.add_argument("--tests", help="what pytest is given instead of all GPU tests' files")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def main() -> int:
    options = parse()
    known = parts(options.tests)
    if options.list or not options.parts:
        for name, part in known.items():
            print(f"{name:12} {part.limit:4.0f} s  {shlex.join(part.command)}")
        return 0
    ends = []
    for end in run_parts({name: known[name] for name in options.parts}, options.seconds,
                         options.output):  # fmt: skip
        ends.append(end)
        log = options.output / f"{end.name}.log"
        print(f"== {end.name}: {end.how}, {end.seconds} s", flush=True)
        for line in last_lines(log) if log.exists() and end.how != "not begun" else ():
            print(f"   {line}", flush=True)
    print(json.dumps({"machine": platform.machine(), "ends": {e.name: e.how for e in ends}}))
    return 0 if all(end.how == "0" for end in ends) else 1


if __name__ == "__main__":
    sys.exit(main())
