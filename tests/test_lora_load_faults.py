"""Loads that are broken off, or that the system has no thread or process for, leave nothing."""

import gc
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from helpers_wait import wait_for
from test_lora_dir import adapter
from test_lora_lifecycle import Gate, adapter_bytes, register
from test_lora_manager import acquire, assert_slot_is, finish, folder, make, start, states

from vexpert.errors import AdapterError, AdapterGoneError
from vexpert.lora.adapter_version import Version
from vexpert.lora.loading import LoaderPool
from vexpert.lora.manager import AdapterManager
from vexpert.lora.types import AdapterInfo


@pytest.fixture
def manager() -> Iterator[AdapterManager]:
    made = make()
    yield made
    made.check_integrity()


@pytest.fixture
def gate(manager: AdapterManager) -> Iterator[Gate]:
    made = Gate(manager)
    yield made
    made.open.set()


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
def test_ctrl_c_in_a_load_changes_nothing(
    manager: AdapterManager,
    gate: Gate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_broken: bool,
    pinned: bool,
) -> None:
    first = manager.load("a", folder(tmp_path, "a", 1))
    gate.shut = {"b"}
    gate.faults = {"b": AdapterError("12 keys have no place")} if is_broken else {}

    def interrupt(version: Version, steps_go_on: Callable[[], bool]) -> None:
        wait_for(lambda: gate.inside >= {"b"})
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(manager._host, "wait", interrupt)
        for name in ("a", "b"):
            with pytest.raises(KeyboardInterrupt):
                manager.load(name, folder(tmp_path, "b", 2), load_inplace=True, pinned=pinned)
    assert manager.list() == [first]
    manager.check_integrity()
    gate.open.set()
    wait_for(lambda: manager.usage().loads + manager.usage().errors == 3)
    wait_for(lambda: manager.usage().host_adapters == 1)
    assert manager.list() == [first]
    gate.faults = {}
    assert manager.load("b", tmp_path / "b").state == "host"  # the name is free
    assert_slot_is(manager, start(manager, "a")[1], 1)


def test_a_load_waits_for_no_step_where_threads_are_stuck(
    manager: AdapterManager, gate: Gate, tmp_path: Path
) -> None:
    """An engine that has nothing to do makes none."""
    manager._host._threads._stuck_after = 0.2
    gate.shut = {"a", "b"}
    refs = register(manager, tmp_path, "ab")
    for ref in refs.values():
        manager.hold(ref)
    wait_for(lambda: gate.inside == {"a", "b"})
    assert manager.load("c", folder(tmp_path, "c", 2)).state == "host"
    for ref in refs.values():
        manager.drop(ref)


def test_no_thread_can_be_started_for_a_while(
    manager: AdapterManager,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refs = register(manager, tmp_path, "abc")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        for ref in refs.values():
            manager.hold(ref)
            manager.advance()
        assert set(states(manager).values()) == {"loading"}
    assert caplog.text.count("adapters wait for a thread that reads them: can't start") == 1
    for seed, name in enumerate("ab"):
        assert_slot_is(manager, acquire(manager, refs[name]), seed)
        finish(manager, refs[name])
    manager.drop(refs["c"])


def test_threads_that_could_not_be_started_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, done = LoaderPool(threads=1), list[object]()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        for _ in range(3):
            pool.submit(lambda: "read", lambda result, error: done.append(result))
    pool.tend()
    wait_for(lambda: done == ["read"] * 3)


def test_a_name_needs_no_process_that_would_read_it(
    manager: AdapterManager,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Full:
        def warm(self) -> None:
            raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(manager._host, "readers", Full())
        manager.register("a", folder(tmp_path, "a", 1))
        manager.watch(str(adapter(tmp_path / "dir" / "b", 2).parent), 60)
    assert set(states(manager).values()) == {"registered"}
    assert "can be started yet: [Errno 24] Too many open files" in caplog.text
    assert_slot_is(manager, start(manager, "b")[1], 2)
    manager.register("a", tmp_path / "a", load_inplace=True)  # nobody loads the name


def test_packed_tensors_are_their_givers_own_again(manager: AdapterManager) -> None:
    tensor = torch.ones(1)
    given = weakref.ref(tensor)
    manager.load("m", tensors={"x": tensor}, config={"seed": 5})
    del tensor
    gc.collect()
    assert given() is None
    assert_slot_is(manager, start(manager, "m")[1], 5)


def test_a_template_read_as_the_weights_have_come_is_of_the_same_files(
    manager: AdapterManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder(tmp_path, "a", 1)
    manager.register("a", place)
    real = manager._host._finish

    def change_first(*outcome: object) -> None:
        (place / "chat_template.jinja").write_text("another")
        assert manager.chat_template("a", may_read=True) is not None
        real(*outcome)  # type: ignore[arg-type]

    monkeypatch.setattr(manager._host, "_finish", change_first)
    ref = manager.resolve("a")
    manager.hold(ref)
    wait_for(lambda: states(manager) == {("a", ref.version): "errored"})
    with pytest.raises(AdapterGoneError, match="changed or vanished since"):
        manager.hold(ref)
    manager.drop(ref)


def test_an_unloaded_pinned_adapter_waits_for_no_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vexpert.lora.host_tier.RECHECK", 0.01)
    manager = make(lora_host_memory=adapter_bytes())
    refs = register(manager, tmp_path, "a")
    manager.hold(refs["a"])
    wait_for(lambda: manager.usage().host_adapters == 1)
    manager.register("b", folder(tmp_path, "b", 2), pinned=True)
    time.sleep(0.05)
    assert states(manager)["b", manager.resolve("b").version] == "loading"  # a is wanted there
    manager.unload("b")
    wait_for(lambda: [info.name for info in manager.list()] == ["a"])
    manager.drop(refs["a"])
    manager.check_integrity()


def test_a_served_adapter_waits_for_replaced_tensors_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer's versions, of which the one before still has requests, cost no other adapter."""
    monkeypatch.setattr("vexpert.lora.host_tier.RECHECK", 0.01)
    manager = make(lora_host_memory=2 * adapter_bytes())
    refs = register(manager, tmp_path, "a")
    manager.load("m", tensors={"x": torch.ones(1)}, config={"seed": 5})
    old = manager.hold_newest("m")
    manager.load("m", tensors={"x": torch.ones(1)}, config={"seed": 6}, load_inplace=True)
    manager.hold(refs["a"])
    time.sleep(0.05)
    assert states(manager)["a", refs["a"].version] == "loading"
    with pytest.raises(AdapterError, match="under adapters loaded from tensors"):
        manager.load("b", folder(tmp_path, "b", 2))  # whoever steps the engine may be waiting
    manager.drop(old)
    assert_slot_is(manager, acquire(manager, refs["a"]), 0)
    finish(manager, refs["a"])
    manager.check_integrity()


def is_interrupted(load: Callable[[], object], place: int) -> bool:
    """Call `load`, with Ctrl-C at one call of the interpreter, where signals come.

    False: there are no more before the load ends.
    """
    calls, is_ending = itertools.count(), False

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal is_ending
        file = frame.f_code.co_filename
        is_ending = is_ending or frame.f_code.co_name == "end_load"
        is_ours = "/vexpert/lora/" in file or file == threading.__file__
        is_place = is_ours and not is_ending and event in ("call", "c_return")
        if is_place and next(calls) == place:
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        load()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False


@pytest.mark.parametrize("is_lazy", [False, True])
def test_ctrl_c_at_any_call_of_a_load_keeps_no_lock_and_no_name(
    tmp_path: Path, is_lazy: bool
) -> None:
    path = folder(tmp_path, "a", 1)

    def is_interrupted_well(place: int) -> bool:
        manager, infos = make(), list[AdapterInfo]()
        first = manager.register if is_lazy else manager.load
        was_interrupted = is_interrupted(lambda: first("a", path), place)

        def load() -> None:
            infos.append(manager.load("a", path, load_inplace=True))

        again = threading.Thread(target=load, daemon=True)
        again.start()
        again.join(30)
        assert not again.is_alive(), f"a lock is kept: Ctrl-C at call {place}"
        assert infos, f"the name is kept: Ctrl-C at call {place}"
        wait_for(lambda: manager.usage().loading == 0)
        manager.check_integrity()
        return was_interrupted

    places = itertools.takewhile(is_interrupted_well, itertools.count())
    assert len(list(places)) > 5
