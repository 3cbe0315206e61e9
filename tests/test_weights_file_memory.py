"""What a weights file may take in memory: looked at before it is read, counted, and given back."""

import gc
import io
import os
import resource
import shutil
import struct
import threading
import weakref
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers_wait import wait_for
from safetensors.torch import load_file, save_file

from vexpert.config import EngineConfig
from vexpert.demo import adapter_paths
from vexpert.engine.engine import Engine
from vexpert.errors import AdapterError
from vexpert.lora import weights_file
from vexpert.lora.files import INDEX, PICKLE, SAFETENSORS, read_tensors
from vexpert.lora.loading import LoaderPool
from vexpert.lora.parallel import run_all
from vexpert.lora.weights_file import booking

UPPER = adapter_paths()["upper"]
GIB = 1 << 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(UPPER, tmp_path / "a")
    return tmp_path / "a"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all reads."""
    found: list[int] = []
    real = os.preadv

    def count(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        found.append(sum(len(buffer) for buffer in buffers))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", count)
    return found


@pytest.fixture
def bounded() -> Iterator[None]:
    """No room for the files of these tests: to allocate for one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + GIB, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("nbytes", [3 * GIB, 200 * GIB])
def test_a_file_longer_than_its_header_says_is_refused_unread(
    folder: Path, reads: list[int], nbytes: int
) -> None:
    size = (folder / SAFETENSORS).stat().st_size
    os.truncate(folder / SAFETENSORS, nbytes)
    with pytest.raises(AdapterError, match=f"end at byte {size}, the file at {nbytes}.*copy it"):
        read_tensors(folder)
    assert sum(reads) < 100_000  # the header


@pytest.mark.usefixtures("bounded")
def test_a_file_shorter_than_its_header_says_is_refused_unread(folder: Path) -> None:
    header = b'{"x":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (GIB, 4 * GIB)
    (folder / SAFETENSORS).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 1000)
    with pytest.raises(AdapterError, match="tensors end at byte"):
        read_tensors(folder)


def test_every_byte_is_read_once(folder: Path, reads: list[int]) -> None:
    tensors = read_tensors(folder)
    wanted = load_file(folder / SAFETENSORS)
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[key], wanted[key]) for key in wanted)
    small = weights_file.POINTER_BYTES + 8
    assert sum(reads) <= (folder / SAFETENSORS).stat().st_size + small


@pytest.mark.usefixtures("bounded")
def test_a_bin_with_bytes_behind_it_is_refused_unread(folder: Path) -> None:
    torch.save(load_file(folder / SAFETENSORS), folder / PICKLE)
    (folder / SAFETENSORS).unlink()
    assert read_tensors(folder)
    os.truncate(folder / PICKLE, 3 * GIB)
    with pytest.raises(AdapterError, match=r"not the archive that torch\.save"):
        read_tensors(folder)


@pytest.mark.usefixtures("bounded")
def test_a_bin_that_grows_when_it_is_read_is_refused(folder: Path) -> None:
    plain = io.BytesIO()
    torch.save({"x": torch.zeros(4 << 20)}, plain)
    with (
        zipfile.ZipFile(plain) as source,
        zipfile.ZipFile(folder / PICKLE, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for part in source.infolist():
            packed.writestr(part.filename, source.read(part))
    (folder / SAFETENSORS).unlink()
    assert (folder / PICKLE).stat().st_size < 100_000
    with pytest.raises(AdapterError, match=r"would take 1\d{7} when read"):
        read_tensors(folder)


@pytest.mark.parametrize("name", [SAFETENSORS, PICKLE, INDEX])
def test_files_are_counted_before_they_are_read(folder: Path, reads: list[int], name: str) -> None:
    tensors = load_file(folder / SAFETENSORS)
    wanted = [(folder / SAFETENSORS).stat().st_size]
    if name != SAFETENSORS:
        (folder / SAFETENSORS).unlink()
    if name == PICKLE:
        torch.save(tensors, folder / PICKLE)
        wanted = [(folder / PICKLE).stat().st_size]
    if name == INDEX:
        parts = {"1.safetensors": list(tensors)[:3], "2.safetensors": list(tensors)[3:]}
        for file, keys in parts.items():
            save_file({key: tensors[key] for key in keys}, folder / file)
        names = {key: file for file, keys in parts.items() for key in keys}
        quoted = ",".join(f'"{key}":"{file}"' for key, file in names.items())
        (folder / INDEX).write_text('{"weight_map":{' + quoted + "}}")
        wanted = [(folder / file).stat().st_size for file in parts]
    counted: list[int] = []
    with booking(counted.append):
        read_tensors(folder)
    if name == PICKLE:  # its parts, without what a zip file has around them
        assert 0.9 * wanted[0] < counted[0] < wanted[0]
    else:
        assert counted == wanted
    reads.clear()

    def refuse(nbytes: int) -> None:
        raise AdapterError("no room")

    with booking(refuse), pytest.raises(AdapterError, match="no room"):
        read_tensors(folder)
    assert sum(reads) < 100_000


# ---- against the budget


def make(readers: int, **options: object) -> Engine:
    return Engine(
        EngineConfig.from_options(lora_readers=readers, device="cpu", dtype="float32", **options)
    )


@pytest.mark.parametrize("readers", [0, 1])
def test_a_file_above_the_host_memory_for_adapters_is_refused(folder: Path, readers: int) -> None:
    engine = make(readers, lora_host_memory=64 << 20)
    engine.load_adapter("fine", str(UPPER))
    with open(folder / SAFETENSORS, "wb") as file:
        header = b'{"x":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (GIB, 4 * GIB)
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4 * GIB)
    words = r"needs 42949\d+ bytes of host memory while its files are read.*--lora-host-memory"
    for _ in range(2):
        with pytest.raises(AdapterError, match=words):
            engine.load_adapter("large", str(folder))
    engine.load_adapter("after", str(UPPER))
    manager = engine._adapters
    assert manager._host.policy.files == 0  # type: ignore[attr-defined]
    engine.check_integrity()


def test_files_that_do_not_fit_together_are_read_one_after_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (folder / SAFETENSORS).stat().st_size
    engine = make(0, lora_host_memory=size * 3 // 2)
    policy = engine._adapters._host.policy  # type: ignore[attr-defined]
    most, at_once, gate = [], [], threading.Event()
    real = weights_file._fill

    def slow(descriptor: int, view: memoryview, start: int) -> None:
        if start > weights_file.HEAD_BYTES:
            at_once.append(threading.current_thread())
            gate.wait(0.3)
            most.append(policy.files)
            at_once.pop()
        real(descriptor, view, start)

    monkeypatch.setattr(weights_file, "_fill", slow)
    loads = [
        threading.Thread(target=engine.load_adapter, args=(name, str(folder))) for name in "abc"
    ]
    for load in loads:
        load.start()
    for load in loads:
        load.join(60)
    assert most == [size] * 3
    assert [info.name for info in engine.adapters()] == ["a", "b", "c"]
    assert policy.files == 0
    engine.check_integrity()


# ---- given back


class Memory:
    """Stands for what a load holds."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_keeps_nothing_of_what_failed(threads: int) -> None:
    held: list[weakref.ref[Memory]] = []
    told: list[str] = []

    def fail() -> None:
        memory = Memory()
        held.append(weakref.ref(memory))
        raise AdapterError("bad")

    pool = LoaderPool()
    pool.submit(lambda: run_all([fail] * 3, threads), lambda _, error: told.append(repr(error)))
    wait_for(lambda: bool(told))
    wait_for(lambda: pool.counts() == (0, 0, 0))
    assert told == ["AdapterError('bad')"]
    assert held
    wait_for(lambda: not any(memory() for memory in held))


@pytest.mark.usefixtures("no_collector")
def test_a_refused_load_keeps_no_file_in_memory(folder: Path) -> None:
    engine = make(0)
    tensors = load_file(folder / SAFETENSORS)
    save_file({key: value * float("nan") for key, value in tensors.items()}, folder / SAFETENSORS)
    size = (folder / SAFETENSORS).stat().st_size
    with pytest.raises(AdapterError, match=r"NaN|nan"):
        engine.load_adapter("bad", str(folder))

    def kept() -> list[torch.Tensor]:
        found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        return [t for t in found if t.untyped_storage().nbytes() == size]

    wait_for(lambda: not kept())
