"""The engine thread: one owner of the engine, failures told to all, a clean end."""

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from helpers_server import BASE, FakeEngine, RunningServer, wait_for

from vexpert.engine.sampling_params import SamplingParams
from vexpert.server.engine_thread import AsyncEngine
from vexpert.server.progress import EngineFailedError, Update
from vexpert.server.recorder import Recorder

pytest_plugins = ["helpers_server_fixtures"]
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


class Sink(list[Update | EngineFailedError]):
    """Collects what a request gets."""

    def __call__(self, update: Update | EngineFailedError) -> None:
        self.append(update)


async def submit(engine: AsyncEngine, request_id: str, **options: Any) -> Sink:
    sink = Sink()
    options = {"adapter": None, "every_step": True, "params": LONG, **options}
    await engine.add(request_id, "abc", [97, 98, 99], sink=sink, **options)
    return sink


async def until(condition: Any) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.005)


def test_steps_run_in_a_thread_of_their_own(fake: FakeEngine, fake_server: RunningServer) -> None:
    fake_server.ask(BASE, "hello")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    assert names[fake.step_thread] == "vexpert-engine"


def test_updates_are_copies_of_what_is_new(fake: FakeEngine) -> None:
    async def scenario() -> Sink:
        engine = AsyncEngine(fake, Recorder())
        engine.start()
        sink = await submit(engine, "a", params=SamplingParams(max_tokens=5, logprobs=1))
        await until(lambda: sink and isinstance(sink[-1], Update) and sink[-1].finished)
        await engine.stop()
        return sink

    deltas = [d for update in asyncio.run(scenario()) for d in update.deltas]
    assert "".join(d.text for d in deltas) == "abc"
    assert [token for d in deltas for token in d.token_ids] == [97, 98, 99, 0]
    assert all(len(d.logprobs) == len(d.token_ids) for d in deltas)
    assert [d.finish_reason for d in deltas] == [None, None, None, "stop"]


def test_a_whole_answer_is_one_update(fake: FakeEngine) -> None:
    async def scenario() -> Sink:
        engine = AsyncEngine(fake, Recorder())
        engine.start()
        sink = await submit(engine, "a", every_step=False)
        await until(lambda: sink)
        await engine.stop()
        return sink

    (update,) = asyncio.run(scenario())
    assert update.finished
    assert len(update.deltas[0].token_ids) == 200


def test_stop_fails_what_runs_and_ends_the_thread(fake: FakeEngine) -> None:
    fake.step_seconds = 0.01

    async def scenario() -> None:
        engine = AsyncEngine(fake, Recorder())
        engine.start()
        sink = await submit(engine, "a")
        await engine.stop()
        await asyncio.sleep(0)
        assert isinstance(sink[-1], EngineFailedError)
        with pytest.raises(EngineFailedError, match="shutting down"):
            await engine.stats()
        engine.abort("a")  # harmless

    asyncio.run(scenario())
    assert fake.requests == {}
    assert "vexpert-engine" not in [thread.name for thread in threading.enumerate()]


def test_a_cancelled_submission_is_aborted(fake: FakeEngine) -> None:
    fake.step_seconds = 0.05

    async def scenario() -> None:
        engine = AsyncEngine(fake, Recorder())
        engine.start()
        await submit(engine, "a")
        adding = asyncio.ensure_future(submit(engine, "b"))
        await asyncio.sleep(0.01)  # in the middle of a step
        adding.cancel()
        await until(lambda: "b" in fake.aborted or adding.done())
        await engine.stats()
        assert list(fake.requests) == ["a"]
        await engine.stop()

    asyncio.run(scenario())


def test_loading_an_adapter_does_not_stop_decoding(
    fake: FakeEngine, fake_server: RunningServer
) -> None:
    fake.load_seconds = 0.6
    body = {"lora_name": "late", "lora_path": "bundled"}
    loading = threading.Thread(target=fake_server.post, args=("/v1/load_lora_adapter",),
                               kwargs={"json": body})  # fmt: skip
    loading.start()
    time.sleep(0.1)
    start = time.monotonic()
    assert fake_server.ask("upper", "hello") == "HELLO"
    assert time.monotonic() - start < 0.4
    assert loading.is_alive()
    loading.join()
    assert fake_server.ask("late", "hello") == "hello"


def test_an_engine_failure_is_told_to_all_and_ends_service(
    fake: FakeEngine, fake_server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()
    fake_server.app.state.service.engine.on_failure = ended.set
    fake.step_seconds = 0.02
    body = {"model": BASE, "prompt": "x", "ignore_eos": True, "max_tokens": 200}
    answers: list[Any] = []
    waiting = threading.Thread(
        target=lambda: answers.append(fake_server.post("/v1/completions", json=body))
    )
    waiting.start()
    stream = body | {"stream": True}
    with fake_server.http.stream("POST", "/v1/completions", json=stream) as response:
        lines = response.iter_lines()
        next(lines)
        wait_for(lambda: len(fake.requests) == 2)
        fake.failure = RuntimeError("planted")
        events = [line.removeprefix("data: ") for line in lines if line]
    waiting.join()
    error = json.loads(events[-2])["error"]
    assert events[-1] == "[DONE]"
    assert error["type"] == "server_error"
    assert "planted" in error["message"]
    assert answers[0].status_code == 500
    assert "planted" in answers[0].json()["error"]["message"]
    assert ended.wait(5)
    assert fake_server.get("/health").status_code == 503
    assert fake_server.post("/v1/completions", json=body).status_code == 500
    assert "planted" in caplog.text


def test_an_error_outside_steps_fails_one_request_alone(
    fake: FakeEngine, fake_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> None:
        raise KeyError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(fake, "add_request", broken)
        body = {"model": BASE, "prompt": "x"}
        response = fake_server.post("/v1/completions", json=body)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
    assert fake_server.ask(BASE, "hello") == "hello"
