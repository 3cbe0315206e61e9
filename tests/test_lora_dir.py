"""A watched folder: names come and go with its folders, and nothing is read before its use."""

import gc
import os
import shutil
import threading
import time
import weakref
from pathlib import Path

import pytest
from helpers_wait import wait_for
from test_lora_manager import acquire, assert_slot_is, make, reads

from vexpert.errors import AdapterNotFoundError, ConfigError
from vexpert.lora.watcher import Watcher


def adapter(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(str(seed))
    (folder / "adapter_model.safetensors").write_text("weights")
    return folder


def test_folders_become_names_and_are_read_at_their_first_use(tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "team/b", "team/c", ".hidden")):
        adapter(tmp_path / name, seed)
    (tmp_path / "no_adapter").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "adapter_config.json").write_text("1")
    manager = make()
    manager.watch(str(tmp_path), 60)
    assert [(info.name, info.state) for info in manager.list()] == [
        ("a", "registered"),
        ("team/b", "registered"),
        ("team/c", "registered"),
    ]
    assert reads(manager) == []
    ref = manager.resolve("team/b")
    manager.hold(ref)
    assert_slot_is(manager, acquire(manager, ref), 1)
    assert reads(manager) == ["b"]
    manager.check_integrity()


def test_a_new_folder_counts_once_it_is_still(tmp_path: Path) -> None:
    manager = make()
    watcher = Watcher(manager, tmp_path)
    adapter(tmp_path / "a", 1)
    watcher.scan()
    assert manager.list() == []
    (tmp_path / "a" / "adapter_model.safetensors").write_text("more weights")  # still copied
    watcher.scan()
    assert manager.list() == []
    watcher.scan()
    assert [info.name for info in manager.list()] == ["a"]


def test_a_removed_folder_drains_and_a_changed_one_is_a_new_version(tmp_path: Path) -> None:
    manager = make()
    watcher = Watcher(manager, tmp_path)
    adapter(tmp_path / "a", 1)
    watcher.scan(is_first=True)
    old = manager.resolve("a")
    manager.hold(old)
    slot = acquire(manager, old)
    adapter(tmp_path / "a", 22)
    watcher.scan()
    watcher.scan()
    new = manager.resolve("a")
    assert new.version > old.version
    manager.hold(new)
    assert_slot_is(manager, acquire(manager, new), 22)
    assert_slot_is(manager, slot, 1)  # the running request keeps what it began with
    shutil.rmtree(tmp_path / "a")
    watcher.scan()
    with pytest.raises(AdapterNotFoundError):
        manager.resolve("a")
    assert [info.state for info in manager.list()] == ["draining", "draining"]
    for ref in (old, new):
        manager.release(ref)
        manager.drop(ref)
    assert manager.list() == []
    manager.check_integrity()


def test_names_loaded_otherwise_are_left_alone(tmp_path: Path) -> None:
    manager = make()
    watcher = Watcher(manager, tmp_path / "dir")
    adapter(tmp_path / "dir" / "a", 1)
    adapter(tmp_path / "dir" / "b", 2)
    manager.load("a", adapter(tmp_path / "elsewhere", 9))
    watcher.scan(is_first=True)
    assert manager.list()[0].path == str(tmp_path / "elsewhere")
    manager.unload("b")
    watcher.scan()
    watcher.scan()
    assert [info.name for info in manager.list()] == ["a"]  # b stays unloaded until it changes
    shutil.rmtree(tmp_path / "dir" / "a")
    watcher.scan()
    assert [info.name for info in manager.list()] == ["a"]
    adapter(tmp_path / "dir" / "b", 33)
    watcher.scan()
    watcher.scan()
    assert [info.name for info in manager.list()] == ["a", "b"]


def test_an_unreadable_folder_changes_nothing(tmp_path: Path) -> None:
    manager = make()
    folder = tmp_path / "dir"
    watcher = Watcher(manager, folder)
    adapter(folder / "a", 1)
    watcher.scan(is_first=True)
    folder.rename(tmp_path / "away")  # a file system that is not mounted for a moment
    watcher.scan()
    assert [info.name for info in manager.list()] == ["a"]
    (tmp_path / "away").rename(folder)
    watcher.scan()
    assert [info.state for info in manager.list()] == ["registered"]


def test_a_name_that_no_adapter_may_have_is_skipped(tmp_path: Path) -> None:
    manager = make(reserved=("base",))
    adapter(tmp_path / "base", 1)
    adapter(tmp_path / "a", 1)
    manager.watch(str(tmp_path), 60)
    assert [info.name for info in manager.list()] == ["a"]
    with pytest.raises(ConfigError, match=r"lora_dir.*no such folder"):
        manager.watch(str(tmp_path / "nowhere"), 60)


def test_the_thread_sees_changes_and_ends_with_its_manager(tmp_path: Path) -> None:
    others = set(threading.enumerate())
    managers = [make()]
    managers[0].watch(str(tmp_path), 0.05)
    adapter(tmp_path / "a", 1)
    wait_for(lambda: len(managers[0].list()) == 1)
    shutil.rmtree(tmp_path / "a")
    wait_for(lambda: not managers[0].list())
    gone = weakref.ref(managers[0])
    threads = [t for t in set(threading.enumerate()) - others if t.name == "vexpert-lora-dir"]
    assert len(threads) == 1
    managers.clear()

    def ended() -> bool:
        gc.collect()
        return gone() is None and not any(thread.is_alive() for thread in threads)

    wait_for(ended)


def test_ten_thousand_folders_are_names_within_seconds(tmp_path: Path) -> None:
    source = adapter(tmp_path / "source", 7)
    folder = tmp_path / "dir"
    for index in range(10_000):
        (folder / f"a{index}").mkdir(parents=True)
        for name in os.listdir(source):
            os.link(source / name, folder / f"a{index}" / name)
    manager = make()
    watcher = Watcher(manager, folder)
    began = time.thread_time()  # others may hold this thread up
    watcher.scan(is_first=True)
    assert len(manager.list()) == 10_000
    assert reads(manager) == []
    assert time.thread_time() - began < 10  # seconds of the processor; it takes 1
