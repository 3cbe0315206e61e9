"""Pinned slabs in front of a GPU, and copies beside its kernels. What needs no GPU runs without."""

import gc
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_lora_manager import (
    TARGETS,
    FileReader,
    acquire,
    assert_slot_is,
    finish,
    folder,
)

from vexpert.config import EngineConfig
from vexpert.lora import host_memory
from vexpert.lora.host_memory import HostMemory
from vexpert.lora.manager import AdapterManager
from vexpert.lora.transfer import Copier, make_transfer
from vexpert.lora.types import LoraState

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Addresses that are pinned now: registering memory is only noted."""
    found: set[int] = set()
    monkeypatch.setattr(host_memory, "_pin", lambda buffer: found.add(buffer.data_ptr()))
    monkeypatch.setattr(host_memory, "_unpin", lambda buffer: found.remove(buffer.data_ptr()))
    return found


def test_slabs_are_divided_by_the_byte_and_given_back(pinned: set[int]) -> None:
    memory = HostMemory(pinned=True, slab_bytes=1000)
    memory.reserve()
    memory.reserve()
    assert (memory.slab_bytes, len(pinned)) == (1008, 1)
    buffers = [memory.allocate(100, torch.float32) for _ in range(2)]  # 400 bytes each
    for value, buffer in enumerate(buffers):
        buffer.fill_(value)
    assert len(pinned) == 1
    large = memory.allocate(500, torch.float32)  # more than a slab
    assert memory.slab_bytes == 1008 + 2000
    assert [int(buffer.sum()) for buffer in buffers] == [0, 100]
    memory.free(large)
    assert (memory.slab_bytes, len(pinned)) == (1008 + 2000, 2)  # it stays, for the next load
    memory.free(memory.allocate(500, torch.float32))
    assert len(pinned) == 2
    memory.free(memory.allocate(600, torch.float32))  # and goes where it is too small
    assert (memory.slab_bytes, len(pinned)) == (1008 + 2400, 2)
    memory.free(buffers[0])
    again = memory.allocate(100, torch.float32)
    assert again.data_ptr() == buffers[0].data_ptr()
    for buffer in (again, buffers[1]):
        memory.free(buffer)
    assert (memory.slab_bytes, len(pinned)) == (1008 + 2400, 2)
    del memory
    gc.collect()
    assert not pinned


def test_plain_memory_needs_no_slab() -> None:
    memory = HostMemory(pinned=False)
    memory.reserve()
    buffer = memory.allocate(10, torch.bfloat16)
    assert buffer.shape == (10,)
    memory.free(buffer)
    assert memory.slab_bytes == 0


def test_a_copy_that_finds_no_thread_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    copier = Copier(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(
        record_event=lambda: object()))  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        transfer = make_transfer(torch.ones(4), torch.zeros(4), copier)
        with pytest.raises(RuntimeError, match="can't start"):
            transfer.advance(1 << 20)
    cancelling = threading.Thread(target=transfer.cancel, daemon=True)
    cancelling.start()
    cancelling.join(10)
    assert not cancelling.is_alive()  # nobody copies, so there is nothing to wait for
    served = threading.Event()
    monkeypatch.setattr("vexpert.lora.transfer._serve", lambda jobs, device: served.set())
    make_transfer(torch.ones(4), torch.zeros(4), copier).advance(1 << 20)
    assert served.wait(60)  # the next one finds a thread


@pytest.mark.gpu
@needs_gpu
def test_a_copy_runs_beside_the_steps_and_arrives_whole() -> None:
    device = torch.device("cuda")
    memory = HostMemory(pinned=True, slab_bytes=1 << 26, shared=True)
    memory.allocate(1000, torch.float32)  # the next does not begin where a pinned piece does
    source = memory.allocate(1 << 23, torch.float32)
    assert source.is_pinned()
    source.copy_(torch.arange(1 << 23))
    target = torch.zeros(1 << 23, device=device)
    transfer = make_transfer(source, target, Copier(device))
    assert not transfer.is_done()
    work = torch.ones(2048, 2048, device=device)
    while not transfer.is_done():
        transfer.advance(1 << 20)
        work = work @ work / 2048
    assert torch.equal(target.cpu(), source)
    assert bool((work == 1).all())
    memory.free(source)


@pytest.mark.gpu
@needs_gpu
def test_a_copy_that_is_cancelled_writes_no_more() -> None:
    device = torch.device("cuda")
    memory = HostMemory(pinned=True, slab_bytes=1 << 28)
    source = memory.allocate(1 << 26, torch.float32).fill_(1)
    target = torch.zeros(1 << 26, device=device)
    transfer = make_transfer(source, target, Copier(device))
    transfer.advance(1 << 16)
    transfer.cancel()
    target.zero_()
    torch.cuda.synchronize()
    assert not bool(target.any())


@pytest.mark.gpu
@needs_gpu
def test_adapters_come_and_go_on_a_gpu(tmp_path: Path) -> None:
    """Three fit, seven take turns, with moves of those that are in use."""
    config = EngineConfig(max_loras=3, lora_memory=8000, lora_host_memory=1 << 16)
    device = torch.device("cuda")
    manager = AdapterManager(TARGETS, LoraState(), config, device, torch.float32, FileReader())
    for seed in range(7):
        manager.register(f"a{seed}", folder(tmp_path, f"a{seed}", seed))
    kept = manager.resolve("a0")
    manager.hold(kept)
    slot = acquire(manager, kept)
    for seed in (1, 2, 3, 4, 5, 6, 1, 2, 3):
        ref = manager.resolve(f"a{seed}")
        manager.hold(ref)
        assert_slot_is(manager, acquire(manager, ref), seed)
        assert_slot_is(manager, slot, 0)
        finish(manager, ref)
        manager.check_integrity()
    finish(manager, kept)
    for info in manager.list():
        manager.unload(info.name)
    assert manager.pool.arena.used_bytes == 0
    manager.check_integrity()
