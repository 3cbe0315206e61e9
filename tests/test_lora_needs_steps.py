"""Whether reads that wait for room go on without steps, seen from a load that makes none."""

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers_wait import wait_for
from test_lora_lifecycle import PACE, Gate, adapter_bytes, register
from test_lora_load_faults import is_interrupted
from test_lora_manager import acquire, assert_slot_is, finish, folder, make, states

from vexpert.errors import AdapterError
from vexpert.lora.adapter_version import Version
from vexpert.lora.loading import LoaderPool
from vexpert.lora.manager import AdapterManager
from vexpert.lora.types import AdapterRef, Wait

FULL = "step the engine, then load it again"


class Load(threading.Thread):
    """A load in a thread of its own; without steps, as if by the thread that would step."""

    def __init__(
        self, manager: AdapterManager, tmp_path: Path, name: str, steps_go_on: bool = False
    ) -> None:
        super().__init__(daemon=True)
        self._path = tmp_path / name
        if not self._path.exists():  # a load that was broken off may still read it
            folder(tmp_path, name, seed=ord(name) - ord("a"))
        self._manager, self._steps_go_on = manager, steps_go_on
        self.result = ""
        self.start()

    def run(self) -> None:
        try:
            info = self._manager.load(
                self._path.name, self._path, steps_go_on=lambda: self._steps_go_on
            )
            self.result = info.state
        except AdapterError as error:
            self.result = str(error)

    def end(self) -> str:
        self.join(60)
        assert not self.is_alive(), "it waits for more than a minute"
        return self.result

    def waits(self) -> bool:
        """Whether it has not ended after many looks."""
        self.join(0.2)
        return self.is_alive()


def held(manager: AdapterManager, tmp_path: Path, names: str) -> dict[str, AdapterRef]:
    """`names`, of which each is read for a request that has no slot."""
    refs = register(manager, tmp_path, names)
    for ref in refs.values():
        manager.hold(ref)
    return refs


def full(tmp_path: Path, copies: int = 1) -> tuple[AdapterManager, AdapterRef]:
    """Host memory for `copies`; `a` is held there."""
    manager = make(lora_host_memory=copies * adapter_bytes())
    ref = held(manager, tmp_path, "a")["a"]
    wait_for(lambda: manager.usage().host_adapters == manager.usage().loads == 1)
    return manager, ref


@pytest.fixture
def opened() -> Iterator[Callable[[AdapterManager], Gate]]:
    gates: list[Gate] = []

    def at(manager: AdapterManager) -> Gate:
        gates.append(Gate(manager))
        return gates[-1]

    yield at
    for gate in gates:
        gate.open.set()


@pytest.mark.parametrize("is_broken", [False, True])
def test_files_that_are_read_are_waited_for(
    tmp_path: Path, opened: Callable[[AdapterManager], Gate], is_broken: bool
) -> None:
    manager, ref = full(tmp_path)
    gate = opened(manager)
    gate.shut = {"b"}
    gate.faults = {"b": AdapterError("12 keys have no place")} if is_broken else {}
    other = Load(manager, tmp_path, "b", steps_go_on=True)
    wait_for(lambda: gate.inside == {"b"})
    load = Load(manager, tmp_path, "c")
    assert load.waits()  # it cannot know what comes of b
    gate.open.set()
    assert FULL in load.end()  # b holds nothing that would have been room
    manager.check_integrity()
    manager.drop(ref)
    assert ("no place" if is_broken else "host") in other.end()
    assert Load(manager, tmp_path, "c").end() == "host"
    manager.check_integrity()


def test_readers_that_read_files_are_waited_for(
    tmp_path: Path, opened: Callable[[AdapterManager], Gate]
) -> None:
    manager, _ = full(tmp_path, copies=2)
    gate = opened(manager)
    gate.shut = {"b", "c"}
    others = [Load(manager, tmp_path, name, steps_go_on=True) for name in "bc"]
    wait_for(lambda: gate.inside == {"b", "c"})
    load = Load(manager, tmp_path, "d")
    assert load.waits()
    gate.open.set()
    assert [each.end() for each in (*others, load)] == ["host"] * 3
    assert manager.usage().host_adapters == 2
    manager.check_integrity()


def test_a_copy_that_another_load_has_just_made_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread lets go of it when it runs next."""
    manager, _ = full(tmp_path, copies=2)
    wait, go = manager._host.wait, threading.Event()

    def wait_long(version: Version, steps_go_on: Callable[[], bool]) -> None:
        wait(version, steps_go_on)
        if version.ref.name == "b":
            assert go.wait(60)

    monkeypatch.setattr(manager._host, "wait", wait_long)
    other = Load(manager, tmp_path, "b")
    wait_for(lambda: manager.usage().loads == 2)
    load = Load(manager, tmp_path, "c")
    assert load.waits()
    go.set()
    assert (other.end(), load.end()) == ("host", "host")
    assert {name: state for (name, _), state in states(manager).items()} == {
        "a": "host",
        "b": "registered",
        "c": "host",
    }
    manager.check_integrity()


@pytest.mark.parametrize("pinned", [False, True])
def test_a_copy_on_its_way_to_the_device_needs_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    manager, ref = full(tmp_path)
    monkeypatch.setattr(manager._device, "_pace", PACE)
    manager.advance()
    assert manager.acquire(ref) is Wait.COMING
    path = folder(tmp_path, "b", 1)
    for _ in range(2):
        with pytest.raises(AdapterError, match=FULL):
            manager.load("b", path, pinned=pinned, steps_go_on=lambda: False)
        assert states(manager) == {("a", ref.version): "host"}
        assert not manager.is_loading("b")
        manager.check_integrity()
    assert_slot_is(manager, acquire(manager, ref), 0)
    assert manager.load("b", path, pinned=pinned, steps_go_on=lambda: False).state == "host"
    finish(manager, ref)
    manager.check_integrity()


def test_what_was_told_of_room_goes_on_before_it_has_looked(tmp_path: Path) -> None:
    manager, ref = full(tmp_path)
    host = manager._host
    waiting = held(manager, tmp_path, "b")["b"]
    wait_for(lambda: len(host._waiting) == 1)
    with manager._lock:  # the read cannot look
        assert host._needs_steps()
        manager.drop(waiting)  # nobody wants it
        assert not host._needs_steps()
        manager.hold(waiting)
        assert host._needs_steps()
        manager.drop(ref)
        assert not host._needs_steps()
    wait_for(lambda: manager.usage().loads == 2)
    manager.check_integrity()


def test_a_job_that_waits_can_be_withdrawn() -> None:
    pool, go = LoaderPool(threads=1), threading.Event()
    done: list[object] = []
    assert pool.rests(but_for=0)
    for owner in ("first", "second", "third"):
        pool.submit(lambda: go.wait(60), lambda *outcome: done.append(outcome), owner)
    wait_for(lambda: pool.counts() == (2, 1, 0))
    assert pool.rests(but_for=1)
    assert not pool.rests(but_for=0)
    assert not pool.withdraw("first")
    assert pool.withdraw("second")
    assert not pool.withdraw("second")
    assert pool.counts() == (1, 1, 0)
    go.set()
    wait_for(lambda: pool.rests(but_for=0))
    assert done == [(True, None)] * 2


@pytest.mark.parametrize("others", ["", "bc"], ids=["its read waits", "its job is queued"])
def test_ctrl_c_as_a_load_is_refused_keeps_no_lock_and_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    monkeypatch.setattr("vexpert.lora.host_tier.RECHECK", 0.01)
    path = folder(tmp_path, "z", 25)

    def is_interrupted_well(place: int) -> bool:
        manager, ref = full(tmp_path)
        refs = held(manager, tmp_path, others)
        wait_for(lambda: len(manager._host._waiting) == len(others))
        try:
            was_interrupted = is_interrupted(
                lambda: manager.load("z", path, steps_go_on=lambda: False), place
            )
        except (AdapterError, RuntimeError) as error:
            # Python's own, where Ctrl-C comes as a Condition lets go.
            was_interrupted = "un-acquired lock" in str(error)
            if not was_interrupted and FULL not in str(error):
                raise
        for each in (ref, *refs.values()):
            manager.drop(each)
        assert Load(manager, tmp_path, "z", steps_go_on=True).end() == "host", place
        wait_for(lambda: manager.usage().loading == 0)
        manager.check_integrity()
        return was_interrupted

    places = itertools.takewhile(is_interrupted_well, itertools.count())
    assert len(list(places)) > 20
