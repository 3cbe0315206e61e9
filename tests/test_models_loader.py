"""Loading: folders of safetensors, dummy weights, dtypes, devices, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import Driver, random_sequences, reference_logits, relative_error, tiny_model

from vexpert.config import EngineConfig
from vexpert.errors import ConfigError, ModelError
from vexpert.models.loader import load_model, load_tokenizer


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(**({"model": str(folder), "device": "cpu"} | options))


def saved(folder: Path, model_type: str = "qwen3_moe", size: str = "5GB", **changes: Any) -> Path:
    tiny_model(model_type).save_pretrained(folder, max_shard_size=size)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize("size", ["5GB", "20KB"], ids=["one-file", "sharded"])
@pytest.mark.parametrize("enable_lora", [False, True])
def test_weights_from_safetensors(tmp_path: Path, size: str, enable_lora: bool) -> None:
    saved(tmp_path, size=size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (size == "20KB")
    sequences = random_sequences(2, 12, 3)
    want = reference_logits(tiny_model("qwen3_moe"), sequences)
    model = load_model(config_of(tmp_path, enable_lora=enable_lora))
    got = Driver(model).play(sequences)
    assert relative_error(torch.cat(got), torch.cat(want)) < 1e-5


def test_facts(tmp_path: Path) -> None:
    info = load_model(config_of(saved(tmp_path))).info
    assert (info.model_type, info.vocab_size, info.max_model_len) == ("qwen3_moe", 61, 128)
    assert info.eos_token_ids == (2,)
    assert info.dtype == torch.float32
    assert info.cache_bytes_per_token == 2 * 2 * 2 * 12 * 4  # layers, k and v, heads, width, bytes
    weights = tiny_model("qwen3_moe").parameters()
    assert info.weight_bytes == sum(p.numel() * 4 for p in weights)


def test_latent_cache_is_small(tmp_path: Path) -> None:
    info = load_model(config_of(saved(tmp_path, "deepseek_v3"))).info
    assert info.cache_bytes_per_token == 2 * (24 + 8) * 4  # layers, latent and rotary part, bytes


@pytest.mark.parametrize(
    ("asked", "stated", "dtype"),
    [
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", None, torch.float32),
        ("float16", "bfloat16", torch.float16),
        ("bfloat16", "float32", torch.bfloat16),
        ("float32", "float16", torch.float32),
    ],
)
def test_dtype(tmp_path: Path, asked: str, stated: str | None, dtype: torch.dtype) -> None:
    saved(tmp_path, dtype=stated)
    model = load_model(config_of(tmp_path, dtype=asked))
    assert model.info.dtype == dtype
    sequences = random_sequences(2, 12, 3)
    want = reference_logits(tiny_model("qwen3_moe"), sequences)
    got = Driver(model).play(sequences)
    assert relative_error(torch.cat(got), torch.cat(want)) < 0.1


def test_dummy_weights_need_no_files_but_the_config(tmp_path: Path) -> None:
    saved(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    state = torch.random.get_rng_state()
    ids = random_sequences(1, 8, 0)
    runs = []
    for seed in (0, 0, 1):
        model = load_model(config_of(tmp_path, load_format="dummy", seed=seed))
        runs.append(Driver(model).play(ids)[0])
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert torch.equal(state, torch.random.get_rng_state())


def test_two_models_in_turn(tmp_path: Path) -> None:
    """Step metadata belongs to a model, not to the process."""
    sequences = random_sequences(2, 10, 5)
    drivers, wanted = [], []
    for name in ("qwen3_moe", "deepseek_v2"):
        drivers.append(Driver(load_model(config_of(saved(tmp_path / name, name)))))
        wanted.append(reference_logits(tiny_model(name), sequences))
    for driver, want in [*zip(drivers, wanted, strict=True)] * 2:
        got = driver.play(sequences)
        assert relative_error(torch.cat(got), torch.cat(want)) < 1e-5


def test_long_rope_stops_at_its_original_length(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 6,
        "long_factor": [3.0] * 6,
        "original_max_position_embeddings": 32,
        "factor": 4.0,
    }
    saved(tmp_path, "qwen3", rope_parameters=rope)
    assert load_model(config_of(tmp_path)).info.max_model_len == 32


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_model(config_of(tmp_path / "nowhere"))


def test_missing_weights_are_named(tmp_path: Path) -> None:
    saved(tmp_path)
    saved(tmp_path / "other", num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"lacks .* weights, such as 'model.layers.2"):
        load_model(config_of(tmp_path / "other"))


def test_no_weights(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(config_of(tmp_path))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "jamba"}, "recurrent state"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "clip"}, "no causal language model"),
        ({"model_type": "gemma4"}, "multimodal"),
        ({"model_type": "mpt"}, "not among the architectures verified"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized .fp8."),
    ],
)
def test_refused_before_weights_are_read(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    base = {"model_type": "qwen3_moe", "architectures": []}
    (tmp_path / "config.json").write_text(json.dumps(base | changes))
    with pytest.raises(ModelError, match=reason):
        load_model(config_of(tmp_path))


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:99"])
def test_bad_device(tmp_path: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=device):
        load_model(config_of(saved(tmp_path), device=device))


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        load_tokenizer(config_of(saved(tmp_path)))


@pytest.mark.parametrize("name", ["/no/such/model", "./nowhere", "../nowhere", "~/nowhere"])
def test_a_path_without_a_folder(name: str) -> None:
    with pytest.raises(ModelError, match="the folder does not exist") as caught:
        load_model(EngineConfig(model=name, device="cpu"))
    assert "Repo id" not in str(caught.value)


def test_an_adapter_in_place_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="an adapter, not a model: serve its base model with"):
        load_model(config_of(tmp_path))
