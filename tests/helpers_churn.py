"""Hundreds of names for the demo's four adapters, and traffic that loads and drops them."""

import contextlib
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from helpers_demo import expected, random_words

from vexpert.demo import adapter_paths
from vexpert.engine.engine import Engine
from vexpert.engine.outputs import RequestOutput
from vexpert.engine.sampling_params import SamplingParams
from vexpert.errors import AdapterError, AdapterNotFoundError

STEPS_A_READ = 10
KINDS = ("upper", "reverse", "sort", "shift")


def link(kind: str, folder: Path) -> Path:
    """A folder of links to one of the demo's adapters; hard links would touch the files' ctime."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in adapter_paths()[kind].iterdir():
        (folder / file.name).symlink_to(file.resolve())
    return folder


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def opened() -> set[tuple[str, str]]:
    """What this process has open: descriptors, and what each is of.

    What is open later and not now has come since; the garbage of tests before may go meanwhile.
    """
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed by now, as that of the listing is
            found.add((descriptor, os.readlink(f"/proc/self/fd/{descriptor}")))
    return found


def vexpert_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("vexpert")]


@dataclass
class Ask:
    """A request of the churn and what its answer must be, by the version it began with."""

    name: str
    kind: str
    word: str
    started_step: int
    started: float  # seconds, monotonic
    answer: str | None = None


@dataclass
class Churn:
    """Runs an engine under traffic; `kinds` says what each name means now."""

    engine: Engine
    random: Random
    kinds: dict[str, str]
    folders: dict[str, Path]  # of each kind
    asks: dict[str, Ask] = field(default_factory=dict)  # under way
    done: list[Ask] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    longest_wait: int = 0  # steps from arrival to the end
    longest_seconds: float = 0.0  # the same
    most_passed: int = 0  # newer requests that took a slot while one was refused one
    steps: int = 0

    def __post_init__(self) -> None:
        self._ended = self._read_until = 0  # reads; and the step until which one may take
        self._names = list(self.kinds)
        self._weights = [1 / (rank + 1) for rank in range(len(self._names))]
        self._words = iter(random_words(100_000, seed=self.random.randint(0, 10**6)))

    def pick(self) -> str:
        """A name, by zipf."""
        return self.random.choices(self._names, self._weights)[0]

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def ask(self) -> None:
        name, word = self.pick(), next(self._words)
        kind = self.kinds.get(name)
        request_id = f"r{len(self.done)}-{self.steps}-{len(self.asks)}"
        tokens = self.engine.tokenizer.apply_chat_template(
            [{"role": "user", "content": word}], add_generation_prompt=True, tokenize=False
        )
        params = SamplingParams(temperature=0.0, max_tokens=16)
        ids = self.engine.tokenizer.encode(tokens, add_special_tokens=False)
        try:
            self.engine.add_request(request_id, None, ids, params, name)
        except AdapterNotFoundError:
            assert kind is None, f"{name} is loaded, and unknown"
            self.count("404")
            return
        assert kind is not None, f"{name} was unloaded, and answers"
        self.asks[request_id] = Ask(name, kind, word, self.steps, time.monotonic())

    def replace(self) -> None:
        """A new version of a name: another of the four; or none, where a load needs steps first."""
        name, kind = self.pick(), self.random.choice(KINDS)
        call = self.random.choice([self.engine.load_adapter, self.engine.register_adapter])
        try:
            call(name, str(self.folders[kind]), load_inplace=True)
        except AdapterError as error:
            if call != self.engine.load_adapter or "step the engine" not in str(error):
                raise
            self.count("full")
            return
        self.kinds[name] = kind
        self.count("reload")

    def unload(self) -> None:
        name = self.pick()
        if name in self.kinds:
            self.engine.unload_adapter(name)
            del self.kinds[name]
            self.count("unload")

    def abort(self) -> None:
        if self.asks:
            request_id = self.random.choice(list(self.asks))
            assert self.engine.abort(request_id)
            del self.asks[request_id]
            self.count("abort")

    def disconnect(self) -> None:
        """A client goes away with all its requests, in whatever state they are."""
        for _ in range(min(8, len(self.asks))):
            self.abort()
        self.count("disconnect")

    def step(self) -> None:
        self.steps += 1
        for output in self.engine.step():
            if output.finished:
                self._end(output)
        waiting = self.engine.scheduler.waiting
        self.most_passed = max([self.most_passed, *(each.times_passed for each in waiting)])

    def wait_for_reads(self) -> None:
        """After a step: where no read has ended in STEPS_A_READ of them, until one has.

        Waits that are counted in steps then do not depend on how long the machine holds up a read.
        """
        end = time.monotonic() + 60
        while (usage := self.engine.stats().adapters).loading and self._ended == usage.loads:
            if self.steps < self._read_until:
                return
            assert time.monotonic() < end, "waited for 60 s"
            time.sleep(0.001)
        self._ended, self._read_until = usage.loads, self.steps + STEPS_A_READ

    def _end(self, output: RequestOutput) -> None:
        ask = self.asks.pop(output.request_id)
        if output.error is not None:
            raise AdapterError(output.error)
        ask.answer = output.outputs[0].text
        self.done.append(ask)
        self.longest_wait = max(self.longest_wait, self.steps - ask.started_step)
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - ask.started)

    def wrong(self) -> list[Ask]:
        """Answers that are not the adapter's own."""
        return [ask for ask in self.done if ask.answer != expected(ask.kind, ask.word)]

    def mixed_up(self) -> list[Ask]:
        """Wrong answers that are exactly what another adapter, or the base, would have said."""
        others = (None, *KINDS)
        return [
            ask
            for ask in self.wrong()
            if any(ask.answer == expected(other, ask.word) for other in others)
        ]
