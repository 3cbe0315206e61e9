"""A process that compiles a constraint before the engine's own process does.

The compiler meets some grammars with a crash and some expressions with hours of work. Here that
ends a process that nobody needs, and the request gets the reason.
"""

import base64
import json
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import IO, Any

import numpy as np

from vexpert.engine.grammar_cache import is_lazy, key_of
from vexpert.engine.structured_outputs import StructuredOutputs

START_SECONDS = 60
SECONDS = 10  # for one constraint
MAX_BYTES = 4 * 2**30  # of memory
WALKS, STEPS = 4, 64  # random texts that are tried, and tokens of each
REMEMBERED = 4096
MAX_WARNINGS = 65536  # bytes of them that are read
QUICK_SIZE = 256  # states: about half a second with a vocabulary of 100,000 tokens
POLL_SECONDS = 0.1  # between two looks at whether somebody waits still
NOT_WANTED = "nobody waits for it any more"
COMMAND = "from vexpert.engine.grammar_probe import main; main()"


def always() -> bool:
    """Somebody waits for the outcome."""
    return True


def needs_probe(wanted: StructuredOutputs) -> bool:
    """Whether compiling may take long, or the caller's own words reach the parser of grammars.

    A small constraint of the other kinds is one that vexpert has written itself.
    """
    return wanted.size > QUICK_SIZE


class Probe:
    """Asks one process, started at the first use and again after a crash. For any thread."""

    def __init__(self, pieces: list[bytes], eos_token_ids: tuple[int, ...]) -> None:
        words = [base64.b64encode(piece).decode() for piece in pieces]
        self._hello = json.dumps({"pieces": words, "eos": eos_token_ids}).encode() + b"\n"
        self._lock = threading.Lock()  # of the process
        self._noting = threading.Lock()  # of what has passed: a step must not wait for the process
        self._process: subprocess.Popen[bytes] | None = None
        self._passed: OrderedDict[str, float] = OrderedDict()  # seconds that it took

    def seconds(self, wanted: StructuredOutputs) -> float | None:
        """What compiling took, where `check` is done; it is then remembered for longer."""
        task = _task(wanted)
        with self._noting:
            if task in self._passed:
                self._passed.move_to_end(task)
            return self._passed.get(task)

    def check(self, wanted: StructuredOutputs, is_wanted: Callable[[], bool] = always) -> None:
        """Raise RequestError for a constraint that cannot be compiled in bounds.

        Also soon after `is_wanted` says that nobody waits for it.
        """
        if self.seconds(wanted) is not None:
            return
        with self._lock:
            if self.seconds(wanted) is not None:
                return
            answer = self._ask(_task(wanted), wanted, is_wanted)
        if isinstance(answer, str):
            raise wanted.refusal(f"{wanted.kind}: {answer}")
        with self._noting:
            self._passed[_task(wanted)] = answer
            if len(self._passed) > REMEMBERED:
                self._passed.popitem(last=False)

    def _ask(
        self, task: str, wanted: StructuredOutputs, is_wanted: Callable[[], bool]
    ) -> str | float:
        """The seconds it took, or why it cannot be."""
        if not is_wanted():
            return NOT_WANTED
        if self._process is not None and self._process.poll() is not None:
            self._end()  # while it had nothing to do: that tells nothing about this constraint
        process = self._process or self._start(wanted)
        answer = _exchange(process, task.encode() + b"\n", SECONDS, is_wanted)
        if answer is not None:
            return answer
        is_alive = process.poll() is None
        self._end()
        if not is_wanted():
            return NOT_WANTED
        if is_alive:
            return f"compiling takes more than {SECONDS} seconds; simplify it"
        return "the compiler cannot take it; simplify it, and leave out repetitions of itself"

    def _start(self, wanted: StructuredOutputs) -> "subprocess.Popen[bytes]":
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # until it keeps its own
            env=environment,
            start_new_session=True,  # a Ctrl-C is not for it
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        if _exchange(process, self._hello, START_SECONDS) != "ready":
            self._end()
            raise wanted.refusal(f"{wanted.kind}: the process that compiles did not start")
        return process

    def _end(self) -> None:
        self._finalizer()
        self._process = None


def _task(wanted: StructuredOutputs) -> str:
    """The line that asks for `wanted`."""
    return json.dumps([is_lazy(wanted), *key_of(wanted)])


def _exchange(
    process: "subprocess.Popen[bytes]",
    line: bytes,
    seconds: float,
    is_wanted: Callable[[], bool] = always,
) -> str | float | None:
    """Send a line and read one; None after `seconds`, unwanted, or when the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        process.wait()
        return None
    end = time.monotonic() + seconds
    while not select.select([process.stdout], [], [], min(POLL_SECONDS, seconds))[0]:
        if time.monotonic() >= end or not is_wanted():
            return None
    answer = process.stdout.readline()
    if not answer:
        process.wait()
        return None
    told: str | float = json.loads(answer)
    return told


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        _close(pipe)


def _close(pipe: IO[bytes] | None) -> None:
    try:
        if pipe is not None:
            pipe.close()
    except BrokenPipeError:
        pass  # what was not sent is of no use now


def main() -> None:
    """The process: vocabulary in, then a constraint a line; an answer for each."""
    from vexpert.engine.grammar import Compilers

    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    hello = json.loads(sys.stdin.readline())
    pieces = [base64.b64decode(word) for word in hello["pieces"]]
    compilers = Compilers(pieces, hello["eos"])
    warnings = _Warnings()
    _say("ready")
    for line in sys.stdin:
        signal.alarm(2 * SECONDS)  # ends the process even where nobody waits for it any more
        _say(_try(compilers, json.loads(line), len(pieces), warnings))
        signal.alarm(0)


def _try(compilers: Any, task: list[Any], vocab_size: int, warnings: "_Warnings") -> str | float:
    """The seconds that compiling takes, or what is wrong."""
    from vexpert.engine.grammar import cause, compile_text

    begun = time.monotonic()
    is_lazy, *key = task
    try:
        compiled = compile_text(compilers.get(is_lazy), *key)
        seconds = time.monotonic() - begun
        warning = warnings.take()
        walk(compiled, vocab_size)
    except (RuntimeError, ValueError, TypeError, MemoryError) as error:
        return cause(error)
    return warning or seconds


class _Warnings:
    """What the compiler writes to stderr: a warning tells what it would leave aside."""

    def __init__(self) -> None:
        file, path = tempfile.mkstemp()
        os.unlink(path)
        self._file = sys.stderr.fileno()
        os.dup2(file, self._file)
        os.close(file)

    def take(self) -> str:
        """The first since the last call, or nothing."""
        size = os.lseek(self._file, 0, os.SEEK_END)
        text = os.pread(self._file, min(size, MAX_WARNINGS), 0).decode("utf-8", "replace")
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        found = re.search(r"Warning: (.*)", text)
        return found[1][:300] if found else ""


def _say(answer: str | float) -> None:
    print(json.dumps(answer), flush=True)


def walk(compiled: Any, vocab_size: int) -> None:
    """Try random texts of a grammar: what crashes does so here, and masks are made."""
    import xgrammar

    rng = random.Random(0)
    mask = xgrammar.allocate_token_bitmask(1, vocab_size)
    for _ in range(WALKS):
        matcher = xgrammar.GrammarMatcher(compiled)
        for _ in range(STEPS):
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:vocab_size]
            allowed = np.flatnonzero(bits)  # a tensor's own ways take fifty times as long
            if not len(allowed) or not matcher.accept_token(int(rng.choice(allowed))):
                break
            if matcher.is_terminated():
                break
