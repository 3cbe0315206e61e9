"""What the log says where a name is unloaded."""

import logging
import shutil
from pathlib import Path

import pytest
from test_lora_dir import adapter
from test_lora_manager import folder, make

from vexpert.lora.manager import AdapterManager
from vexpert.lora.watcher import Watcher


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "vexpert")
    return caplog


def told(log: pytest.LogCaptureFixture) -> list[str]:
    """The lines since the last look."""
    lines = [record.getMessage() for record in log.records]
    log.clear()
    return lines


def held(manager: AdapterManager, name: str, requests: int) -> int:
    """The version of `name`, which so many requests use from now on."""
    return [manager.hold_newest(name) for _ in range(requests)][-1].version


def test_an_unload_is_told_with_its_version(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    manager = make()
    version = manager.load("a", folder(tmp_path, "a", 1)).version
    told(log)
    manager.unload("a")
    assert told(log) == [f"adapter a: version {version} unloaded"]


@pytest.mark.parametrize(
    ("requests", "seconds", "drains"),
    [
        (1, None, ", drains: 1 request to finish"),
        (3, None, ", drains: 3 requests to finish"),
        (3, 2.5, ", drains: 3 requests to finish within 2.5 s"),
        (1, 0, ", drains: 1 request to finish within 0 s"),
    ],
)
def test_a_version_that_drains_is_told_with_its_requests(
    requests: int,
    seconds: float | None,
    drains: str,
    tmp_path: Path,
    log: pytest.LogCaptureFixture,
) -> None:
    manager = make()
    manager.load("a", folder(tmp_path, "a", 1))
    version = held(manager, "a", requests)
    told(log)
    manager.unload("a", drain_seconds=seconds)
    assert told(log) == [f"adapter a: version {version} unloaded{drains}"]


def test_a_folder_that_is_removed_is_told_once(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    path = adapter(tmp_path / "a", 1)
    watcher = Watcher(make(), tmp_path)
    watcher.scan(is_first=True)
    told(log)
    shutil.rmtree(path)
    watcher.scan()
    assert told(log) == ["lora_dir: a was removed: its requests finish"]
