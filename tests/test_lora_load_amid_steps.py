"""A load by the thread that steps waits for nothing that only steps can bring, and for all else."""

import threading
import time
from pathlib import Path

import pytest
from helpers_churn import link
from helpers_wait import on_a_thread, wait_for

from vexpert.config import EngineConfig
from vexpert.demo import adapter_paths, model_path
from vexpert.engine.engine import Engine
from vexpert.engine.llm import LLM
from vexpert.engine.sampling_params import SamplingParams
from vexpert.errors import AdapterError
from vexpert.lora.adapter_version import Version
from vexpert.lora.manager import AdapterManager
from vexpert.lora.pack import Allocate
from vexpert.lora.source import HostCopy

FULL = r"bytes\) is full of adapters that wait .*: step the engine.*--lora-host-memory"


def demo_engine(**options: object) -> Engine:
    options = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 1 << 24, **options}
    return Engine(EngineConfig.from_options(model=str(model_path()), **options))


@pytest.fixture(scope="module")
def size() -> int:
    """Bytes of `upper`, the only adapter here, on the host."""
    return demo_engine().load_adapter("upper", str(adapter_paths()["upper"])).host_bytes


def manager_of(engine: Engine) -> AdapterManager:
    manager = engine._adapters
    assert isinstance(manager, AdapterManager)
    return manager


class Crowd:
    """An engine with one slot, whose requests want `wanted` names; host memory takes three."""

    def __init__(self, tmp_path: Path, size: int, wanted: int, readers: int) -> None:
        self.engine = demo_engine(
            max_loras=1, lora_host_memory=3 * size, lora_readers=readers, max_num_seqs=4
        )
        self.manager = manager_of(self.engine)
        self.names = [f"user{index}" for index in range(wanted)]
        for name in (*self.names, "new"):
            self.engine.register_adapter(name, str(link("upper", tmp_path / name)))
        self.path = str(adapter_paths()["upper"])

    def ask(self) -> None:
        tokens = self.engine.tokenizer.encode("abc", add_special_tokens=False)
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        for name in self.names:
            self.engine.add_request(name, None, tokens, params, name)
        self.settle()

    def settle(self) -> None:
        """Until host memory is full and every read that is begun waits."""

        def is_full() -> bool:
            usage = self.manager.usage()
            waiting, busy, _ = self.manager._host._threads.counts()
            return usage.loads >= 3 and (not waiting or busy > 0)

        wait_for(is_full)
        time.sleep(0.1)

    def load(self) -> int:
        """The version that `new` means once it is loaded anew."""
        return self.engine.load_adapter("new", self.path, load_inplace=True).version

    def run(self) -> None:
        while self.engine.has_unfinished():
            for output in self.engine.step():
                assert output.error is None
            self.engine.check_integrity()

    def assert_nothing_is_left(self) -> None:
        for info in self.engine.adapters():
            self.engine.unload_adapter(info.name)
        usage = self.manager.usage()
        assert (usage.host_used, usage.loading, usage.host_adapters) == (0, 0, 0)
        host = self.manager._host
        assert (host.policy.files, len(host._waiting)) == (0, 0)
        wait_for(lambda: host._threads._started == 0)
        self.engine.check_integrity()


@pytest.mark.parametrize("wanted", [3, 8], ids=["its read waits", "its job is queued"])
@pytest.mark.parametrize(("readers", "has_stepped"), [(0, False), (0, True), (1, True)])
def test_a_load_by_who_steps_is_refused_where_it_needs_steps(
    tmp_path: Path, size: int, wanted: int, readers: int, has_stepped: bool
) -> None:
    crowd = Crowd(tmp_path, size, wanted, readers)

    def use() -> None:
        if has_stepped:
            crowd.engine.step()
        crowd.ask()
        before, listed = crowd.manager.usage(), crowd.engine.adapters()
        for _ in range(2):
            with pytest.raises(AdapterError, match=rf"'new': host memory \({3 * size} {FULL}"):
                crowd.load()
            after = crowd.manager.usage()
            assert (after.loading, after.host_used) == (before.loading, before.host_used)
            assert crowd.engine.adapters() == listed
            crowd.engine.check_integrity()
        crowd.run()
        former = crowd.manager.resolve("new").version
        assert crowd.load() > former

    on_a_thread(use)
    crowd.assert_nothing_is_left()


@pytest.mark.parametrize(("wanted", "readers"), [(3, 0), (8, 0), (8, 1)])
def test_a_load_by_another_thread_waits_for_steps(
    tmp_path: Path, size: int, wanted: int, readers: int
) -> None:
    crowd = Crowd(tmp_path, size, wanted, readers)
    crowd.ask()
    loaded: list[int] = []
    load = threading.Thread(target=lambda: loaded.append(crowd.load()), daemon=True)
    load.start()
    load.join(0.3)
    assert load.is_alive()  # it waits
    crowd.run()
    load.join(30)
    assert loaded == [crowd.manager.resolve("new").version]
    crowd.assert_nothing_is_left()


def test_a_load_waits_once_another_thread_has_begun_to_step(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that loads has stepped last, but others' requests fill the host, and they step."""
    crowd = Crowd(tmp_path, size, wanted=8, readers=0)
    crowd.engine.step()
    host, is_full = crowd.manager._host, threading.Event()
    load = host._load

    def load_late(version: Version, allocate: Allocate) -> HostCopy:
        if version.ref.name == "new":
            assert is_full.wait(30)
        return load(version, allocate)

    monkeypatch.setattr(host, "_load", load_late)

    def serve() -> None:
        wait_for(lambda: crowd.manager.is_loading("new"))
        crowd.ask()
        is_full.set()
        while crowd.engine.has_unfinished():
            time.sleep(0.1)  # steps are slow beside looks at whether reads go on
            crowd.engine.step()

    other = threading.Thread(target=serve, daemon=True)
    other.start()
    version = crowd.load()
    other.join(30)
    assert version == crowd.manager.resolve("new").version
    crowd.assert_nothing_is_left()


def test_an_llm_loads_whatever_fits_once_its_call_has_returned(tmp_path: Path, size: int) -> None:
    llm = LLM.from_engine(demo_engine(max_loras=1, lora_host_memory=2 * size))
    params = SamplingParams(temperature=0.0, max_tokens=2)

    def use() -> None:
        for index in range(6):
            name = f"user{index}"
            folder = link("upper", tmp_path / name)
            llm.load_adapter(name, str(folder))
            llm.load_adapter(name, str(folder), load_inplace=True)
            llm.generate("abc", params, adapter=name)

    on_a_thread(use)
    llm.engine.check_integrity()


@pytest.mark.parametrize("readers", [0, 1])
def test_a_read_that_nobody_wants_any_more_is_given_up(
    readers: int, tmp_path: Path, size: int
) -> None:
    """Its requests go while it waits for room: the adapter is as it was, and serves the next."""
    crowd = Crowd(tmp_path, size, wanted=4, readers=readers)
    crowd.ask()
    engine = crowd.engine
    (last,) = [info.name for info in engine.adapters() if info.state == "loading"]
    assert engine.abort(last)

    def is_registered() -> bool:
        return next(info for info in engine.adapters() if info.name == last).state == "registered"

    wait_for(is_registered)
    engine.check_integrity()
    assert engine.stats().adapters.errors == 0
    tokens = engine.tokenizer.encode("abc", add_special_tokens=False)
    engine.add_request("again", None, tokens, SamplingParams(max_tokens=4), last)
    crowd.run()
    assert engine.stats().adapters.loads == 4
    engine.check_integrity()
