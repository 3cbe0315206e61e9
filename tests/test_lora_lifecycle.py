"""Loads beside a running engine: slow, broken and stuck ones hurt one adapter alone."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_wait import wait_for
from test_lora_manager import (
    TARGETS,
    acquire,
    assert_slot_is,
    finish,
    folder,
    make,
    reads,
    slot_of,
    start,
    states,
    weights_of,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from vexpert.errors import AdapterError, AdapterNotFoundError
from vexpert.lora.adapter_version import Version
from vexpert.lora.device_tier import Pace
from vexpert.lora.loading import LoaderPool
from vexpert.lora.manager import AdapterManager
from vexpert.lora.memory_source import adapter_tensors
from vexpert.lora.pack import pack
from vexpert.lora.transfer import PlainTransfer
from vexpert.lora.types import AdapterRef, AdapterWeights, Wait

PACE = Pace(rate=0, least=640, move=1)


class Gate:
    """Stands before a manager's reader: names in `shut` wait, those in `faults` raise."""

    def __init__(self, manager: AdapterManager) -> None:
        self.reader = manager._host._loader.reader
        self.shut: set[str] = set()
        self.faults: dict[str, BaseException] = {}
        self.open = threading.Event()
        self.inside: set[str] = set()
        self.failed: list[threading.Thread] = []
        object.__setattr__(manager._host._loader, "reader", self)

    def __call__(self, path: Path, targets: object, **options: object) -> AdapterWeights:
        self.inside.add(path.name)
        if path.name in self.shut:
            assert self.open.wait(60)
        if path.name in self.faults:
            self.failed.append(threading.current_thread())
            raise self.faults[path.name]
        return self.reader(path, TARGETS, max_rank=8)


@pytest.fixture
def manager() -> AdapterManager:
    return make()


@pytest.fixture
def gate(manager: AdapterManager) -> Iterator[Gate]:
    made = Gate(manager)
    yield made
    made.open.set()


def adapter_bytes() -> int:
    return pack(weights_of(0), TARGETS, torch.float32).nbytes


def run_until_ended(
    manager: AdapterManager, asking: AdapterRef | None = None
) -> dict[AdapterRef, str]:
    """Steps in which `asking` wants a slot, until some version's requests cannot go on."""
    deadline = time.monotonic() + 60
    while not (ended := manager.advance()):
        assert time.monotonic() < deadline, "waited for 60 s"
        if asking is not None:
            manager.acquire(asking)
        time.sleep(0.001)
    return ended


def pinned_are_there(manager: AdapterManager) -> bool:
    return all(info.state == "device" for info in manager.list() if info.pinned)


def register(manager: AdapterManager, tmp_path: Path, names: str) -> dict[str, AdapterRef]:
    refs = {}
    for seed, name in enumerate(names):
        manager.register(name, folder(tmp_path, name, seed))
        refs[name] = manager.resolve(name)
    return refs


def test_registering_reads_nothing_and_the_first_use_reads_once(
    manager: AdapterManager, tmp_path: Path
) -> None:
    refs = register(manager, tmp_path, "ab")
    assert [info.state for info in manager.list()] == ["registered", "registered"]
    assert reads(manager) == []
    manager.hold(refs["b"])
    manager.hold(refs["b"])
    assert_slot_is(manager, acquire(manager, refs["b"]), 1)
    assert reads(manager) == ["b"]
    info = manager.list()[1]
    assert (info.state, info.tier, info.requests, info.loads) == ("device", "device", 2, 1)
    assert info.last_use is not None
    assert info.load_seconds > 0


def test_a_stuck_read_holds_up_nobody_else(
    manager: AdapterManager, gate: Gate, tmp_path: Path
) -> None:
    refs = register(manager, tmp_path, "abc")
    gate.shut = {"a"}
    manager.hold(refs["a"])
    assert manager.acquire(refs["a"]) is Wait.COMING
    for name in "bc":
        manager.hold(refs[name])
        assert_slot_is(manager, acquire(manager, refs[name]), "abc".index(name))
        finish(manager, refs[name])
    assert states(manager)["a", refs["a"].version] == "loading"
    manager.unload("a")  # at once, though its read hangs
    with pytest.raises(AdapterNotFoundError):
        manager.resolve("a")
    manager.drop(refs["a"])
    gate.open.set()
    wait_for(lambda: len(manager.list()) == 2)
    assert manager.usage().host_adapters == 2
    manager.check_integrity()


def test_stuck_threads_are_replaced_up_to_a_limit() -> None:
    """Whoever is at a job counts as stuck at once, however quick or slow this machine is."""
    pool, go = LoaderPool(threads=2, most=4, stuck_after=0), threading.Event()
    done: list[object] = []

    def tend_until(condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            pool.tend()
            return condition()

        wait_for(holds)

    def submit(work: Callable[[], object], count: int = 1) -> None:
        for _ in range(count):
            pool.submit(work, lambda result, error: done.append(result))

    submit(lambda: go.wait(60), 3)
    submit(lambda: "free")
    tend_until(lambda: done == ["free"])
    assert pool.counts()[1] == 3
    submit(lambda: go.wait(60))
    submit(lambda: "last")
    tend_until(lambda: pool.counts()[2] == 4)
    pool.tend()
    assert pool.counts() == (1, 4, 4)
    assert pool._started == 4  # no fifth is on its way either
    go.set()
    wait_for(lambda: len(done) == 6)
    assert done[0] == "free"
    assert sorted(map(str, done[1:])) == ["True", "True", "True", "True", "last"]


def test_loader_threads_are_daemons_and_end_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vexpert.lora.loading.IDLE_END", 0.01)
    pool, seen = LoaderPool(), []
    pool.submit(lambda: seen.append(threading.current_thread()), lambda result, error: None)
    wait_for(lambda: bool(seen))
    assert seen[0].daemon
    wait_for(lambda: not seen[0].is_alive())
    assert pool.counts() == (0, 0, 0)


FAULTS = {
    "AdapterError": (AdapterError("12 keys have no place"), "12 keys have no place"),
    "disk": (OSError(5, "Input/output error"), "cannot be read: Input/output error; load it again"),
    "memory": (MemoryError("no 5 bytes"), r"no host memory.*lora_host_memory"),
    "killed": (SystemExit(), "the thread that read it was ended; load it again"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_read_is_the_one_adapters_own_error(
    manager: AdapterManager, gate: Gate, tmp_path: Path, fault: str
) -> None:
    refs = register(manager, tmp_path, "abc")
    gate.faults["b"], reason = FAULTS[fault]
    for name in "abc":
        manager.hold(refs[name])
    ended = run_until_ended(manager)
    assert list(ended) == [refs["b"]]
    with pytest.raises(AdapterError, match=f"adapter 'b': .*{reason}"):
        manager.hold(refs["b"])
    with pytest.raises(AdapterError, match=reason):
        manager.load("b", tmp_path / "b", load_inplace=True)
    for name in "ac":
        assert_slot_is(manager, acquire(manager, refs[name]), "abc".index(name))
    assert states(manager)["b", refs["b"].version] == "errored"
    assert manager.usage().errors == 2
    manager.drop(refs["b"])
    del gate.faults["b"]
    manager.load("b", tmp_path / "b", load_inplace=True)
    finish(manager, refs["a"])
    assert_slot_is(manager, start(manager, "b")[1], 1)
    manager.check_integrity()
    for thread in gate.failed if fault == "killed" else ():
        thread.join(60)  # or the next test is told how it ended


def test_a_device_that_fails_in_a_copy_costs_one_adapter(
    manager: AdapterManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = register(manager, tmp_path, "ab")

    def fail(self: PlainTransfer, limit: int) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nhint")

    manager.hold(refs["a"])
    with monkeypatch.context() as patch:
        patch.setattr(PlainTransfer, "advance", fail)
        ended = run_until_ended(manager, refs["a"])
    assert "could not take it: CUDA out of memory. Tried to allocate 2 GiB" in ended[refs["a"]]
    assert "hint" not in ended[refs["a"]]
    manager.drop(refs["a"])
    manager.check_integrity()
    assert manager.pool.arena.used_bytes == 0
    assert_slot_is(manager, start(manager, "b")[1], 1)
    manager.check_integrity()


def test_a_copy_in_slices_is_seen_only_when_whole(
    manager: AdapterManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vexpert.lora.transfer.SLICE_BYTES", 64)
    monkeypatch.setattr(manager._device, "_pace", PACE)
    refs = register(manager, tmp_path, "ab")
    manager.advance()
    manager.hold(refs["a"])
    manager.hold(refs["b"])
    wait_for(lambda: {info.state for info in manager.list()} == {"host"})
    steps = 0
    while (slot := manager.acquire(refs["a"])) is Wait.COMING:
        steps += 1
        assert all(not any(table.host_rank) for table in manager.pool.tables)
        assert manager.acquire(refs["b"]) is Wait.COMING  # one install at a time
        manager.check_integrity()
        manager.advance()
    nbytes = manager.list()[0].host_bytes
    assert steps == -(-nbytes // PACE.least) - 1
    assert_slot_is(manager, slot, 0)  # type: ignore[arg-type]
    manager.advance(is_idle=True)  # nobody runs: no limit
    assert_slot_is(manager, manager.acquire(refs["b"]), 1)  # type: ignore[arg-type]


def test_unloading_in_the_middle_of_a_copy_frees_the_block_after_it(
    manager: AdapterManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager._device, "_pace", PACE)
    (ref,) = register(manager, tmp_path, "a").values()
    manager.advance()
    manager.hold(ref)
    wait_for(lambda: {info.state for info in manager.list()} == {"host"})
    assert manager.acquire(ref) is Wait.COMING
    manager.drop(ref)  # the client went away
    manager.unload("a")
    assert states(manager) == {("a", ref.version): "draining"}
    for _ in range(100):
        manager.advance()
        manager.check_integrity()
    assert manager.list() == []
    assert manager.pool.arena.used_bytes == manager.usage().host_used == 0


def test_the_drain_deadline_ends_what_still_runs(
    manager: AdapterManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(manager, tmp_path, "ab")
    ref, _ = start(manager, "a")
    with pytest.raises(AdapterError, match="drain_seconds=-1"):
        manager.unload("a", drain_seconds=-1)
    manager.unload("a", drain_seconds=3600)
    assert manager.advance() == {}
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 3601)
    ended = run_until_ended(manager)
    assert list(ended) == [ref]
    assert "was unloaded" in ended[ref]
    finish(manager, ref)
    assert [info.name for info in manager.list()] == ["b"]
    manager.unload("b", drain_seconds=0)  # nobody runs: gone
    assert manager.list() == []
    manager.check_integrity()


def test_pinned_adapters_stay(tmp_path: Path) -> None:
    size = adapter_bytes()
    manager = make(max_loras=3, lora_memory=3 * size)
    manager.load("a", folder(tmp_path, "a", 0), pinned=True)
    register(manager, tmp_path, "bcde")
    for name in "bcdebcde":
        ref, slot = start(manager, name)
        assert slot is not None
        finish(manager, ref)
    info = manager.list()[0]
    assert (info.state, info.pinned, info.evictions) == ("device", True, 0)
    assert sum(info.evictions for info in manager.list()) == manager.usage().evictions > 3
    manager.load("b", tmp_path / "b", load_inplace=True, pinned=True)
    for _ in range(3):
        manager.advance()
    ref = manager.resolve("d")  # on the host, and no room is left that may be evicted
    manager.hold(ref)
    ended = run_until_ended(manager, ref)
    told = (
        r"pinned adapters \(a: \d+ bytes, b: \d+ bytes\) leave \d+ of \d+ bytes, and it needs \d+;"
    )
    assert re.search(told, ended[ref])
    with pytest.raises(AdapterError, match=told):
        manager.load("f", folder(tmp_path, "f", 7))
    manager.drop(ref)
    manager.check_integrity()


@pytest.mark.parametrize("comes", ["loaded before", "to be read", "to be read again"])
@pytest.mark.parametrize("lacks", ["slots", "bytes", "both"])
def test_what_pinned_adapters_shut_out_works_again_without_them(
    tmp_path: Path, lacks: str, comes: str
) -> None:
    size = adapter_bytes()
    slots, nbytes = {"slots": (2, 4), "bytes": (3, 3), "both": (2, 3)}[lacks]
    manager = make(max_loras=slots, lora_memory=nbytes * size - 1, max_cpu_loras=1)
    total = manager.pool.arena.nbytes
    if comes == "to be read":
        manager.register("x", folder(tmp_path, "x", 5))
    else:
        manager.load("x", folder(tmp_path, "x", 5))
    for seed, name in enumerate("ab"):
        manager.load(name, folder(tmp_path, name, seed), pinned=True)
        wait_for(lambda: (manager.advance(), pinned_are_there(manager))[1])
    if comes != "loaded before":
        assert manager.list()[2].tier == "disk"
    block = manager.pool.block_bytes(size)
    left = total - sum(info.device_bytes for info in manager.list())
    causes = ["have all 2 slots", f"leave {left} of {total} bytes, and it needs {block}"]
    options = ["max_loras (--max-loras)", "lora_memory (--lora-memory)"]
    which = {"slots": slice(0, 1), "bytes": slice(1, 2), "both": slice(2)}[lacks]
    cause, option = (" and ".join(words[which]) for words in (causes, options))
    names = f"a: {block} bytes, b: {block} bytes"
    begins = f"adapter 'x': there is no room for it on the device: the pinned adapters ({names})"
    remedies = "unload one of them, load one anew in place and not pinned, or raise"
    for _ in range(2):  # as often as somebody asks
        ref = manager.resolve("x")
        manager.hold(ref)
        told = run_until_ended(manager, ref)[ref]
        assert told == f"{begins} {cause}; {remedies} {option}"
        manager.drop(ref)
        assert (manager.list()[2].name, manager.list()[2].error) == ("x", None)
        manager.check_integrity()
    manager.unload("a")
    assert_slot_is(manager, start(manager, "x")[1], 5)
    assert manager.resolve("x") == ref
    manager.check_integrity()


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pinned_adapter_is_replaced_where_pinned_ones_have_all_slots(
    tmp_path: Path, pinned: bool
) -> None:
    manager = make(max_loras=2)
    for seed, name in enumerate("ab"):
        manager.load(name, folder(tmp_path, name, seed), pinned=True)
        wait_for(lambda: (manager.advance(), pinned_are_there(manager))[1])
    with pytest.raises(AdapterError, match="have all 2 slots"):
        manager.load("c", folder(tmp_path, "c", 7))
    manager.load("a", tmp_path / "c", load_inplace=True, pinned=pinned)
    ref = manager.resolve("a")
    manager.hold(ref)
    assert_slot_is(manager, acquire(manager, ref), 7)
    manager.check_integrity()


def test_a_pinned_adapter_that_drains_is_waited_for(tmp_path: Path) -> None:
    manager = make(max_loras=1)
    manager.load("x", folder(tmp_path, "x", 5))
    manager.load("a", folder(tmp_path, "a", 0), pinned=True)
    held, _ = start(manager, "a")
    manager.unload("a")
    ref = manager.resolve("x")
    manager.hold(ref)
    for _ in range(3):
        assert manager.advance() == {}
        assert manager.acquire(ref) is Wait.NO_ROOM
    finish(manager, held)
    assert_slot_is(manager, acquire(manager, ref), 5)
    manager.check_integrity()


def test_steps_between_a_read_and_its_name_leave_a_pinned_adapter_alone(
    manager: AdapterManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = manager._host.wait

    def wait_and_step(version: Version, steps_go_on: Callable[[], bool]) -> None:
        wait(version, steps_go_on)
        for _ in range(3):
            manager.advance()
            manager.check_integrity()

    monkeypatch.setattr(manager._host, "wait", wait_and_step)
    assert manager.load("a", folder(tmp_path, "a", 0), pinned=True).state == "host"
    manager.advance()
    assert [info.state for info in manager.list()] == ["device"]
    manager.check_integrity()


def test_host_memory_is_bounded_and_what_waits_is_not_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vexpert.lora.host_tier.RECHECK", 0.01)
    size = adapter_bytes()
    manager = make(max_loras=1, lora_host_memory=2 * size)
    refs = register(manager, tmp_path, "abcd")
    for ref in refs.values():
        manager.hold(ref)  # four wait, two fit
    waiting = dict(refs)
    deadline = time.monotonic() + 60
    while waiting:
        assert time.monotonic() < deadline, f"{list(waiting)} never came"
        manager.advance()
        for name, ref in list(waiting.items()):
            slot = manager.acquire(ref)
            assert manager.usage().host_used <= 2 * size
            manager.check_integrity()
            if isinstance(slot, int):
                assert_slot_is(manager, slot, "abcd".index(name))
                finish(manager, waiting.pop(name))
    assert sorted(reads(manager)) == list("abcd")  # nothing was dropped while it waited
    with pytest.raises(AdapterError, match=r"bytes of host memory.*lora_host_memory"):
        make(lora_host_memory=size - 1).load("a", tmp_path / "a")


def test_tensors_from_memory_are_served_and_never_dropped(tmp_path: Path) -> None:
    size = adapter_bytes()
    manager = make(max_loras=1, lora_host_memory=2 * size)
    info = manager.load("m", tensors={"x": torch.ones(1)}, config={"seed": 5})
    assert (info.path, info.state) == ("from memory", "host")
    register(manager, tmp_path, "abc")
    for name in "abc":
        ref, _ = start(manager, name)
        finish(manager, ref)
    ref, slot = start(manager, "m")
    assert_slot_is(manager, slot, 5)
    new = manager.load("m", tensors={"x": torch.ones(1)}, config={"seed": 6}, load_inplace=True)
    assert new.version > ref.version
    finish(manager, ref)
    assert_slot_is(manager, start(manager, "m")[1], 6)
    for arguments in ({"tensors": 5}, {"config": {}}, {"tensors": {}, "config": 3}):
        with pytest.raises(AdapterError, match=r"give a dict|give the fields"):
            manager.load("n", **arguments)  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match="not both"):
        manager.load("n", tmp_path, tensors={}, config={})
    manager.check_integrity()


MEMORYLESS = {
    "meta": lambda: torch.ones(2, 2, device="meta"),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "fake": lambda: FakeTensorMode().from_tensor(torch.eye(2)),
    "wrapped": lambda: _Wrapper(torch.eye(2)),
}


class _Wrapper(torch.Tensor):
    """Stands for subclasses whose numbers lie in other tensors, such as sharded ones."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "_Wrapper":
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        assert isinstance(wrapper, _Wrapper)
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: object, *_: object) -> None:
        pytest.fail(f"{function} of a tensor that has no numbers")


@pytest.mark.parametrize("kind", MEMORYLESS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, of layouts in beta
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensors_that_are_no_numbers_in_memory(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    tensors = {"a": torch.eye(2), "b": MEMORYLESS[kind]()}
    wanted = r"not on the meta device|to_dense\(\)|dequantize\(\)|the plain tensor in it"
    with pytest.raises(AdapterError, match=rf"tensors\['b'\] is .*{wanted}"):
        make().load("m", tensors=tensors, config={"seed": 5})
    assert not caplog.records


def test_tensors_amid_a_transform_of_functions() -> None:
    plain = torch.eye(2)

    def load(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(AdapterError, match=r"tensors\['b'\] is .*the plain tensor in it"):
            make().load("m", tensors={"a": plain, "b": tensor}, config={"seed": 5})
        return tensor.sum()

    torch.vmap(load)(torch.ones(2, 3))
    torch.func.grad(load)(torch.ones(3))


def test_a_view_with_the_negative_bit_is_read_as_its_numbers() -> None:
    negative = torch._neg_view(torch.tensor([[1.0, -2.0]]))
    checked = adapter_tensors({"a": negative}, {}).checked()["a"]
    assert not checked.is_neg()
    assert checked.numpy().tolist() == [[-1.0, 2.0]]


@pytest.mark.parametrize("value", [None, np.ones(2), [1.0]])
def test_a_value_that_is_no_tensor_is_named(value: object) -> None:
    tensors = {"first": torch.ones(1), "second": value}
    with pytest.raises(AdapterError, match=r"^tensors\['second'\] is of type \w+: give a torch"):
        make().load("m", tensors=tensors, config={"seed": 5})
    with pytest.raises(AdapterError, match=r"^tensors has the key 3, of type int: use names"):
        make().load("m", tensors={"a": torch.ones(1), 3: torch.ones(1)}, config={"seed": 5})


def test_switches_of_a_load_are_booleans(tmp_path: Path) -> None:
    manager, place = make(), folder(tmp_path, "a", 1)
    for name in ("pinned", "load_inplace"):
        for call in (manager.load, manager.register):
            for value in ("yes", 1, None):
                with pytest.raises(AdapterError, match=rf"^{name}={value!r}: use True or False"):
                    call("a", place, **{name: value})  # type: ignore[operator]
    manager.load("a", place)
    for seconds in ("1", True, [1]):
        with pytest.raises(AdapterError, match=r"drain_seconds=.*: give seconds"):
            manager.unload("a", drain_seconds=seconds)  # type: ignore[arg-type]


def test_prefetch_brings_what_will_be_asked_for_and_evicts_nothing_wanted(tmp_path: Path) -> None:
    manager = make(max_loras=2)
    refs = register(manager, tmp_path, "abc")
    held, _ = start(manager, "a")
    for name in "bc":
        manager.hold(refs[name])
    wait_for(lambda: [info.state for info in manager.list()] == ["device", "host", "host"])
    manager.prefetch([refs["b"], refs["c"]])
    assert slot_of(manager, refs["b"]) is not None  # no request asked for it yet
    manager.prefetch([refs["c"]])
    assert slot_of(manager, refs["c"]) is None  # a runs, b is wanted
    manager.drop(refs["b"])
    manager.prefetch([refs["c"]])
    assert slot_of(manager, refs["c"]) is None  # what has just come stays for this step
    manager.advance()
    manager.prefetch([refs["c"]])
    assert slot_of(manager, refs["c"]) is not None
    finish(manager, held)
    manager.check_integrity()


def test_more_pinned_adapters_than_the_host_holds_at_boot(tmp_path: Path) -> None:
    size = adapter_bytes()
    manager = make(max_loras=4, lora_host_memory=size)
    for seed, name in enumerate("abc"):  # no step runs yet
        manager.load(name, folder(tmp_path, name, seed), pinned=True)
    wait_for(lambda: (manager.advance(), {i.state for i in manager.list()} == {"device"})[1])
    assert sum(info.loads for info in manager.list()) >= 5  # two had to be read again
    manager.check_integrity()


def test_tensors_that_fill_the_host_leave_an_error_and_no_hang(tmp_path: Path) -> None:
    size = adapter_bytes()
    manager = make(lora_host_memory=2 * size - 1)
    manager.load("m", tensors={"x": torch.ones(1)}, config={"seed": 5})
    (ref,) = register(manager, tmp_path, "a").values()
    manager.hold(ref)
    assert "under adapters loaded from tensors" in run_until_ended(manager)[ref]
    manager.drop(ref)
    manager.unload("m")
    manager.load("a", tmp_path / "a", load_inplace=True)
    manager.check_integrity()
