"""Engine options: a wrong type, a wrong range or too many bytes is a ConfigError that names it."""

import dataclasses
from typing import Any

import pytest
from helpers_engine import make_engine

from vexpert.config import EngineConfig
from vexpert.engine.llm import LLM
from vexpert.errors import ConfigError

INTS = (
    "seed", "max_model_len", "block_size", "kv_cache_memory", "max_num_seqs",
    "max_num_batched_tokens", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_memory",
)  # fmt: skip
FLAGS = ("trust_remote_code", "enable_prefix_caching", "enforce_eager", "enable_lora")
TEXTS = ("model", "tokenizer", "dtype", "device", "load_format", "lora_backend")
BAD = [
    *[(name, value) for name in INTS for value in (1.5, "x", True, [1], 2**64, -(2**64))],
    *[(name, value) for name in FLAGS for value in (1, "yes", None)],
    *[(name, value) for name in TEXTS for value in (5, True, ["a"], b"a")],
    *[("gpu_memory_utilization", value) for value in ("x", True, None, 0, 2, float("nan"))],
    ("seed", None),
    ("max_loras", 0),
    ("lora_memory", -1),
    ("kv_cache_memory", 10**5000),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=range(len(BAD)))
def test_bad_options_name_themselves(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}="):
        EngineConfig(**{name: value})


def test_every_default_passes_and_whole_shares_do() -> None:
    assert EngineConfig(gpu_memory_utilization=1, seed=-(2**63)).seed == -(2**63)
    names = {spec.name for spec in dataclasses.fields(EngineConfig)}
    assert names >= {*INTS, *FLAGS, *TEXTS}


@pytest.mark.parametrize(
    ("name", "value"),
    [("kv_cache_memory", 2**62), ("lora_memory", 2**62), ("max_loras", 2**31 - 1)],
)
def test_too_many_bytes_name_the_option(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=name):
        LLM(dtype="float32", device="cpu", max_num_seqs=4, **{name: value})


def test_a_cache_that_the_device_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("out of memory\nmore")

    monkeypatch.setattr("helpers_engine.FakeModel.allocate_cache", refuse)
    with pytest.raises(ConfigError, match=r"lower kv_cache_memory.*\(out of memory\)$"):
        make_engine()
