"""The fake engine in a thread and in a process, for what both must do alike."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from helpers_engine_thread import EngineThread
from helpers_fake_engine import NAMES, FakeEngine, FakeTokenizer

from vexpert.config import EngineConfig
from vexpert.engine.sampling_params import SamplingParams
from vexpert.errors import ModelError
from vexpert.server.engine_client import AsyncEngine
from vexpert.server.engine_process import EngineProcess
from vexpert.server.interface import EngineHost, LoraModule
from vexpert.server.progress import Failure, Update
from vexpert.server.recorder import Recorder

BUNDLED = [LoraModule(name, "bundled") for name in NAMES]


class TouchyEngine(FakeEngine):
    """Slow by request, and fails in ways that prompts name, so that it can do so in a process."""

    def add_request(self, *arguments: Any, **options: Any) -> None:
        prompt = arguments[1]
        if prompt == "fail this call":
            raise KeyError("planted")
        super().add_request(*arguments, **options)
        if prompt == "fail the engine":
            self.failure = RuntimeError("planted")
        if prompt == "hang":
            self.step_seconds = 3600

    def prepare(self, params: SamplingParams, is_wanted: Callable[[], bool]) -> None:
        if params.constraint is not None and params.constraint.text == "refused":
            raise params.constraint.refusal("regex: planted")


def build(config: EngineConfig, modules: Sequence[LoraModule], is_restart: bool) -> FakeEngine:
    """For a process; the model's name says what goes wrong."""
    if config.model == "refused":
        raise ModelError("refused: planted")
    if config.model == "broken":
        raise RuntimeError("planted")
    if config.model == "breaks later" and is_restart:
        raise RuntimeError("planted")
    if config.model.startswith("gate: ") and is_restart:
        wait_at(Path(config.model.removeprefix("gate: ")))
    engine = TouchyEngine(config)
    engine.step_seconds = 0.002
    for module in modules:
        engine.load_adapter(module.name, module.path, load_inplace=is_restart)
    return engine


def wait_at(folder: Path) -> None:
    """Say that the start has come so far, and go on once the test says so."""
    (folder / "begun").touch()
    while not (folder / "go").exists():
        time.sleep(0.005)


def tokenizer(config: EngineConfig) -> FakeTokenizer:
    return FakeTokenizer()


def process_of(model: str = "fake-model") -> EngineProcess:
    """A process that is not launched yet."""
    return EngineProcess(EngineConfig(model=model, max_num_seqs=64), build, tokenizer)


@contextlib.contextmanager
def thread_host() -> Iterator[EngineHost]:
    engine = TouchyEngine()
    engine.step_seconds = 0.002
    for name in NAMES:
        engine.load_adapter(name, "bundled")
    yield EngineThread(engine)


@contextlib.contextmanager
def process_host(model: str = "fake-model") -> Iterator[EngineProcess]:
    host = process_of(model)
    host.launch(BUNDLED)
    try:
        host.connect()
        yield host
    finally:
        host.close()


HOSTS: dict[str, Callable[[], Any]] = {"thread": thread_host, "process": process_host}


class Sink(list[Update | Failure]):
    """Collects what a request gets."""

    def __call__(self, update: Update | Failure) -> None:
        self.append(update)

    def text(self) -> str:
        return "".join(d.text for u in self if isinstance(u, Update) for d in u.deltas)


@contextlib.asynccontextmanager
async def started(host: EngineHost, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(host, Recorder(), **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def submit(engine: AsyncEngine, request_id: str, **options: Any) -> Sink:
    sink = Sink()
    # It lasts until a test ends it.
    long = SamplingParams(max_tokens=10**6, ignore_eos=True)
    given = {"adapter": None, "every_step": True, "params": long, "prompt": "abc", **options}
    prompt = given.pop("prompt")
    await engine.add(request_id, prompt, [ord(c) for c in prompt], sink=sink, **given)
    return sink


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.005)


def is_ended(sink: Sink) -> bool:
    return bool(sink) and (not isinstance(sink[-1], Update) or sink[-1].finished)
