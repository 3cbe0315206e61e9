"""A request is of one version of its adapter, whatever is loaded while it arrives."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers_engine import FakeManager, FakeModel, FakeTokenizer, greedy
from helpers_server import RunningServer, make_fake_engine, serving
from test_lora_manager import folder, make

from vexpert.config import EngineConfig
from vexpert.engine.engine import Engine
from vexpert.errors import AdapterNotFoundError, AdapterReplacedError
from vexpert.lora.manager import AdapterManager


class BusyLock:
    """A manager's lock; whenever it becomes free, somebody else is there first."""

    def __init__(self, lock: Any, others: Callable[[], None]) -> None:
        self._lock, self._others = lock, others
        self._depth = 0
        self._is_theirs = False

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        is_free = self._depth == 0
        self._lock.release()
        if is_free and not self._is_theirs:
            self._is_theirs = True
            self._others()
            self._is_theirs = False


def engine_of(manager: AdapterManager) -> Engine:
    config = EngineConfig(block_size=4, kv_cache_memory=1 << 16, max_num_seqs=2)
    model = FakeModel(FakeManager())
    return Engine(config, model=model, tokenizer=FakeTokenizer(), adapters=manager)


def test_a_reload_as_a_request_arrives_loses_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make()
    path = folder(tmp_path, "a", 1)
    manager.load("a", path)
    engine = engine_of(manager)

    def reload() -> None:
        manager.load("a", path, load_inplace=True)

    with monkeypatch.context() as patch:
        patch.setattr(manager, "_lock", BusyLock(manager._lock, reload))
        engine.add_request("one", None, [5, 6, 7], greedy(), "a")
    assert [(info.version, info.requests) for info in manager.list()] == [(1, 1), (2, 0)]
    assert engine.abort("one")
    assert [(info.version, info.requests) for info in manager.list()] == [(2, 0)]
    engine.check_integrity()


def test_a_prompt_of_another_version_is_refused_and_holds_nothing(tmp_path: Path) -> None:
    manager = make()
    path = folder(tmp_path, "a", 1)
    (path / "chat_template.jinja").write_text("one")
    engine = engine_of(manager)
    unknown = engine.adapter_template("a")
    assert unknown is not None
    with pytest.raises(AdapterNotFoundError):
        engine.add_request("one", None, [5], greedy(), "a", unknown.version)
    for version, words in ((1, "one"), (2, "two")):
        (path / "chat_template.jinja").write_text(words)
        manager.load("a", path, load_inplace=True)
        found = engine.adapter_template("a")
        assert found is not None
        assert (found.text, found.version) == (words, version)
    for old in (unknown.version, 1):
        with pytest.raises(AdapterReplacedError, match=r"'a' was loaded anew.*send it again"):
            engine.add_request("one", None, [5], greedy(), "a", old)
        assert [info.requests for info in manager.list()] == [0]
        assert not engine.has_unfinished()
    engine.add_request("one", None, [5], greedy(), "a", 2)
    engine.add_request("any", None, [5], greedy(), "a")
    assert [(info.version, info.requests) for info in manager.list()] == [(2, 2)]
    assert engine.abort("one")
    assert engine.abort("any")
    engine.check_integrity()


def template_folder(tmp_path: Path, word: str) -> str:
    """An adapter whose every conversation asks for `word`; "": one without a template."""
    path = tmp_path / f"asks {word}"
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    if word:
        (path / "chat_template.jinja").write_text(f"<user>{word}")
    return str(path)


@dataclass
class Reloading:
    """A server that loads adapter `x` anew whenever a conversation has been rendered."""

    running: RunningServer
    then: list[Callable[[], Any]]  # what happens after each rendering, the next one first
    renderings: int = 0

    def chat(self, **fields: Any) -> Any:
        body = {"model": "x", "messages": [{"role": "user", "content": "said"}], **fields}
        return self.running.post("/v1/chat/completions", json=body)


@pytest.fixture
def reloading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reloading]:
    with serving(make_fake_engine()) as running:
        made = Reloading(running, [])
        prompts = running.app.state.service.prompts
        render = prompts.chat

        async def chat(*arguments: Any) -> Any:
            prompt = await render(*arguments)
            made.renderings += 1
            if made.then:
                made.then.pop(0)()
            return prompt

        monkeypatch.setattr(prompts, "chat", chat)
        yield made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("first", "second"), [("one", "two"), ("", "two"), ("one", "")])
def test_a_version_is_asked_through_its_own_template(
    tmp_path: Path, reloading: Reloading, first: str, second: str, stream: bool
) -> None:
    engine = reloading.running.engine
    old, new = (template_folder(tmp_path, word) for word in (first, second))
    engine.load_adapter("x", old)
    reloading.then = [lambda: engine.load_adapter("x", new, load_inplace=True)]
    assert reloading.chat(stream=stream).status_code == 200
    assert engine.prompts == [f"<user>{second}" if second else "<user>said\n<assistant>"]
    assert reloading.renderings == 2
    assert reloading.chat(stream=stream).status_code == 200  # nobody comes between
    assert reloading.renderings == 3


def test_an_adapter_that_comes_amid_a_rendering_is_asked_through_its_template(
    tmp_path: Path, reloading: Reloading
) -> None:
    engine = reloading.running.engine
    path = template_folder(tmp_path, "two")
    reloading.then = [lambda: engine.load_adapter("x", path)]
    assert reloading.chat().status_code == 200
    assert engine.prompts == ["<user>two"]
    engine.unload_adapter("x")
    assert reloading.chat().status_code == 404


def test_an_adapter_that_never_stays_is_a_503(tmp_path: Path, reloading: Reloading) -> None:
    engine = reloading.running.engine
    path = template_folder(tmp_path, "one")
    engine.load_adapter("x", path)
    reloading.then = [lambda: engine.load_adapter("x", path, load_inplace=True)] * 5
    answer = reloading.chat()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "adapter_replaced"
    assert (reloading.renderings, engine.prompts) == (3, [])
    body = {"model": "x", "prompt": "said"}  # no template: any version will do
    assert reloading.running.post("/v1/completions", json=body).status_code == 200
    assert reloading.chat(model="vexpert-demo").status_code == 200


def test_an_engine_that_was_started_again_numbers_versions_anew(
    tmp_path: Path, reloading: Reloading
) -> None:
    engine = reloading.running.engine
    engine.load_adapter("x", template_folder(tmp_path, "one"))
    client = reloading.running.app.state.service.engine
    reloading.then = [lambda: setattr(client._restarts, "count", 1)]
    assert reloading.chat().status_code == 200
    assert reloading.renderings == 2
