"""500 adapters of which 16 fit, under traffic that loads, replaces, unloads and aborts."""

from pathlib import Path
from random import Random

import pytest
from helpers_churn import KINDS, Churn, link, opened, vexpert_threads
from helpers_demo import expected
from helpers_wait import on_a_thread, wait_for

from vexpert.config import EngineConfig
from vexpert.demo import adapter_paths, model_path
from vexpert.engine.admission import MAX_PASSED
from vexpert.engine.engine import Engine
from vexpert.engine.sampling_params import SamplingParams
from vexpert.lora.manager import AdapterManager

NAMES = 500
FIT = 16
REQUESTS = 160


def make(tmp_path: Path, **options: object) -> Engine:
    options = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 1 << 24, **options}
    return Engine(EngineConfig.from_options(model=str(model_path()), **options))


def adapter_bytes(engine: Engine) -> int:
    """Bytes of the four on average, rounded up."""
    sizes = []
    for kind, path in adapter_paths().items():
        sizes.append(engine.load_adapter(f"size of {kind}", str(path)).host_bytes)
        engine.unload_adapter(f"size of {kind}")
    return -(-sum(sizes) // len(sizes))


@pytest.fixture(scope="module")
def size(tmp_path_factory: pytest.TempPathFactory) -> int:
    return adapter_bytes(make(tmp_path_factory.mktemp("size")))


def test_churn(tmp_path: Path, size: int) -> None:
    random = Random(5)
    kinds = {f"user{i}": KINDS[i % 4] for i in range(NAMES)}
    for name, kind in kinds.items():
        link(kind, tmp_path / "dir" / name)
    files = opened()
    engine = make(
        tmp_path,
        lora_memory=FIT * size,
        lora_host_memory=40 * size,
        lora_dir=str(tmp_path / "dir"),
        lora_dir_interval=3600.0,
        max_num_seqs=24,
        max_requests_per_lora=8,
    )
    assert [info.state for info in engine.adapters()] == ["registered"] * NAMES
    churn = Churn(engine, random, kinds, adapter_paths())
    while len(churn.done) < REQUESTS:
        for _ in range(random.randint(0, 4) if len(churn.asks) < 60 else 0):
            churn.ask()
        acts = [churn.replace, churn.unload, churn.abort, churn.disconnect, None]
        act = random.choices(acts, [12, 8, 10, 2, 68])[0]
        if act is not None:
            act()
        churn.step()
        churn.wait_for_reads()
        if churn.steps % 10 == 0:
            engine.check_integrity()
            usage = engine.stats().adapters
            assert usage.device_used <= usage.device_bytes
    while churn.asks:
        churn.step()
        churn.wait_for_reads()
    assert not churn.mixed_up()
    assert len(churn.wrong()) <= 0.03 * len(churn.done)
    assert all(churn.counts[what] > 3 for what in ("reload", "unload", "abort", "404"))
    assert len({ask.name for ask in churn.done}) > 60
    usage = engine.stats().adapters
    assert usage.evictions > 20
    assert usage.device_used - usage.device_payload <= 0.05 * usage.device_used
    # Every request ends within: its reading and copying, 64 that pass it, and the older ones.
    assert churn.longest_wait < 400
    assert churn.most_passed <= MAX_PASSED
    assert_nothing_is_left(engine, files)


def test_loads_among_many_requests_and_few_steps(tmp_path: Path, size: int) -> None:
    """As where steps are slow beside what comes between: a load is made, or refused at once."""
    kinds = {f"user{i}": KINDS[i % 4] for i in range(40)}
    files = opened()
    engine = make(tmp_path, max_loras=2, lora_host_memory=6 * size, max_num_seqs=8)
    for name, kind in kinds.items():
        engine.register_adapter(name, str(link(kind, tmp_path / name)))
    churn = Churn(engine, Random(3), kinds, adapter_paths())

    def run() -> None:
        while len(churn.done) < 40:
            while len(churn.asks) < 24:
                churn.ask()
            churn.replace()
            churn.step()
            engine.check_integrity()
        while churn.asks:
            churn.step()

    on_a_thread(run, 60)
    assert churn.counts["full"] > 3
    assert churn.counts["reload"] > 3
    assert not churn.wrong()
    assert_nothing_is_left(engine, files)


def assert_nothing_is_left(engine: Engine, files: set[tuple[str, str]]) -> None:
    reading = {"loading", "draining"}  # requests that went away leave reads to their end
    wait_for(lambda: not reading & {info.state for info in engine.adapters()})
    for info in engine.adapters():
        engine.unload_adapter(info.name)
    engine.check_integrity()
    assert engine.adapters() == []
    usage = engine.stats().adapters
    assert (usage.device_used, usage.host_used, usage.host_adapters) == (0, 0, 0)
    assert engine.stats().kv_blocks_used == 0
    manager = engine._adapters
    assert isinstance(manager, AdapterManager)
    assert not manager._versions
    assert len(manager._host.policy) == 0
    wait_for(lambda: "vexpert-loader" not in vexpert_threads() and not opened() - files)


def test_a_reload_during_a_stream(tmp_path: Path, size: int) -> None:
    """The running stream is the old version to its end, the next request is the new one."""
    engine = make(tmp_path, lora_memory=4 * size)
    paths = adapter_paths()
    engine.load_adapter("x", str(paths["upper"]))
    word = "streaming"
    text = engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": word}], add_generation_prompt=True, tokenize=False
    )
    tokens = engine.tokenizer.encode(text, add_special_tokens=False)
    params = SamplingParams(temperature=0.0, max_tokens=16)
    engine.add_request("old", None, tokens, params, "x")
    while not (outputs := engine.step()):
        pass
    assert outputs[0].outputs[0].text == "S"
    engine.load_adapter("x", str(paths["reverse"]), load_inplace=True)
    engine.add_request("new", None, tokens, params, "x")
    answers = {}
    while engine.has_unfinished():
        for output in engine.step():
            answers[output.request_id] = (output.outputs[0].text, output.num_cached_tokens)
        engine.check_integrity()
    assert answers == {"old": (word.upper(), 0), "new": (expected("reverse", word), 0)}
    assert len(engine.adapters()) == 1
