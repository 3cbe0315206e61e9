"""A request is of one version of its adapter, whatever is loaded while it arrives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers_engine import FakeManager, FakeModel, FakeTokenizer, greedy
from test_lora_manager import folder, make

from vexpert.config import EngineConfig
from vexpert.engine.engine import Engine
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
