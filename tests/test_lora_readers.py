"""Processes that read adapters: the same results and errors, and nothing left when they end."""

import functools
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers_churn import opened
from helpers_wait import wait_for
from safetensors.torch import load_file, save_file
from test_lora_manager import (
    TARGETS,
    assert_slot_is,
    finish,
    start,
    wait_for_later_times,
    weights_of,
)

from vexpert.config import EngineConfig
from vexpert.demo import adapter_paths
from vexpert.engine.engine import Engine
from vexpert.errors import AdapterError
from vexpert.lora import host_memory
from vexpert.lora.host_memory import HostMemory
from vexpert.lora.manager import AdapterManager
from vexpert.lora.memory_source import AdapterTensors
from vexpert.lora.readers import Readers
from vexpert.lora.source import AdapterLoader, BaseWeightNeeded, HostCopy, Source
from vexpert.lora.types import AdapterWeights, LoraState, TargetMap


def read(
    path: Path | AdapterTensors,
    targets: TargetMap,
    *,
    max_rank: int,
    lora_B_layout: str | None = None,
) -> AdapterWeights:
    """A seed stands in a file; or a word for what is to happen. Runs in the readers."""
    if isinstance(path, AdapterTensors):
        return weights_of(path.config["seed"])
    word = (path / "adapter_config.json").read_text()
    if word == "wait":
        (path / "begun").touch()
        time.sleep(280)
    if word == "crash":
        os._exit(3)
    if word == "large":
        torch.empty(1 << 45, dtype=torch.uint8)
    if word == "wide":
        torch.empty(1 << 27, dtype=torch.uint8)
    if word == "fault":
        raise ZeroDivisionError("a fault")
    if word == "disk":
        raise OSError(5, "Input/output error")
    if word == "base":
        raise BaseWeightNeeded("lm_head.weight")
    return weights_of(int(word))


LOADER = AdapterLoader(read, TARGETS, 8, torch.float32)


def write(tmp_path: Path, word: object) -> Source:
    path = tmp_path / str(word)
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(str(word))
    return Source(path)


class Setting:
    """Readers, and memory that they share; pinning is only noted."""

    def __init__(self) -> None:
        self.readers = Readers(LOADER, keep=1)
        self.memory = HostMemory(pinned=False, shared=True)
        self.memory.reserve()
        assert self.memory.is_shared

    def load(self, source: Source) -> HostCopy:
        return self.readers.load(source, self.allocate, self.memory)

    def allocate(self, elements: int) -> torch.Tensor:
        return self.memory.allocate(elements, torch.float32)

    def pid(self) -> int:
        (pid,) = self.readers.pids()
        return pid


@pytest.fixture(scope="module")
def setting() -> Iterator[Setting]:
    made = Setting()
    yield made
    pids = made.readers.pids()
    made.readers.close()
    assert pids
    wait_for(lambda: not any(map(lives, pids)))


def lives(pid: int) -> bool:
    """Not so one that has ended and that its parent, or who has its place, has not waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def same(setting: Setting, source: Source) -> None:
    """A load in a reader gives what one here gives, bit for bit."""
    here = LOADER.load(source, lambda n: torch.zeros(n))
    there = setting.load(source)
    assert torch.equal(here.packed.buffer, there.packed.buffer)
    assert here.packed.entries == there.packed.entries
    assert (here.packed.rank, here.files) == (there.packed.rank, there.files)
    setting.memory.free(there.packed.buffer)


def test_a_reader_gives_what_this_process_would(setting: Setting, tmp_path: Path) -> None:
    for seed in (1, 2, 1):
        same(setting, write(tmp_path, seed))
    assert len(setting.readers.pids()) == 1
    with open(f"/proc/{setting.pid()}/maps") as file:
        assert "memfd" not in file.read()  # it keeps nothing of memory that may be freed


ERRORS = {
    "-5": (AdapterError, "seed -5 is bad"),
    "fault": (ZeroDivisionError, "a fault"),
    "disk": (OSError, "Input/output error"),
    "base": (BaseWeightNeeded, "lm_head"),
    "large": (RuntimeError, "can't allocate memory"),
}


@pytest.mark.parametrize("word", ERRORS)
def test_errors_are_the_same(setting: Setting, tmp_path: Path, word: str) -> None:
    setting.readers.warm()
    pid = setting.pid()
    kind, text = ERRORS[word]
    with pytest.raises(kind, match=text):
        setting.load(write(tmp_path, word))
    same(setting, write(tmp_path, 3))
    assert setting.pid() == pid


def test_no_room_ends_the_load_and_not_the_reader(setting: Setting, tmp_path: Path) -> None:
    def full(elements: int) -> torch.Tensor:
        raise AdapterError("it needs more than there is")

    with pytest.raises(AdapterError, match="more than there is"):
        setting.readers.load(write(tmp_path, 1), full, setting.memory)
    pid = setting.pid()
    same(setting, write(tmp_path, 2))
    assert setting.pid() == pid


def test_files_that_changed_since_are_refused(setting: Setting, tmp_path: Path) -> None:
    source = write(tmp_path, 1)
    before = source.observe()
    wait_for_later_times(tmp_path)
    write(tmp_path, 1)
    with pytest.raises(AdapterError, match="changed or vanished since"):
        setting.readers.load(source, setting.allocate, setting.memory, before)


def test_a_reader_that_is_killed_costs_its_adapter_alone(setting: Setting, tmp_path: Path) -> None:
    same(setting, write(tmp_path, 1))
    pid, errors = setting.pid(), []

    def load() -> None:
        try:
            setting.load(write(tmp_path, "wait"))
        except AdapterError as error:
            errors.append(str(error))

    thread = threading.Thread(target=load)
    thread.start()
    wait_for(lambda: (tmp_path / "wait" / "begun").exists())
    os.kill(pid, signal.SIGKILL)
    thread.join()
    assert errors == ["the process that read it was ended by signal 9 (Killed); load it again"]
    with pytest.raises(AdapterError, match="ended with status 3; load it again"):
        setting.load(write(tmp_path, "crash"))
    same(setting, write(tmp_path, 2))
    assert setting.pid() != pid


def test_a_limit_of_memory_is_the_adapters_own_error(setting: Setting, tmp_path: Path) -> None:
    same(setting, write(tmp_path, 1))
    with open(f"/proc/{setting.pid()}/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    pid, most = setting.pid(), resource.RLIM_INFINITY
    resource.prlimit(pid, resource.RLIMIT_AS, (used + (1 << 20), most))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        setting.load(write(tmp_path, "wide"))
    # Lifted: what Python keeps of the failed load may have taken the rest.
    resource.prlimit(pid, resource.RLIMIT_AS, (most, most))
    same(setting, write(tmp_path, 2))
    assert setting.pid() == pid
    os.kill(setting.pid(), signal.SIGKILL)  # an idle one that is gone is replaced
    wait_for(lambda: not setting.readers.pids())
    same(setting, write(tmp_path, 2))


def shared_files() -> set[str]:
    """Names in /dev/shm that belong to vexpert or to this process; others come and go."""
    own = ("vexpert", str(os.getpid()))
    return {name for name in os.listdir("/dev/shm") if any(word in name for word in own)}


def test_memory_is_shared_and_given_back(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long-lived slabs stay mapped in the reader while they exist, and until its next job."""
    monkeypatch.setattr(host_memory, "_pin", lambda buffer: None)
    monkeypatch.setattr(host_memory, "_unpin", lambda buffer: None)
    same(setting, write(tmp_path, 1))  # a reader is there, with its pipe and socket
    files, names = opened(), shared_files()
    memory = HostMemory(pinned=True, slab_bytes=1 << 16, shared=True)
    allocate = functools.partial(memory.allocate, dtype=torch.float32)
    host = setting.readers.load(write(tmp_path, 1), allocate, memory)
    here = LOADER.load(write(tmp_path, 1), lambda n: torch.zeros(n))
    assert torch.equal(host.packed.buffer, here.packed.buffer)
    assert shared_files() == names
    with open(f"/proc/{setting.pid()}/maps") as file:
        assert "memfd:vexpert-adapters" in file.read()
    del memory, allocate, host
    same(setting, write(tmp_path, 2))
    with open(f"/proc/{setting.pid()}/maps") as file:
        assert "memfd:vexpert-adapters" not in file.read()
    assert not opened() - files


def test_without_shared_memory_threads_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    memory = HostMemory(pinned=False, shared=True)
    memory.reserve()
    assert not memory.is_shared
    assert "read on threads of this process: no anonymous file" in caplog.text
    assert memory.allocate(3, torch.float32).shape == (3,)


def test_a_manager_whose_adapters_are_read_in_processes(tmp_path: Path) -> None:
    config = EngineConfig(max_loras=2, lora_memory=1 << 20, lora_readers=1)
    device = torch.device("cpu")
    manager = AdapterManager(TARGETS, LoraState(), config, device, torch.float32, read)
    readers = manager._host.readers
    assert readers is not None
    manager.load("one", write(tmp_path, 1).folder)
    manager.register("two", write(tmp_path, 2).folder)
    for name, seed in (("one", 1), ("two", 2)):
        assert_slot_is(manager, start(manager, name)[1], seed)
    with pytest.raises(AdapterError, match="adapter 'c': the process that read it ended with"):
        manager.load("c", write(tmp_path, "crash").folder)
    with pytest.raises(AdapterError, match=r"adapter 'w': no host memory for it.*lora_host_memory"):
        manager.load("w", write(tmp_path, "large").folder)
    memory = manager.load("m", tensors={"x": torch.ones(1)}, config={"seed": 4})
    assert memory.path == "from memory"
    manager.load("one", write(tmp_path, 3).folder, load_inplace=True)
    manager.check_integrity()
    assert len(readers.pids()) == 1
    for name in ("one", "two"):
        for ref in [ref for ref in manager._versions if ref.name == name]:
            if manager._versions[ref].life.holds:
                finish(manager, ref)
    for name in ("one", "two", "m"):
        manager.unload(name)
    manager.check_integrity()
    assert manager.usage().host_used == manager.pool.arena.used_bytes == 0
    readers.close()


def test_what_needs_the_base_weights_is_read_beside_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The demo with a full lm_head in the file: only the engine's process has the model's."""
    caplog.set_level("INFO")
    shutil.copytree(adapter_paths()["upper"], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    engine = Engine(EngineConfig(lora_readers=1, device="cpu", dtype="float32"))
    head = engine.model.parameter("lm_head.weight")
    assert head is not None
    tensors["base_model.model.lm_head.weight"] = head.cpu() * 2
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    engine.load_adapter("plain", str(adapter_paths()["upper"]))
    assert "read beside the model" not in caplog.text
    engine.load_adapter("head", str(tmp_path))
    assert "adapter head needs lm_head.weight: read beside the model" in caplog.text
    engine.check_integrity()
    assert isinstance(engine._adapters, AdapterManager)
    assert engine._adapters._host.readers is not None
    engine._adapters._host.readers.close()


PROGRAM = """
import os, sys, time
sys.path[:] = {path!r}
from pathlib import Path
from test_lora_readers import Setting, write
setting = Setting()
setting.load(write(Path({folder!r}), 1))
print(setting.pid(), flush=True)
if os.fork() == 0:
    assert setting.readers.pids() == []
    setting.load(write(Path({folder!r}), 2))
    print(setting.pid(), flush=True)
time.sleep(280)
"""


def test_readers_end_with_their_process(tmp_path: Path) -> None:
    """Killed without a chance to say so; a fork has readers of its own, and keeps no other's."""
    program = PROGRAM.format(path=sys.path, folder=str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        first, second = (int(process.stdout.readline()) for _ in range(2))
        assert first != second
        process.kill()  # the fork lives on
        wait_for(lambda: not lives(first))
        assert lives(second)
        os.killpg(process.pid, signal.SIGKILL)
        wait_for(lambda: not lives(second))
