"""The engine behind the server: a thread and a process do the same, failures are told to all."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from helpers_engine_thread import EngineThread
from helpers_fake_engine import FakeEngine
from helpers_hosts import HOSTS, is_ended, process_host, started, submit, thread_host, until
from helpers_server import BASE, RunningServer
from helpers_wait import wait_for

from vexpert.engine.sampling_params import SamplingParams
from vexpert.errors import AdapterError, AdapterNotFoundError, ModelError, RequestError
from vexpert.server.engine_client import AsyncEngine
from vexpert.server.progress import (
    EngineCallError,
    EngineFailedError,
    ShuttingDownError,
)

pytest_plugins = ["helpers_server_fixtures"]
T = TypeVar("T")
Scenario = Callable[[AsyncEngine], Coroutine[Any, Any, T]]
Run = Callable[[Scenario[T]], T]


@pytest.fixture(scope="module", params=list(HOSTS))
def run(request: pytest.FixtureRequest) -> Iterator[Run[Any]]:
    """Runs a scenario with an engine of each host; those of a module share it."""
    with HOSTS[request.param]() as host, asyncio.Runner() as runner:
        context = started(host, max_queue_len=0)
        engine = runner.run(context.__aenter__())
        yield lambda scenario: runner.run(scenario(engine))
        runner.run(context.__aexit__(None, None, None))


def test_updates_are_what_is_new(run: Run[Any]) -> None:
    async def scenario(engine: AsyncEngine) -> Any:
        params = SamplingParams(max_tokens=5, logprobs=5, prompt_logprobs=1)
        sink = await submit(engine, "a", params=params, adapter="upper")
        await until(lambda: is_ended(sink))
        return sink

    updates = run(scenario)
    deltas = [d for update in updates for d in update.deltas]
    assert [d.text for d in deltas] == ["A", "B", "C", ""]
    assert [d.token_ids for d in deltas] == [[65], [66], [67], [0]]
    assert [d.finish_reason for d in deltas] == [None, None, None, "stop"]
    assert [update.finished for update in updates] == [False, False, False, True]
    [row] = deltas[0].logprobs or []
    assert list(row) == [65, 66, 67, 68, 69]
    assert (row[66].logprob, row[66].rank, row[66].decoded_token) == (-1.1, 2, "B")
    assert row[68].logprob == float("-inf")
    for update in updates:
        first, *others = update.prompt_logprobs or []
        assert first is None
        assert [list(other) for other in others] == [[98], [99]]
        assert update.num_cached_tokens == 3


def test_a_whole_answer_is_one_update(run: Run[Any]) -> None:
    async def scenario(engine: AsyncEngine) -> Any:
        params = SamplingParams(max_tokens=9, ignore_eos=True, n=2)
        adding = asyncio.ensure_future(submit(engine, "a", every_step=False, params=params))
        await asyncio.sleep(0)  # on its way
        assert engine.num_sequences == 2
        sink = await adding
        await until(lambda: sink)
        assert engine.num_sequences == 0
        return sink

    (update,) = run(scenario)
    assert update.finished
    assert [(d.index, d.text, d.finish_reason) for d in update.deltas] == [
        (0, "abc......", "length"),
        (1, "abc......", "length"),
    ]


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"params": SamplingParams(seed=13)}, RequestError, "superstitious"),
        ({"params": SamplingParams(stop_token_ids=[2**70])}, RequestError, "stop_token_ids"),
        ({"params": SamplingParams(logit_bias={-(2**70): 1})}, RequestError, "logit_bias"),
        ({"adapter": "nobody"}, AdapterNotFoundError, "nobody"),
        ({"adapter": "half \ud800"}, AdapterNotFoundError, "half"),
        ({"prompt": "fail this call"}, EngineCallError, "KeyError: 'planted'"),
        ({"params": SamplingParams(n=100)}, RequestError, "at most 64"),
    ],
)
def test_a_refusal_is_the_engines_own_error(
    run: Run[Any], options: dict[str, Any], error: type[Exception], told: str
) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        with pytest.raises(error, match=told) as caught:
            await submit(engine, "a", **options)
        assert type(caught.value) is error
        if isinstance(caught.value, RequestError):
            assert caught.value.param in ("seed", "stop_token_ids", "logit_bias", "n")
        assert engine.num_sequences == 0
        engine.abort("a")  # harmless
        sink = await submit(engine, "a", params=SamplingParams())
        await until(lambda: is_ended(sink))
        assert sink.text() == "abc"

    run(scenario)


def test_aborted_requests_say_no_more(run: Run[Any]) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        dropped, kept = await submit(engine, "a"), await submit(engine, "b")
        await until(lambda: dropped and kept)
        engine.abort("a")
        seen, before = len(dropped), len(kept)
        await until(lambda: len(kept) > before + 3)
        assert len(dropped) == seen
        assert engine.num_sequences == 1
        engine.cut("the server is shutting down")
        assert isinstance(kept[-1], ShuttingDownError)
        stats = await engine.stats()
        assert (stats.num_running, engine.num_sequences) == (0, 0)
        assert engine.recorder.requests["", "abort"] >= 2

    run(scenario)


def test_a_cancelled_submission_is_aborted(run: Run[Any]) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        adding = asyncio.ensure_future(submit(engine, "a"))
        await asyncio.sleep(0)  # on its way
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
        stats = await engine.stats()
        assert (stats.num_running, engine.num_sequences) == (0, 0)

    run(scenario)


def test_adapters_come_and_go(run: Run[Any]) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        info = await engine.load_adapter("new", "bundled", pinned=True, lazy=True)
        assert (info.name, info.path, info.state, info.warnings) == ("new", "bundled", "device", ())
        assert await engine.adapters_named(["nobody", "new"]) == [info]
        assert "new" in (await engine.some_adapter_names(9)).names
        assert await engine.adapter_folder("new") == "bundled"
        with pytest.raises(AdapterError, match="loaded already"):
            await engine.load_adapter("new", "bundled")
        with pytest.raises(AdapterError, match="adapter_config"):
            await engine.load_adapter("bad", "/no/such")
        await engine.unload_adapter("new", drain_seconds=1.0)
        assert await engine.adapter_folder("new") is None
        with pytest.raises(AdapterNotFoundError):
            await engine.unload_adapter("new")

    run(scenario)


def test_constraints_travel_as_they_are(run: Run[Any]) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        await engine.prepare(SamplingParams())
        schema = {"type": "integer", "default": 10**30}
        await engine.prepare(SamplingParams(structured_outputs={"json": schema}))
        wanted = SamplingParams(structured_outputs={"regex": "refused"})
        with pytest.raises(RequestError, match="structured_outputs: regex: planted") as caught:
            await engine.prepare(wanted)
        assert caught.value.param == "structured_outputs"

    run(scenario)


def test_statistics_and_integrity(run: Run[Any]) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        before = await engine.stats()
        sink = await submit(engine, "a", params=SamplingParams(), adapter="sort")
        await until(lambda: is_ended(sink))
        stats = await engine.stats()
        assert stats.generation_tokens - before.generation_tokens == 4
        assert stats.running_adapters == ()
        assert stats.kv_blocks_total == 100
        await engine.check_integrity()

    run(scenario)


@pytest.mark.parametrize("name", HOSTS)
def test_a_failed_engine_tells_all_and_is_not_started_again_without_leave(name: str) -> None:
    async def scenario(host: Any) -> None:
        failed = asyncio.Event()
        async with started(host) as engine:
            engine.on_failure = failed.set
            whole = await submit(engine, "a", every_step=False)
            stream = await submit(engine, "b", prompt="fail the engine")
            await until(lambda: is_ended(whole) and is_ended(stream))
            for sink in (whole, stream):
                assert isinstance(sink[-1], EngineFailedError)
                assert "RuntimeError: planted" in str(sink[-1])
            with pytest.raises(EngineFailedError, match="planted"):
                await engine.stats()
            await asyncio.wait_for(failed.wait(), 60)
            assert (engine.num_sequences, engine.is_restarting) == (0, False)
        with pytest.raises(EngineFailedError, match="shutting down"):
            await engine.stats()
        engine.abort("a")  # harmless

    with HOSTS[name]() as host:
        asyncio.run(scenario(host))


def test_stop_fails_what_runs_and_ends_the_thread() -> None:
    async def scenario(host: EngineThread) -> None:
        async with started(host) as engine:
            sink = await submit(engine, "a")
        assert isinstance(sink[-1], EngineFailedError)

    def engines() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "vexpert-engine"}

    before = engines()  # of hosts that other tests of the module share
    with thread_host() as host:
        asyncio.run(scenario(host))
        assert isinstance(host, EngineThread)
        assert isinstance(host.engine, FakeEngine)
        assert host.engine.requests == {}
    assert engines() <= before


@pytest.mark.parametrize(
    ("model", "error", "told"),
    [
        ("refused", ModelError, "^refused: planted$"),
        ("broken", EngineFailedError, "^the engine did not start: RuntimeError: planted$"),
    ],
)
def test_a_process_that_cannot_start_says_why(
    model: str, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told), process_host(model):
        pytest.fail("it started")


def test_a_killed_process_is_started_again_with_its_adapters_until_that_is_too_often() -> None:
    async def scenario(host: Any) -> None:
        failed = asyncio.Event()
        async with started(host, max_restarts=1) as engine:
            engine.on_failure = failed.set
            await engine.load_adapter("new", "bundled")
            await engine.unload_adapter("sort")
            sink = await submit(engine, "a")
            host.kill()
            await until(lambda: is_ended(sink))
            assert "by signal 9 (SIGKILL); it is started again" in str(sink[-1])
            assert engine.is_restarting
            with pytest.raises(EngineFailedError, match="SIGKILL"):
                await submit(engine, "b")
            await until(lambda: engine.failure is None)
            names = [info.name for info in (await engine.adapter_page(None, 9)).infos]
            assert names == ["new", "reverse", "shift", "upper"]
            sink = await submit(engine, "b", params=SamplingParams(), adapter="upper")
            await until(lambda: is_ended(sink))
            assert (sink.text(), engine.restarts) == ("ABC", 1)
            host.kill()
            await asyncio.wait_for(failed.wait(), 60)
            assert "the server ends" in str(engine.failure)

    with process_host() as host:
        asyncio.run(scenario(host))


def test_an_engine_that_does_not_start_again_is_given_up() -> None:
    async def scenario(host: Any) -> None:
        failed = asyncio.Event()
        async with started(host, max_restarts=1) as engine:
            engine.on_failure = failed.set
            host.kill()
            await asyncio.wait_for(failed.wait(), 60)
            assert "did not start: RuntimeError: planted; the server ends" in str(engine.failure)

    with process_host("breaks later") as host:
        asyncio.run(scenario(host))


def test_steps_run_in_a_thread_of_their_own(fake: FakeEngine, fake_server: RunningServer) -> None:
    fake_server.ask(BASE, "hello")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    assert names[fake.step_thread] == "vexpert-engine"


def test_loading_an_adapter_does_not_stop_decoding(
    fake: FakeEngine, fake_server: RunningServer
) -> None:
    go, begun = threading.Event(), threading.Event()
    fake.before_load["late"] = lambda: (begun.set(), go.wait(60))
    body = {"lora_name": "late", "lora_path": "bundled"}
    loading = threading.Thread(target=fake_server.post, args=("/v1/load_lora_adapter",),
                               kwargs={"json": body})  # fmt: skip
    loading.start()
    assert begun.wait(60)
    assert fake_server.ask("upper", "hello") == "HELLO"
    assert loading.is_alive()
    go.set()
    loading.join()
    assert fake_server.ask("late", "hello") == "hello"


def test_an_engine_failure_is_told_to_all_and_ends_service(
    fake: FakeEngine, fake_server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()
    fake_server.app.state.service.engine.on_failure = ended.set
    assert "vexpert:engine_answers 1.0" in fake_server.get("/metrics").text
    fake.held_at = 3  # both requests run until the engine fails
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
    assert (error["type"], error["code"]) == ("server_error", "engine_failed")
    assert "planted" in error["message"]
    assert answers[0].status_code == 503
    assert answers[0].headers["retry-after"]
    assert "planted" in answers[0].json()["error"]["message"]
    assert ended.wait(60)
    assert fake_server.get("/health").status_code == 503
    assert fake_server.get("/ready").status_code == 503
    assert fake_server.post("/v1/completions", json=body).status_code == 503
    page = fake_server.get("/metrics")
    assert page.status_code == 200
    assert "vexpert:engine_answers 0.0" in page.text
    assert "vllm:generation_tokens_total{model_name=" in page.text  # of the last time
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
        assert response.json()["error"]["message"] == "internal error: KeyError"
    assert fake_server.ask(BASE, "hello") == "hello"
