"""A watched folder with what goes wrong in it: one entry's fault is no other's."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers_wait import wait_for
from test_lora_dir import adapter
from test_lora_manager import make

from vexpert.lora.manager import AdapterManager
from vexpert.lora.types import AdapterRef
from vexpert.lora.watcher import Watcher

LEADS_NOWHERE = {"itself": "link", "no such folder": "nowhere", "no name of a file": "x" * 300}
NOT_NOW = {
    "too many open files": errno.EMFILE,
    "the disk": errno.EIO,
    "a network file system": errno.ESTALE,
}


def names(manager: AdapterManager) -> list[str]:
    return [info.name for info in manager.list()]


@pytest.fixture
def watcher(tmp_path: Path) -> Iterator[Watcher]:
    """Of a folder with the adapters a and team/b, which are served."""
    for seed, name in enumerate(("a", "team/b")):
        adapter(tmp_path / name, seed)
    manager = make()
    made = Watcher(manager, tmp_path)
    made.scan(is_first=True)
    yield made
    manager.check_integrity()


@pytest.mark.parametrize("target", LEADS_NOWHERE.values(), ids=LEADS_NOWHERE)
@pytest.mark.parametrize("place", [".", "team"])
def test_a_link_that_leads_nowhere_is_left_out_alone(
    tmp_path: Path, watcher: Watcher, target: str, place: str
) -> None:
    (tmp_path / place / "link").symlink_to(target)
    adapter(tmp_path / place / "new", 3)
    watcher.scan()
    watcher.scan()
    manager = watcher._manager()
    assert manager is not None
    assert names(manager) == sorted(["a", "team/b", os.path.normpath(f"{place}/new")])


@pytest.mark.parametrize("code", NOT_NOW.values(), ids=NOT_NOW)
@pytest.mark.parametrize("place", ["a", "team", "team/b"])
def test_a_folder_that_cannot_be_looked_at_is_kept_as_it_is(
    tmp_path: Path, watcher: Watcher, monkeypatch: pytest.MonkeyPatch, code: int, place: str
) -> None:
    scandir = os.scandir

    def fail(path: Path) -> object:
        if path == tmp_path / place:
            raise OSError(code, os.strerror(code))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    others = {"a": "team/b", "team": "a", "team/b": "a"}
    adapter(tmp_path / "new", 3)
    watcher.scan()
    watcher.scan()
    manager = watcher._manager()
    assert manager is not None
    assert names(manager) == ["a", "new", "team/b"]
    shutil.rmtree(tmp_path / others[place])  # which is known to be gone
    watcher.scan()
    assert others[place] not in names(manager)
    monkeypatch.setattr(os, "scandir", scandir)
    shutil.rmtree(tmp_path / place)
    watcher.scan()
    assert names(manager) == ["new"]


def test_a_file_replaced_while_it_is_listed_removes_no_adapter(
    tmp_path: Path, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer's own file, as it takes the place of the one before."""
    scandir, half = os.scandir, tmp_path / "a" / "half.safetensors"

    class Replaced:
        def __init__(self, path: Path) -> None:
            self.path = path

        def __enter__(self) -> list[os.DirEntry[str]]:
            with scandir(self.path) as entries:
                found = list(entries)
            if half.exists():
                os.replace(half, tmp_path / "a" / "adapter_model.safetensors")
            return found

        def __exit__(self, *_: object) -> None:
            return

    monkeypatch.setattr(os, "scandir", Replaced)
    half.write_text("other weights")
    manager = watcher._manager()
    assert manager is not None
    first = manager.resolve("a")
    watcher.scan()
    assert not half.exists()
    assert manager.resolve("a") == first
    watcher.scan()
    watcher.scan()
    assert manager.resolve("a").version > first.version


@pytest.mark.parametrize("by", ["unload", "replace"])
def test_a_removed_folder_whose_name_others_have_taken_meanwhile(
    tmp_path: Path, watcher: Watcher, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The name is unloaded, or loaded otherwise, in the very moment that its folder is missed."""
    manager = watcher._manager()
    assert manager is not None
    shutil.rmtree(tmp_path / "a")
    elsewhere = adapter(tmp_path.parent / "elsewhere", 7)

    def first(done: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            monkeypatch.undo()
            if by == "unload":
                manager.unload("a")
            else:
                manager.load("a", elsewhere, load_inplace=True)
            return done(*arguments)

        return call

    monkeypatch.setattr(manager, "unload_version", first(manager.unload_version))
    watcher.scan()
    assert names(manager) == (["team/b"] if by == "unload" else ["a", "team/b"])


def test_unloading_a_version_leaves_another_one_alone(tmp_path: Path) -> None:
    manager = make()
    old = manager.load("a", adapter(tmp_path / "a", 1))
    new = manager.load("a", tmp_path / "a", load_inplace=True)
    assert not manager.unload_version(AdapterRef("a", old.version))
    assert not manager.unload_version(AdapterRef("b", 1))
    assert manager.list() == [new]
    assert manager.unload_version(AdapterRef("a", new.version))
    assert manager.list() == []


def test_a_scan_that_fails_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make()
    manager.watch(str(tmp_path), 0.01)
    real, failed = Watcher.scan, []

    def fail(self: Watcher) -> None:
        failed.append(self)
        monkeypatch.setattr(Watcher, "scan", real)
        raise RuntimeError("what nobody thought of")

    monkeypatch.setattr(Watcher, "scan", fail)
    wait_for(lambda: bool(failed))
    adapter(tmp_path / "a", 1)
    wait_for(lambda: names(manager) == ["a"])
    assert "lora_dir: a look met an unexpected error; the next one follows" in caplog.text
    failed.clear()
