"""Pinned adapters have their room from the load call on: what has none is refused by that call."""

import re
import threading
from pathlib import Path

import pytest
import torch
from helpers_server import serving
from helpers_wait import wait_for
from test_lora_lifecycle import Gate, run_until_ended
from test_lora_manager import (
    LARGE,
    TARGETS,
    acquire,
    assert_slot_is,
    finish,
    folder,
    make,
    start,
    states,
    weights_of,
)

import vexpert.demo
from vexpert import LLM, SamplingParams
from vexpert.errors import AdapterError
from vexpert.lora.manager import AdapterManager
from vexpert.lora.pack import pack
from vexpert.lora.types import AdapterRef, Wait

GREEDY = SamplingParams(temperature=0, max_tokens=20)


def size_of(seed: int) -> int:
    """Bytes that the adapter of `seed` takes on the device."""
    block = make().pool.block_bytes
    return block(pack(weights_of(seed), TARGETS, torch.float32).nbytes)


SMALL_BYTES, LARGE_BYTES = size_of(0), size_of(LARGE)


def load(manager: AdapterManager, tmp_path: Path, name: str, seed: int = 0, **how: bool) -> None:
    manager.load(name, folder(tmp_path, f"{name}{seed}", seed), **{"pinned": True, **how})


def step_until(manager: AdapterManager, name: str, state: str) -> None:
    """Steps until the newest version of `name` is in `state`."""

    def is_there() -> bool:
        assert not manager.advance()
        return [i.state for i in manager.list() if i.name == name][-1] == state

    wait_for(is_there)


def serves(manager: AdapterManager, name: str, seed: int) -> AdapterRef:
    """Check that a request for `name` runs with the weights of `seed`; the version it had."""
    ref, slot = start(manager, name)
    assert_slot_is(manager, slot, seed)
    finish(manager, ref)
    manager.check_integrity()
    return ref


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("lacks", ["slots", "bytes", "both"])
def test_a_pinned_adapter_without_room_is_refused(tmp_path: Path, lacks: str, where: str) -> None:
    slots, nbytes = {
        "slots": (2, 4 * LARGE_BYTES),
        "bytes": (3, 2 * SMALL_BYTES + 1),
        "both": (2, 2 * SMALL_BYTES + 1),
    }[lacks]
    manager = make(max_loras=slots, lora_memory=nbytes)
    for name in "ab":
        load(manager, tmp_path, name)
        if where == "device":
            step_until(manager, name, where)
    before, total = states(manager), manager.pool.arena.nbytes
    assert set(before.values()) == {where}
    left = total - 2 * SMALL_BYTES
    causes = [
        "have all 2 slots",
        f"leave {left} of {total} bytes, and it needs {SMALL_BYTES}",
    ]
    options = ["max_loras (--max-loras)", "lora_memory (--lora-memory)"]
    which = {"slots": slice(0, 1), "bytes": slice(1, 2), "both": slice(2)}[lacks]
    cause, option = (" and ".join(words[which]) for words in (causes, options))
    told = (
        "adapter 'c': there is no room for it on the device: the pinned adapters "
        f"(a: {SMALL_BYTES} bytes, b: {SMALL_BYTES} bytes) {cause}; unload one of them, "
        f"load one anew in place and not pinned, or raise {option}"
    )
    for pinned in (True, False):
        with pytest.raises(AdapterError, match=f"^{re.escape(told)}$"):
            load(manager, tmp_path, "c", 7, pinned=pinned)
    assert states(manager) == before
    for name in "ab":
        step_until(manager, name, "device")
    manager.check_integrity()


@pytest.mark.parametrize("remedy", ["unload", "not pinned"])
def test_what_the_message_advises_makes_room(tmp_path: Path, remedy: str) -> None:
    manager = make(max_loras=1)
    load(manager, tmp_path, "a")
    with pytest.raises(AdapterError, match="have all 1 slots"):
        load(manager, tmp_path, "b", 5)
    if remedy == "unload":
        manager.unload("a")
    else:
        load(manager, tmp_path, "a", pinned=False, load_inplace=True)
    load(manager, tmp_path, "b", 5)
    serves(manager, "b", 5)


def test_of_two_pinned_loads_at_once_one_is_refused(tmp_path: Path) -> None:
    manager = make(max_loras=3, lora_memory=2 * SMALL_BYTES)
    load(manager, tmp_path, "a")
    gate = Gate(manager)
    gate.shut = {"b1", "c2"}
    refused: dict[str, str] = {}

    def try_load(name: str, seed: int) -> None:
        try:
            load(manager, tmp_path, name, seed)
        except AdapterError as error:
            refused[name] = str(error)

    threads = [threading.Thread(target=try_load, args=("bc"[i], i + 1)) for i in range(2)]
    for thread in threads:
        thread.start()
    wait_for(lambda: gate.inside == gate.shut)  # neither knows its size yet
    gate.open.set()
    for thread in threads:
        thread.join()
    ((name, told),) = refused.items()
    (winner,) = {"b", "c"} - {name}
    assert f"pinned adapters (a: {SMALL_BYTES} bytes, {winner}: {SMALL_BYTES} bytes)" in told
    assert [info.name for info in manager.list()] == ["a", winner]
    step_until(manager, winner, "device")
    serves(manager, winner, 1 + "bc".index(winner))


def test_a_pinned_load_that_fails_leaves_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make(max_loras=1)

    def no_memory(elements: int, dtype: torch.dtype) -> torch.Tensor:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(manager._host._memory, "allocate", no_memory)
        with pytest.raises(AdapterError, match="no host memory"):
            load(manager, tmp_path, "a")
    manager.check_integrity()
    load(manager, tmp_path, "b", 5)
    serves(manager, "b", 5)


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_new_version_that_is_too_large_is_refused(tmp_path: Path, where: str) -> None:
    manager = make(max_loras=3, lora_memory=SMALL_BYTES + LARGE_BYTES - 1)
    for seed, name in enumerate("ab"):
        load(manager, tmp_path, name, seed)
        if where == "device":
            step_until(manager, name, where)
    before = states(manager)
    with pytest.raises(AdapterError, match=rf"\(b: {SMALL_BYTES} bytes\) leave"):
        load(manager, tmp_path, "a", LARGE, load_inplace=True)
    assert states(manager) == before
    step_until(manager, "a", "device")
    assert serves(manager, "a", 0).version == 1
    manager.unload("b")
    load(manager, tmp_path, "a", LARGE, load_inplace=True)
    serves(manager, "a", LARGE)
    with pytest.raises(AdapterError, match=rf"\(a: {LARGE_BYTES} bytes\) leave"):
        load(manager, tmp_path, "b", 1)


@pytest.mark.parametrize("fails", [True, False])
def test_beside_a_new_version_the_larger_of_both_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Either may stay: the new one, or the old one where the load of the new one fails."""
    manager = make(max_loras=2, lora_memory=LARGE_BYTES + SMALL_BYTES)
    load(manager, tmp_path, "a", 3)
    inside, go = threading.Event(), threading.Event()
    allocate = manager._host._memory.allocate

    def wait_and_allocate(elements: int, dtype: torch.dtype) -> torch.Tensor:
        inside.set()
        assert go.wait(60)
        if fails:
            raise MemoryError
        return allocate(elements, dtype)

    def reload() -> None:
        try:
            load(manager, tmp_path, "a", LARGE, load_inplace=True)
        except AdapterError:
            assert fails

    with monkeypatch.context() as slow:
        slow.setattr(manager._host._memory, "allocate", wait_and_allocate)
        reloading = threading.Thread(target=reload)
        reloading.start()
        assert inside.wait(60)
    for name, seed in (("b", LARGE), ("c", 1), ("d", 1)):
        if name == "c":
            load(manager, tmp_path, name, seed)
            continue
        told = rf"\(a: {LARGE_BYTES} bytes(, c: {SMALL_BYTES} bytes)?\) (have|leave)"
        with pytest.raises(AdapterError, match=told):
            load(manager, tmp_path, name, seed)
    go.set()
    reloading.join()
    serves(manager, "a", 3 if fails else LARGE)
    serves(manager, "c", 1)


def test_a_pinned_name_that_is_only_registered_has_its_slot(tmp_path: Path) -> None:
    manager = make(max_loras=1)
    manager.register("a", folder(tmp_path, "a", 4), pinned=True)
    with pytest.raises(AdapterError, match=r"\(a: \S+ bytes\) have all 1 slots"):
        manager.register("b", folder(tmp_path, "b", 5), pinned=True)
    with pytest.raises(AdapterError, match="have all 1 slots"):
        load(manager, tmp_path, "b", 5)
    assert [info.name for info in manager.list()] == ["a"]
    serves(manager, "a", 4)
    manager.unload("a")
    manager.register("b", tmp_path / "b", pinned=True)
    serves(manager, "b", 5)


def test_a_pinned_name_whose_bytes_are_taken_when_it_is_read_waits_for_them(tmp_path: Path) -> None:
    manager = make(max_loras=3, lora_memory=LARGE_BYTES + SMALL_BYTES - 1)
    load(manager, tmp_path, "a")
    manager.register("x", folder(tmp_path, "x", LARGE), pinned=True)
    step_until(manager, "x", "host")
    load(manager, tmp_path, "c", 3)
    manager.unload("a")  # what is free now is c's, though x could be there before
    ref = manager.resolve("x")
    manager.hold(ref)
    assert manager.acquire(ref) is Wait.NO_ROOM
    assert f"(c: {SMALL_BYTES} bytes) leave" in run_until_ended(manager, ref)[ref]
    manager.drop(ref)
    step_until(manager, "c", "device")
    manager.check_integrity()
    manager.unload("c")
    step_until(manager, "x", "device")
    serves(manager, "x", LARGE)


def test_a_pin_that_is_gone_before_the_next_step_ends_nobody(tmp_path: Path) -> None:
    manager = make(max_loras=1)
    manager.load("x", folder(tmp_path, "x", 5))
    load(manager, tmp_path, "a")
    step_until(manager, "a", "device")
    ref = manager.resolve("x")
    manager.hold(ref)
    assert manager.acquire(ref) is Wait.NO_ROOM
    manager.unload("a")
    assert manager.advance() == {}
    assert_slot_is(manager, acquire(manager, ref), 5)
    finish(manager, ref)
    manager.check_integrity()


@pytest.mark.parametrize("is_broken", [True, False])
def test_what_is_being_read_ends_nobody_before_it_is_read(tmp_path: Path, is_broken: bool) -> None:
    manager = make(max_loras=1)
    for seed, name in enumerate("xy"):
        manager.load(name, folder(tmp_path, name, seed))
    running, _ = start(manager, "y")
    gate = Gate(manager)
    gate.shut = {"p"}
    if is_broken:
        gate.faults = {"p": AdapterError("broken")}
    manager.register("p", folder(tmp_path, "p", 7), pinned=True)
    ref = manager.resolve("x")
    manager.hold(ref)
    for _ in range(3):
        assert manager.advance() == {}
        assert manager.acquire(ref) is Wait.NO_ROOM
    gate.open.set()
    if is_broken:
        step_until(manager, "p", "errored")
        finish(manager, running)
        assert_slot_is(manager, acquire(manager, ref), 0)
    else:
        assert "pinned adapters (p: " in run_until_ended(manager, ref)[ref]
        finish(manager, running)
        step_until(manager, "p", "device")
    manager.check_integrity()


def test_over_http_and_from_python(tmp_path: Path) -> None:
    paths = {name: str(path) for name, path in vexpert.demo.adapter_paths().items()}
    llm = LLM(dtype="float32", device="cpu", max_loras=1)
    llm.load_adapter("upper", paths["upper"], pinned=True)
    for act in (llm.load_adapter, llm.register_adapter):
        with pytest.raises(AdapterError, match=r"\(upper: \d+ bytes\) have all 1 slots"):
            act("reverse", paths["reverse"], pinned=True)
    with serving(llm.engine) as server:
        body = {"lora_name": "reverse", "lora_path": paths["reverse"], "pinned": True}
        for lazy in (False, True):
            answer = server.post("/v1/load_lora_adapter", json=body | {"lazy": lazy})
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert "(upper: " in error["message"]
            assert "raise max_loras (--max-loras)" in error["message"]
        assert server.ask("upper", "hello") == "HELLO"
        assert server.post("/v1/unload_lora_adapter", json={"lora_name": "upper"}).is_success
        assert server.post("/v1/load_lora_adapter", json=body).is_success
        assert server.ask("reverse", "hello") == "olleh"
