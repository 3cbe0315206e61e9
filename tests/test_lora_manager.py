"""Names, versions, host copies and slots: an adapter's life with many users at once."""

import re
import threading
import time
from pathlib import Path
from random import Random

import pytest
import torch
from helpers_adapters import adapter, canonical_delta, stored_delta, tiny_targets
from helpers_wait import wait_for

from vexpert.config import EngineConfig
from vexpert.errors import AdapterError, AdapterNotFoundError, ConfigError
from vexpert.lora.budget import arena_bytes, full_adapter_bytes
from vexpert.lora.manager import AdapterManager
from vexpert.lora.memory_source import AdapterTensors
from vexpert.lora.types import AdapterRef, AdapterWeights, LoraState, TargetMap, Wait

CPU = torch.device("cpu")
TARGETS = tiny_targets()
LARGE = 100  # seeds from here on are of adapters of more bytes


class FileReader:
    """A file `adapter_config.json` holds a seed; the adapter follows from it. Counts reads."""

    def __init__(self) -> None:
        self.reads: list[str] = []

    def __call__(
        self,
        path: Path | AdapterTensors,
        targets: TargetMap,
        *,
        max_rank: int,
        lora_B_layout: str | None = None,
    ) -> AdapterWeights:
        if isinstance(path, AdapterTensors):
            return weights_of(path.config["seed"])
        self.reads.append(path.name)
        file = path / "adapter_config.json"
        if not file.exists():
            raise AdapterError(f"{path} is not an adapter")
        return weights_of(int(file.read_text()))


def weights_of(seed: int) -> AdapterWeights:
    if seed < 0:
        raise AdapterError(f"seed {seed} is bad")
    return adapter(TARGETS, seed, rank=2 if seed < LARGE else 6, paths=("q", "experts"))


def folder(tmp_path: Path, name: str, seed: int) -> Path:
    path = tmp_path / name
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(str(seed))
    return path


def make(reserved: tuple[str, ...] = (), **options: object) -> AdapterManager:
    config = EngineConfig.from_options(**{"max_loras": 2, "lora_memory": 1 << 20, **options})
    return AdapterManager(
        TARGETS, LoraState(), config, CPU, torch.float32, FileReader(), frozenset(reserved)
    )


def reads(manager: AdapterManager) -> list[str]:
    reader = manager._host._loader.reader
    assert isinstance(reader, FileReader)
    return reader.reads


def slot_of(manager: AdapterManager, ref: AdapterRef) -> int | None:
    slots = {AdapterRef(info.name, info.version): info.slot for info in manager.list()}
    return None if slots[ref] < 0 else slots[ref]


def states(manager: AdapterManager) -> dict[tuple[str, int], str]:
    return {(info.name, info.version): info.state for info in manager.list()}


def acquire(manager: AdapterManager, ref: AdapterRef) -> int | None:
    """Steps of an engine until `ref` has a slot, or is refused for want of room: None."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert ref not in manager.advance()
        slot = manager.acquire(ref)
        if slot is not Wait.COMING:
            return slot if isinstance(slot, int) else None
        time.sleep(0.001)
    raise AssertionError(f"{ref} never came")


def start(manager: AdapterManager, name: str) -> tuple[AdapterRef, int | None]:
    """What the engine does for a request: resolve, hold, acquire."""
    ref = manager.resolve(name)
    manager.hold(ref)
    return ref, acquire(manager, ref)


def wait_for_later_times(tmp_path: Path) -> None:
    """Until what is written has a later time than what was: file systems count in hundredths."""
    clock = tmp_path / "clock"
    clock.touch()
    first = clock.stat().st_mtime_ns
    wait_for(lambda: (clock.touch(), clock.stat().st_mtime_ns > first)[1])


def finish(manager: AdapterManager, ref: AdapterRef) -> None:
    manager.release(ref)
    manager.drop(ref)


def assert_slot_is(manager: AdapterManager, slot: int | None, seed: int) -> None:
    assert slot is not None
    site = TARGETS.targets["experts"].down  # type: ignore[union-attr]
    got = stored_delta(site, manager.pool.tables[site.index], slot, 3)
    expected = canonical_delta(TARGETS, weights_of(seed), site)[3]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_load_resolve_acquire_unload(tmp_path: Path) -> None:
    manager = make()
    info = manager.load("a", folder(tmp_path, "a", 1))
    assert (info.state, info.slot, info.rank, info.device_bytes) == ("host", -1, 2, 0)
    ref, slot = start(manager, "a")
    assert_slot_is(manager, slot, 1)
    (info,) = manager.list()
    assert (info.state, info.slot) == ("device", slot)
    assert info.device_bytes == manager.pool.arena.used_bytes >= info.host_bytes > 0
    finish(manager, ref)
    assert slot_of(manager, ref) == slot  # stays, ready for the next request
    manager.unload("a")
    assert manager.list() == []
    assert manager.pool.arena.used_bytes == 0
    manager.check_integrity()


def test_unknown_names_list_the_known(tmp_path: Path) -> None:
    manager = make()
    with pytest.raises(AdapterNotFoundError, match="'b'; loaded adapters: none"):
        manager.resolve("b")
    manager.load("a", folder(tmp_path, "a", 1))
    with pytest.raises(AdapterNotFoundError, match="'b'; loaded adapters: a"):
        manager.unload("b")


def test_reloading_makes_a_version_and_running_requests_keep_theirs(tmp_path: Path) -> None:
    manager = make()
    path = folder(tmp_path, "a", 1)
    manager.load("a", path)
    old, old_slot = start(manager, "a")
    folder(tmp_path, "a", 22)
    with pytest.raises(AdapterError, match=r"already loaded.*load_inplace"):
        manager.load("a", path)
    manager.load("a", path, load_inplace=True)
    new, new_slot = start(manager, "a")
    assert new.version > old.version
    assert_slot_is(manager, old_slot, 1)
    assert_slot_is(manager, new_slot, 22)
    assert states(manager) == {("a", old.version): "draining", ("a", new.version): "device"}
    finish(manager, old)
    assert states(manager) == {("a", new.version): "device"}
    manager.check_integrity()


def test_unload_while_held_drains(tmp_path: Path) -> None:
    manager = make()
    manager.load("a", folder(tmp_path, "a", 1))
    ref, slot = start(manager, "a")
    manager.unload("a")
    with pytest.raises(AdapterNotFoundError):
        manager.resolve("a")
    assert states(manager) == {("a", ref.version): "draining"}
    assert_slot_is(manager, slot, 1)
    manager.hold(ref)  # a sibling of the running request
    finish(manager, ref)
    assert acquire(manager, ref) == slot
    finish(manager, ref)
    assert manager.list() == []
    assert manager.pool.arena.used_bytes == 0
    with pytest.raises(AdapterNotFoundError, match="was unloaded"):
        manager.hold(ref)
    manager.check_integrity()


def test_more_adapters_than_slots_wait_for_a_release(tmp_path: Path) -> None:
    manager = make()
    for seed, name in enumerate("abc"):
        manager.load(name, folder(tmp_path, name, seed))
    (ref_a, slot_a), (_, slot_b) = start(manager, "a"), start(manager, "b")
    again = acquire(manager, ref_a)
    assert again == slot_a != slot_b
    ref_c, slot_c = start(manager, "c")
    assert slot_c is None
    manager.release(ref_a)
    assert acquire(manager, ref_c) is None  # one of two requests of a still runs
    manager.release(ref_a)
    slot_c = acquire(manager, ref_c)
    assert slot_c == slot_a
    assert_slot_is(manager, slot_c, 2)
    assert slot_of(manager, ref_a) is None
    assert states(manager)["a", ref_a.version] == "host"
    manager.check_integrity()


def test_bytes_run_out_before_slots(tmp_path: Path) -> None:
    roomy = make()
    roomy.load("a", folder(tmp_path, "a", 1))
    start(roomy, "a")
    one = roomy.pool.arena.used_bytes
    manager = make(max_loras=4, lora_memory=2 * one)
    for seed, name in enumerate("abc"):
        manager.load(name, folder(tmp_path, name, seed))
    slots = [start(manager, name)[1] for name in "abc"]
    assert slots == [0, 1, None]


def test_an_adapter_that_never_fits_is_refused(tmp_path: Path) -> None:
    manager = make(lora_memory=1000)
    with pytest.raises(AdapterError, match=r"needs \d{4,} bytes.* 960; raise lora_memory"):
        manager.load("a", folder(tmp_path, "a", 1))
    assert manager.list() == []


def test_least_recently_used_adapter_leaves_the_device(tmp_path: Path) -> None:
    manager = make()
    refs = {}
    for seed, name in enumerate("abc"):
        manager.load(name, folder(tmp_path, name, seed))
    for name in "aba":
        refs[name], _ = start(manager, name)
        finish(manager, refs[name])
    start(manager, "c")
    assert slot_of(manager, refs["a"]) is not None
    assert slot_of(manager, refs["b"]) is None


def test_host_copies_are_dropped_and_read_again(tmp_path: Path) -> None:
    manager = make(max_cpu_loras=1)
    for seed, name in enumerate("ab"):
        manager.load(name, folder(tmp_path, name, seed))
    assert [info.state for info in manager.list()] == ["registered", "host"]
    assert manager.list()[0].host_bytes == 0
    ref, slot = start(manager, "a")
    assert reads(manager) == ["a", "b", "a"]
    assert_slot_is(manager, slot, 0)
    manager.load("c", folder(tmp_path, "c", 3))  # a is on the device: its host copy may go
    assert [info.host_bytes > 0 for info in manager.list()] == [False, False, True]
    assert [info.tier for info in manager.list()] == ["device", "disk", "host"]
    finish(manager, ref)
    manager.check_integrity()


@pytest.mark.parametrize("change", ["content", "gone"])
def test_changed_files_make_an_adapter_errored(tmp_path: Path, change: str) -> None:
    manager = make(max_cpu_loras=1)
    path = folder(tmp_path, "a", 1)
    manager.load("a", path)
    manager.load("b", folder(tmp_path, "b", 2))
    if change == "content":
        (path / "adapter_config.json").write_text("10")
    else:
        (path / "adapter_config.json").unlink()
    ref = manager.resolve("a")
    manager.hold(ref)
    wait_for(lambda: manager.list()[0].state == "errored")
    (reason,) = manager.advance().values()
    assert re.search(r"'a'.*changed or vanished.*load_inplace", reason)
    assert manager.advance() == {}
    manager.drop(ref)
    with pytest.raises(AdapterError, match=r"'a'.*changed or vanished.*load_inplace"):
        manager.hold(ref)
    info = manager.list()[0]
    assert info.state == "errored"
    assert "changed" in str(info.error)
    folder(tmp_path, "a", 10)
    manager.load("a", path, load_inplace=True)
    _, slot = start(manager, "a")
    assert_slot_is(manager, slot, 10)
    manager.check_integrity()


def test_failed_load_leaves_nothing(tmp_path: Path) -> None:
    manager = make()
    path = folder(tmp_path, "a", -1)
    with pytest.raises(AdapterError, match="seed -1"):
        manager.load("a", path)
    with pytest.raises(AdapterError, match=r"no such folder; give an adapter's folder"):
        manager.load("a", tmp_path / "nowhere")
    assert manager.list() == []
    folder(tmp_path, "a", 5)
    first = manager.load("a", path)
    folder(tmp_path, "a", -1)
    with pytest.raises(AdapterError, match="seed -1"):
        manager.load("a", path, load_inplace=True)
    assert manager.list() == [first]
    assert_slot_is(manager, start(manager, "a")[1], 5)


@pytest.mark.parametrize("name", ["", " a", "a\n", "a\x00b", "base", "a\u200bb"])
def test_bad_names_are_refused(tmp_path: Path, name: str) -> None:
    manager = make(reserved=("base",))
    with pytest.raises(AdapterError, match="adapter name"):
        manager.load(name, folder(tmp_path, "a", 1))
    assert reads(manager) == []


def test_batch_view_names_the_active_slots() -> None:
    manager = make(lora_use_virtual_experts=False)
    slots = torch.tensor([1, -1, 0])
    assert manager.batch_view(slots, slots, ()) is None
    assert manager.batch_view(slots, slots, (-1,)) is None
    view = manager.batch_view(slots, slots[:1], (1, 0, 1))
    assert view is not None
    assert view.active_slots == (0, 1)
    assert not view.use_virtual_experts


def test_default_arena_is_max_loras_full_adapters() -> None:
    full = full_adapter_bytes(TARGETS, CPU, torch.float32)
    config = EngineConfig(max_loras=3)
    assert arena_bytes(TARGETS, config, CPU, torch.float32) == 3 * full
    assert arena_bytes(TARGETS, EngineConfig(lora_memory=5), CPU, torch.float32) == 5
    many = EngineConfig(max_loras=10**9)
    assert arena_bytes(TARGETS, many, CPU, torch.float32) < 10**9 * full
    with pytest.raises(ConfigError, match="lora_memory=-1"):
        EngineConfig(lora_memory=-1)


def test_two_loads_of_one_name_at_once(tmp_path: Path) -> None:
    manager, inside, go = make(), threading.Event(), threading.Event()
    reader = manager._host._loader.reader

    def slow(path: Path, targets: TargetMap, **options: object) -> AdapterWeights:
        inside.set()
        assert go.wait(60)
        return reader(path, targets, max_rank=8)

    object.__setattr__(manager._host._loader, "reader", slow)
    thread = threading.Thread(target=manager.load, args=("a", folder(tmp_path, "a", 1)))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(AdapterError, match="being loaded now"):
        manager.load("a", tmp_path / "a")
    with pytest.raises(AdapterNotFoundError):
        manager.resolve("a")  # answers while the other thread reads
    go.set()
    thread.join()
    assert manager.resolve("a").name == "a"


def test_threads_load_unload_and_hold_while_the_engine_steps(tmp_path: Path) -> None:
    manager = make(max_loras=2, max_cpu_loras=2)
    names = "abcd"
    paths = {name: folder(tmp_path, name, seed) for seed, name in enumerate(names)}
    failures: list[BaseException] = []
    refused: list[str] = []
    held: list[tuple[AdapterRef, int]] = []
    lock = threading.Lock()

    def user(seed: int) -> None:
        random = Random(seed)
        try:
            for _ in range(120):
                name = random.choice(names)
                action = random.choice(["load", "unload", "request", "request", "list"])
                try:
                    if action == "load":
                        manager.load(name, paths[name], load_inplace=random.random() < 0.5)
                    elif action == "unload":
                        manager.unload(name)
                    elif action == "list":
                        manager.list()
                    else:
                        ref = manager.resolve(name)
                        manager.hold(ref)
                        with lock:
                            held.append((ref, names.index(name)))
                except AdapterError as error:
                    refused.append(str(error))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=user, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    served = 0
    while any(thread.is_alive() for thread in threads) or held:
        with lock:
            ref, seed = held.pop(0) if held else (None, 0)
        if ref is None:
            threads[0].join(0.001)
            continue
        slot = acquire(manager, ref)
        assert_slot_is(manager, slot, seed)
        finish(manager, ref)
        served += 1
        if served % 10 == 0:
            manager.check_integrity()
    assert not failures
    assert served > 10
    known = ("already loaded", "no adapter", "being loaded", "was unloaded")
    assert all(any(text in message for text in known) for message in refused)
    for info in manager.list():
        manager.unload(info.name)
    manager.check_integrity()
    assert manager.pool.arena.used_bytes == 0
