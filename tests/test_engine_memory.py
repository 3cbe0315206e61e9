"""How large the KV cache becomes, and what the boot lines say."""

import dataclasses
import logging

import pytest
import torch
from helpers_engine import BYTES_PER_TOKEN, FakeManager, FakeModel, make_engine

from vexpert.config import EngineConfig
from vexpert.engine import memory
from vexpert.engine.memory import decide_cache
from vexpert.engine.staging import Staging
from vexpert.errors import ConfigError

INFO = FakeModel(FakeManager()).info
BLOCK = 16 * BYTES_PER_TOKEN


def test_a_given_budget_is_used_up() -> None:
    cache = decide_cache(EngineConfig(kv_cache_memory=10 * BLOCK + 5), INFO, 64)
    assert (cache.num_blocks, cache.block_bytes) == (10, BLOCK)


def test_a_cpu_takes_what_all_sequences_need() -> None:
    cache = decide_cache(EngineConfig(max_num_seqs=3), INFO, 60)
    assert cache.num_blocks == 3 * 4
    assert "3 sequences of 60 tokens" in cache.reason


def test_a_cpu_takes_a_quarter_of_free_memory_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_host_memory", lambda: 80 * BLOCK)
    cache = decide_cache(EngineConfig(), INFO, 64)
    assert (cache.num_blocks, cache.reason) == (20, "25% of free memory")


def test_a_gpu_takes_its_share_of_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * BLOCK, 100 * BLOCK))
    info = dataclasses.replace(INFO, device=torch.device("cuda"))
    cache = decide_cache(EngineConfig(gpu_memory_utilization=0.5), info, 64)
    assert cache.num_blocks == 20
    with pytest.raises(ConfigError, match="raise gpu_memory_utilization"):
        decide_cache(EngineConfig(gpu_memory_utilization=0.3), info, 64)


def test_too_small_a_cache_is_refused_with_numbers_and_remedy() -> None:
    config = EngineConfig(kv_cache_memory=3 * BLOCK)
    with pytest.raises(ConfigError) as caught:
        decide_cache(config, INFO, 64)
    message = str(caught.value)
    for part in ("48 tokens", "max_model_len=64", f"at least {4 * BLOCK}", "at most 48"):
        assert part in message
    assert decide_cache(config, INFO, 48).num_blocks == 3


def test_max_model_len_is_the_models_at_most() -> None:
    assert make_engine(max_model_len=64).max_model_len == 64
    engine = make_engine()
    config = dataclasses.replace(engine.config, max_model_len=65)
    with pytest.raises(ConfigError, match="2 to 64"):
        type(engine)(config, model=engine._runner._model, tokenizer=engine.tokenizer)


def test_the_boot_lines_name_the_budgets(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vexpert"):
        make_engine(num_blocks=40)
    text = caplog.text
    assert "model fake" in text
    assert "40 blocks of 4 tokens: 160 tokens, 2.5 full-length sequences" in text
    assert "adapters: 0.0 MiB on the device in at most 2 slots" in text


def test_staging_packs_and_unpacks_every_shape() -> None:
    import numpy as np

    staging = Staging(torch.device("meta"))  # any device but the CPU takes the packing path
    arrays = [np.arange(6).reshape(2, 3), np.arange(4), np.zeros((0,), dtype=np.int64)]
    shapes = [tuple(tensor.shape) for tensor in staging.to_device(arrays)]
    assert shapes == [(2, 3), (4,), (0,)]
    assert staging._ring[-1].tensor[:10].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
