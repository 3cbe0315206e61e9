"""A name of `lora_dir` that others load and unload too: who has it, as a table of what happens."""

import logging
import os
import shutil
import threading
from pathlib import Path

import pytest
from helpers_wait import wait_for
from test_lora_dir import adapter
from test_lora_manager import make

from vexpert.errors import AdapterError, AdapterNotFoundError
from vexpert.lora.manager import AdapterManager
from vexpert.lora.watcher import Watcher


class World:
    """A folder that is watched, a manager, and what may happen to the name `x`."""

    def __init__(self, place: Path) -> None:
        self.place, self.seed = place, 0
        (place / "dir").mkdir()
        self.manager: AdapterManager = make()
        self.watcher = Watcher(self.manager, place / "dir")

    @property
    def folder(self) -> Path:
        return self.place / "dir" / "x"

    def put(self) -> None:
        """The folder appears, or its files change."""
        self.seed += 10 ** len(str(self.seed))  # another size too
        adapter(self.folder, self.seed)

    def remove(self) -> None:
        shutil.rmtree(self.folder)

    def load(self) -> None:
        self.manager.load("x", adapter(self.place / "elsewhere", 5))

    def inplace(self) -> None:
        self.manager.load("x", adapter(self.place / "elsewhere", 6), load_inplace=True)

    def again(self) -> None:
        """Loaded over the API from the very folder in lora_dir."""
        self.manager.load("x", self.folder, load_inplace=True)

    def refused(self) -> None:
        with pytest.raises(AdapterError):
            self.manager.load("x", adapter(self.place / "bad", -1), load_inplace=True)

    def unload(self) -> None:
        self.manager.unload("x")

    def scan(self) -> None:
        for _ in range(2):
            self.watcher.scan()

    def served(self) -> str:
        """Whose version the name means."""
        try:
            ref = self.manager.resolve("x")
        except AdapterNotFoundError:
            return "none"
        (path,) = [i.path for i in self.manager.list() if i.version == ref.version]
        return "dir" if path == str(self.folder) else "api"


# Words are methods of World; what stands behind "=" is what is served then.
SEQUENCES = [
    "put scan =dir",
    "put scan remove scan =none",
    # theirs first
    "load put scan =api unload =none scan =dir",
    "load put scan put scan =api unload scan =dir",
    "load put scan remove scan =api unload scan =none",
    "load unload put scan =dir",
    "load put scan unload load scan =api unload scan =dir",
    "load put scan unload scan =dir remove scan =none",
    "load put scan unload scan =dir put scan =dir",
    # theirs in place of the folder's
    "put scan inplace =api scan =api unload scan =dir",
    "put scan inplace unload scan =dir",
    "put scan inplace scan put scan =api unload scan =dir",
    "put scan inplace scan remove scan =api unload scan =none",
    "put scan inplace remove scan =api",
    "put scan inplace scan inplace scan unload scan =dir",
    "put scan inplace scan unload scan unload scan =none put scan =dir",
    # the folder's own is unloaded
    "put scan unload =none scan =none put scan =dir",
    "put scan unload scan remove scan put scan =dir",
    "put scan unload remove scan =none put scan =dir",
    "put scan unload scan load =api unload scan =none put scan =dir",
    "put scan unload load scan =api unload scan =none",
    "put scan unload load scan put scan =api unload scan =dir",
    "put scan unload scan again =dir unload scan =none put scan =dir",
    "put scan put scan unload scan =none",
    # a load that is refused changes nothing
    "put scan refused =dir scan =dir put scan =dir unload scan =none",
    "refused put scan =dir",
    # changed and taken between two scans
    "put scan put inplace scan =api unload scan =dir",
    "put scan put unload scan =dir",
]


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_who_has_a_name(tmp_path: Path, sequence: str) -> None:
    world = World(tmp_path)
    for word in sequence.split():
        if word.startswith("="):
            assert world.served() == word[1:], sequence
        else:
            getattr(world, word)()
    world.scan()
    newest = {info.version for info in world.manager.list()}
    world.scan()
    assert {info.version for info in world.manager.list()} == newest  # nothing flaps
    world.manager.check_integrity()


def test_what_is_served_is_what_the_folder_holds_now(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.put()
    world.scan()
    world.inplace()
    world.scan()
    world.put()
    world.scan()
    world.unload()
    world.scan()
    info = world.manager.load("y", world.folder)  # the same files
    assert info.name == "y"
    assert world.served() == "dir"
    (x,) = [info for info in world.manager.list() if info.name == "x"]
    assert x.state == "registered"
    world.manager.hold(world.manager.resolve("x"))
    wait_for(lambda: [i.state for i in world.manager.list() if i.name == "x"] == ["host"])


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_folder_that_comes_while_its_name_is_being_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool, is_known: bool
) -> None:
    world = World(tmp_path)
    if is_known:
        world.put()
        world.scan()
    begun, go = threading.Event(), threading.Event()
    loader = type(world.manager._host)
    real = loader._load

    def wait(self: object, version: object, allocate: object) -> object:
        begun.set()
        assert go.wait(60)
        return real(self, version, allocate)  # type: ignore[arg-type]

    monkeypatch.setattr(loader, "_load", wait)
    load = threading.Thread(target=world.refused if fails else world.inplace)
    load.start()
    assert begun.wait(60)
    world.put()
    world.scan()
    assert world.served() == ("dir" if is_known else "none")
    go.set()
    load.join(60)
    world.scan()
    assert world.served() == ("dir" if fails else "api")
    if not fails:
        world.unload()
        world.scan()
        assert world.served() == "dir"
    world.manager.check_integrity()


def test_the_log_says_who_has_a_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vexpert.lora.watcher")
    world = World(tmp_path)
    for word in ("put", "scan", "inplace", "scan", "scan", "unload", "scan", "unload", "scan"):
        getattr(world, word)()
    lines = [r.getMessage() for r in caplog.records if r.name == "vexpert.lora.watcher"]
    assert len(lines) == 2, lines
    assert "once that is unloaded, its folder is served" in lines[0]
    assert "x was unloaded; it is served again once its folder changes" in lines[1]


@pytest.mark.parametrize("target", [".", "..", "../dir", "absolute"])
def test_a_link_back_to_the_folder_doubles_no_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    world = World(tmp_path)
    world.put()
    adapter(tmp_path / "dir" / "team" / "y", 3)
    link = tmp_path / "dir" / "loop"
    link.symlink_to(tmp_path / "dir" if target == "absolute" else target)
    (tmp_path / "dir" / "team" / "loop").symlink_to("..")
    for _ in range(3):
        world.scan()
    assert [info.name for info in world.manager.list()] == ["team/y", "x"]
    assert caplog.text.count("leads back to the folder it is in") == 1
    assert str(link) in caplog.text


def test_links_to_adapters_are_names(tmp_path: Path) -> None:
    """As download caches, and `current` beside versions, have them."""
    world = World(tmp_path)
    world.put()
    (tmp_path / "dir" / "current").symlink_to("x")
    (tmp_path / "dir" / "far").symlink_to(adapter(tmp_path / "cache" / "far", 4))
    (tmp_path / "dir" / "team").symlink_to(adapter(tmp_path / "tenants" / "team" / "z", 5).parent)
    os.symlink(tmp_path / "nowhere", tmp_path / "dir" / "broken")
    world.scan()
    assert [info.name for info in world.manager.list()] == ["current", "far", "team/z", "x"]
