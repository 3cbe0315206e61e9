"""Streams under load: what waits goes out as one event, and says the same."""

import asyncio
import json
import selectors
import time
from typing import Any

import pytest
from helpers_server import FakeEngine, RunningServer, right_answer

from vexpert.engine.detokenizer import Detokenizer
from vexpert.engine.outputs import Logprob
from vexpert.engine.sampling_params import SamplingParams
from vexpert.server.deltas import merge
from vexpert.server.events import EventWriter, event
from vexpert.server.generation import Generation, Job
from vexpert.server.pause import Pause
from vexpert.server.places import Places
from vexpert.server.progress import OBJECT_BYTES, Delta, EngineFailedError, Update
from vexpert.server.prompts import Prompt
from vexpert.server.protocol.chat import ChatCompletionRequest
from vexpert.server.protocol.completion import CompletionRequest
from vexpert.server.routes.chat import ChatFormatter
from vexpert.server.routes.completions import CompletionFormatter

pytest_plugins = ["helpers_server_fixtures"]
TEXTS = ["a", "", '"quoted" \\ back', "line\nbreak\r\n\t\x00\x1f\x7f", "é日本😀\u2028", "text "]


def gain(text: str, index: int = 0, reason: str | None = None, **fields: Any) -> Delta:
    return Delta(index, text, [7] * len(text), fields.get("logprobs"), reason, None)


def update(*deltas: Delta, finished: bool = False) -> Update:
    return Update(list(deltas), finished, 3, None)


def formatter(kind: str, **fields: Any) -> Any:
    if kind == "chat":
        messages = [{"role": "user", "content": "x"}]
        return ChatFormatter(
            ChatCompletionRequest(model="m", messages=messages, stream=True, **fields), "id"
        )
    body = CompletionRequest(model="m", prompt=["x", "y"], stream=True, **fields)
    prompts = [Prompt("x", [1]), Prompt("y", [2])]
    job = Job("id", prompts, [SamplingParams()] * 2, None, True)

    class Decoder:
        def decode(self, token_ids: list[int], **options: Any) -> str:
            return "?" * len(token_ids)

        def places(self, skip_special_tokens: bool, start: int = 0) -> Places:
            return Places(Detokenizer(self, skip_special_tokens), start)

    return CompletionFormatter(body, job, Decoder())  # type: ignore[arg-type]


def plainly(made: Any, i: int, given: Update) -> str:
    """Every chunk encoded as JSON."""
    blank = {"usage": None} if made.include_usage else {}
    return "".join(event(chunk | blank) for chunk in made.chunks(i, given))


@pytest.mark.parametrize("kind", ["chat", "text"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"stream_options": {"include_usage": True}}, {"n": 2}, {"logprobs": 1}, {"echo": True}],
    ids=str,
)
def test_events_are_those_of_the_chunks(
    kind: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "chat":
        fields = {k: True if k == "logprobs" else v for k, v in fields.items() if k != "echo"}
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    writer, reference = EventWriter(formatter(kind, **fields)), formatter(kind, **fields)
    rows = [{7: Logprob(-0.5, 1, "t")}] if "logprobs" in fields else None
    prompts = 2 if kind == "text" else 1
    for text in [*TEXTS, *TEXTS]:
        for i in range(prompts):
            many = None if rows is None else rows * len(text)
            deltas = [gain(text, k, logprobs=many) for k in range(fields.get("n", 1))]
            given = update(*deltas)
            assert writer.write(i, given) == plainly(reference, i, given)
    last = update(gain("z", 0, "stop", logprobs=rows), finished=True)
    assert writer.write(0, last) == plainly(reference, 0, last)
    assert '"finish_reason":"stop"' in plainly(reference, 0, last)


def test_merged_updates_say_what_each_said() -> None:
    row = {7: Logprob(-0.5, 1, "t")}
    first = update(gain("ab", 0, logprobs=[row, row]), gain("x", 1, logprobs=[row]))
    second = update(gain("c", 0, "stop", logprobs=[row]))
    third = update(gain("yz", 1, "length", logprobs=[row, row]), finished=True)
    assert merge([first]) is first
    merged = merge([first, second, third])
    assert merged.finished
    assert merged.deltas == [
        Delta(0, "abc", [7] * 3, [row] * 3, "stop", None),
        Delta(1, "xyz", [7] * 3, [row] * 3, "length", None),
    ]
    assert merged.size() == OBJECT_BYTES * 20  # two deltas, 6 tokens, 6 rows of one entry


class NoEngine:
    """Takes requests and remembers those that are aborted."""

    def __init__(self) -> None:
        self.sinks: list[Any] = []
        self.aborted: list[str] = []

    async def prepare(self, params: SamplingParams) -> None:
        return

    async def add(self, *arguments: Any, sink: Any, **options: Any) -> None:
        self.sinks.append(sink)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


def with_generation(work: Any) -> Any:
    async def run() -> Any:
        engine = NoEngine()
        prompts = [Prompt("x", [1]), Prompt("y", [2])]
        job = Job("id", prompts, [SamplingParams()] * 2, None, True)
        generation = await Generation.start(engine, job)  # type: ignore[arg-type]
        return await asyncio.wait_for(work(engine, generation), 60)

    return asyncio.run(run())


def test_a_burst_is_one_update_for_each_prompt() -> None:
    async def work(engine: NoEngine, generation: Generation) -> None:
        for text in "abc":
            engine.sinks[0](update(gain(text)))
            engine.sinks[1](update(gain(text.upper())))
        engine.sinks[1](update(gain("", 0, "stop"), finished=True))
        bursts = generation.bursts(None)
        burst = await anext(bursts)
        assert burst is not None
        assert [(i, each.deltas[0].text, each.finished) for i, each in burst] == [
            (0, "abc", False),
            (1, "ABC", True),
        ]
        asyncio.get_running_loop().call_later(0.05, engine.sinks[0], update(gain("d")))
        burst = await anext(bursts)
        assert burst is not None
        assert burst[0][1].deltas[0].text == "d"
        engine.sinks[0](update(gain("e")))
        engine.sinks[0](EngineFailedError("gone"))
        assert await anext(bursts) == [(0, update(gain("e")))]  # before the failure
        with pytest.raises(EngineFailedError):
            await anext(bursts)
        assert engine.aborted == ["id-0"]

    with_generation(work)


def test_a_burst_that_does_not_come_is_none() -> None:
    async def work(engine: NoEngine, generation: Generation) -> None:
        bursts = generation.bursts(0.05)
        began = time.monotonic()
        assert await anext(bursts) is None
        assert await anext(bursts) is None
        assert time.monotonic() - began > 0.09
        engine.sinks[0](update(gain("a")))
        assert await anext(bursts) is not None
        generation.close()

    with_generation(work)


class TimelessLoop(asyncio.SelectorEventLoop):
    """Its clock goes on where it would wait, and stands still elsewhere."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: TimelessLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        self._loop.jump(timeout or 0.0)
        return super().select(0)


def test_a_pause_looks_at_the_wait_of_the_moment() -> None:
    async def run() -> list[bool]:
        loop, pause, found = asyncio.get_running_loop(), Pause(), []
        for _ in range(4):  # each wait ends before its limit, together they take longer
            loop.call_later(4.0, pause.end)
            found.append(await pause.wait(10.0))
        found.append(await pause.wait(10.0))
        assert 25.9 < loop.time() < 26.1
        pause.end()  # nobody waits
        pause.close()
        return found

    with asyncio.Runner(loop_factory=TimelessLoop) as runner:
        assert runner.run(run()) == [True] * 4 + [False]


def test_a_cancelled_wait_leaves_the_next_one_alone() -> None:
    async def run() -> bool:
        pause = Pause()
        task = asyncio.ensure_future(pause.wait(60.0))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        asyncio.get_running_loop().call_soon(pause.end)
        found = await pause.wait(60.0)
        pause.close()
        return found

    assert asyncio.run(run())


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_server_behind_its_engine_sends_several_tokens_at_once(
    server: RunningServer, logprobs: int | None
) -> None:
    server.engine.held_at = 2
    word = "abcdefghijklmnopqrstuvwxyz" * 4
    body = {"model": "upper", "prompt": word, "temperature": 0, "stream": True, "max_tokens": 90}
    body |= {"logprobs": logprobs} if logprobs else {}
    text, tokens, events = "", 0, 0
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            text, events = text + choice["text"], events + 1
            tokens += len(choice["logprobs"]["tokens"]) if logprobs else 0
            if len(text) == 2:
                server.run(hold_up(server.engine))
    assert text == right_answer("upper", word)[:90]
    assert events < 10
    assert tokens == (90 if logprobs else 0)


async def hold_up(engine: FakeEngine) -> None:
    """The event loop does nothing else until the engine, held up to now, has no work left."""
    engine.held_at = None
    while engine.requests:
        time.sleep(0.005)
