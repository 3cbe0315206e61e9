"""What the config promises and the file lacks: refused where PEFT always saves it, else told."""

from dataclasses import replace

import pytest
import torch
from helpers_writers import fused_keys, linear_keys, random_adapter, save, tiny_map

from vexpert.errors import AdapterError
from vexpert.lora.extras import EXTRAS
from vexpert.lora.reader import read_adapter

TARGETS = tiny_map("qwen3_moe")
WANTED = random_adapter(TARGETS, 4, 2.0, torch.Generator().manual_seed(0), one_a=True)
KEYS = {
    key: x
    for key, x in {**linear_keys(WANTED, TARGETS), **fused_keys(WANTED, TARGETS)}.items()
    if "q_proj" in key or "v_proj" in key or "experts" in key
}
PEFT = {"peft_version": "0.21.2", "r": 4, "lora_alpha": 8}
NAMES = {
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "experts.down_proj"],
}
P = "base_model.model."


def read(tmp_path, drop="-", keys=KEYS, **config):
    kept = {key: x for key, x in keys.items() if drop not in key}
    folder = save(tmp_path, kept, **{**PEFT, **NAMES, **config})
    return read_adapter(folder, TARGETS, supported=frozenset(EXTRAS))


def refused(tmp_path, match, drop="-", **config):
    with pytest.raises(AdapterError, match=match):
        read(tmp_path, drop, **config)


def test_whole(tmp_path):
    assert read(tmp_path).warnings == ()


def test_a_name_without_tensors(tmp_path):
    refused(tmp_path, "target_modules names 'q_proj'", "q_proj")
    refused(tmp_path, r"target_modules names .*q_proj", "q_proj", target_modules=r".*\.q_proj")
    refused(tmp_path, "target_parameters names", "experts")


def test_a_wrapper_that_is_gone(tmp_path):
    refused(tmp_path, "target_parameters names 'mlp.experts.gate_up_proj'", "experts.base_layer")
    refused(tmp_path, "'mlp.experts.gate_up_proj'", "layers.1.mlp.experts.base_layer")


@pytest.mark.parametrize(
    "config",
    [
        {"exclude_modules": ["self_attn.q_proj"]},
        {"exclude_modules": r".*q_proj"},
        {"target_modules": ["v_proj", "gate_proj", "elsewhere"]},  # the model has no such modules
        {"target_modules": "all-linear"},
    ],
)
def test_names_that_promise_nothing(tmp_path, config):
    assert read(tmp_path, "q_proj", **config).warnings == ()


def test_layers_to_transform(tmp_path):
    config = {"target_parameters": None, "keys": {k: x for k, x in KEYS.items() if "_proj" in k}}
    assert read(tmp_path, "layers.1.", layers_to_transform=[0], **config).warnings == ()
    (warning,) = read(tmp_path, "layers.1.", **config).warnings
    assert "2 modules of the model without factors" in warning
    assert "layers 1 have none at all" in warning


def test_a_config_that_peft_did_not_write(tmp_path):
    (warning,) = read(tmp_path, "q_proj", peft_version=None).warnings[:1]
    assert "target_modules names 2 modules" in warning


def gates() -> dict[str, torch.Tensor]:
    return {f"{P}model.layers.{i}.mlp.gate.weight": torch.ones(3, 16) for i in (0, 1)}


def test_modules_to_save_of_one_layer(tmp_path):
    keys = {**KEYS, **gates()}
    assert read(tmp_path, keys=keys, modules_to_save=["gate"]).extras == {"full_router"}
    refused(
        tmp_path, r"'gate'.*layers\.1\.mlp\.gate", "1.mlp.gate", keys=keys, modules_to_save=["gate"]
    )


def test_a_bare_list_of_tokens_is_of_the_input_embedding(tmp_path):
    table = replace(TARGETS.targets["model.embed_tokens"], path="model.embed_in")
    others = {p: t for p, t in TARGETS.targets.items() if p != "model.embed_tokens"}
    targets = replace(
        TARGETS, targets={**others, table.path: table}, input_embedding="model.embed_in"
    )
    rows = {f"{P}model.embed_in.token_adapter.trainable_tokens_delta": torch.ones(2, 16)}
    keys = {key: x for key, x in KEYS.items() if "q_proj" in key}
    supported = frozenset(EXTRAS)
    folder = save(tmp_path, {**keys, **rows}, r=4, trainable_token_indices=[5, 3])
    found = read_adapter(folder, targets, supported=supported)
    assert found.tokens["model.embed_in"].indices == (5, 3)
    save(tmp_path, keys, r=4, trainable_token_indices=[5, 3])
    with pytest.raises(AdapterError, match="embed_in"):
        read_adapter(folder, targets, supported=supported)
    save(tmp_path, keys, r=4, trainable_token_indices=[])
    assert read_adapter(folder, targets, supported=supported).tokens == {}


def test_biases_of_adapted_modules(tmp_path):
    targets = tiny_map("gpt_oss")
    wanted = random_adapter(targets, 2, 2.0, torch.Generator().manual_seed(0))
    keys = {key: x for key, x in linear_keys(wanted, targets).items() if "q_proj" in key}
    biases = {
        f"{P}model.layers.{i}.self_attn.q_proj.base_layer.bias": torch.ones(16) for i in (0, 1)
    }
    supported = frozenset(EXTRAS)
    folder = save(tmp_path, {**keys, **biases}, r=2, bias="lora_only")
    assert read_adapter(folder, targets, supported=supported).extras == {"full_bias"}
    save(tmp_path, keys, r=2, bias="lora_only")
    with pytest.raises(AdapterError, match="bias='lora_only', but 2 biases"):
        read_adapter(folder, targets, supported=supported)


@pytest.mark.parametrize(
    ("named", "served", "warns"),
    [
        ("Qwen/Qwen3-30B-A3B", "unsloth/qwen3-30b-a3b", False),
        ("/root/hub/models--Qwen--Qwen3-30B-A3B/snapshots/ab12", "Qwen/Qwen3-30B-A3B", False),
        ("Qwen/Qwen3-30B-A3B", "/models/Qwen3-30B-A3B/", False),
        ("Qwen/Qwen3-30B-A3B-Base", "Qwen/Qwen3-30B-A3B", True),
        (None, "Qwen/Qwen3-30B-A3B", False),
    ],
)
def test_another_base_model_is_told(tmp_path, named, served, warns):
    folder = save(tmp_path, KEYS, **PEFT, base_model_name_or_path=named)
    found = read_adapter(folder, TARGETS, model_name=served).warnings
    assert [("is served" in text) for text in found] == ([True] if warns else [])


@pytest.mark.parametrize("name", ["OptimizedModule", "FSDPQwen3MoeForCausalLM", "Qwen3MoeModel"])
def test_wrappers_are_no_other_model(tmp_path, name):
    folder = save(tmp_path, KEYS, **PEFT, auto_mapping={"base_model_class": name})
    assert read_adapter(folder, TARGETS).modules
