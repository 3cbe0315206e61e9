"""Module names of files: prefixes, wrappers, older names; keys without a place are all listed."""

from dataclasses import replace

import pytest
import torch
from helpers_writers import (
    assert_same,
    fused_keys,
    linear_keys,
    per_expert_keys,
    random_adapter,
    save,
    tiny_map,
)

from vexpert.errors import AdapterError
from vexpert.lora.extras import EXTRAS
from vexpert.lora.names import Names, Place
from vexpert.lora.reader import read_adapter

TARGETS = tiny_map("qwen3_moe")
WANTED = random_adapter(TARGETS, 2, 4.0, torch.Generator().manual_seed(0))
LINEAR = linear_keys(WANTED, TARGETS)
KEYS = {**LINEAR, **per_expert_keys(WANTED, TARGETS)}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.", ""),
        ("base_model.model.model.", "base_model.model.model.language_model."),
        ("base_model.model.model.", "base_model.model.language_model.model."),
        ("base_model.model.model.", "base_model.model."),
        ("base_model.model.", "base_model.model._orig_mod."),
        (".layers.0.", ".layers.0._checkpoint_wrapped_module."),
        (".lora_A.weight", ".lora_A.default.weight"),
        (".lora_embedding_B", ".lora_embedding_B.default"),
        (".self_attn.", ".attn."),
        ("base_model.model.lm_head.", "base_model.model.model.unembed_tokens."),
    ],
)
def test_spellings_of_one_name(tmp_path, old, new):
    keys = {key.replace(old, new): x for key, x in KEYS.items()}
    assert keys.keys() != KEYS.keys()
    assert_same(read_adapter(save(tmp_path, keys, r=2, lora_alpha=8), TARGETS), WANTED)


@pytest.mark.parametrize(
    ("model", "name", "place"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.gate", "model.layers.1.mlp.gate"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3", ("up", 2)),
        ("qwen3_moe", "model.layers.1.mlp.experts.2.up_proj", ("up", 2)),
        ("qwen3_moe", "model.layers.1.mlp.experts.w1", ("gate", None)),
        ("qwen3_moe", "model.layers.1.mlp.experts.base_layer", ("inner", None)),
        ("qwen3_moe", "model.layers.1.mlp.experts", ("outer", None)),
        ("qwen3_moe", "model.layers.1.mlp.experts.3.up_proj", None),  # three experts: 0, 1, 2
        ("qwen3_moe", "model.layers.2.mlp.experts.0.up_proj", None),
        ("qwen3_moe", "model.layers.1.block_sparse_moe.experts.0.w1", None),
        ("qwen3_moe", "model.layers.1.mlp.experts.0.gate_up_proj", None),
        ("qwen3_moe", "model.layers.1.mlp.experts.0.gate_proj.0", None),
        ("qwen3_moe", "model.layers.1.mlp.experts.-1.up_proj", None),
        ("qwen3_moe", "model.layers.1.mlp.experts.²", None),
        ("qwen3_moe", "visual.layers.1.self_attn.q_proj", None),
        ("gpt_oss", "model.layers.1.mlp.experts.gate_up_projs.2", ("gate_up", 2)),
        ("gpt_oss", "model.layers.1.mlp.experts.2.gate_up_projs", None),
        ("gpt_oss", "model.layers.1.mlp.experts.down_projs", None),
    ],
)
def test_places(model, name, place):
    found = Names(tiny_map(model)).find(name)
    if isinstance(place, str):
        assert found == Place(place)
    elif place is None:
        assert found is None
    else:
        assert found is not None
        assert (found.projection, found.expert) == place


def refused(tmp_path, keys) -> str:
    with pytest.raises(AdapterError) as error:
        read_adapter(save(tmp_path, keys, r=2, lora_alpha=8), TARGETS)
    return str(error.value)


def test_every_lost_key_is_counted_and_gets_a_hint(tmp_path):
    lost = {
        key.replace("q_proj", "q_porj").replace("lm_head", "score"): x for key, x in KEYS.items()
    }
    message = refused(tmp_path, lost)
    assert "6 keys of the adapter have no place in Qwen3MoeForCausalLM" in message
    assert "layers.{0,1}.self_attn.q_porj.lora_{A,B}.weight (4 keys" in message
    assert "nearest module of the model: model.layers.N.self_attn.q_proj" in message
    assert "score.lora_{A,B}.weight (2 keys" in message


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("base_model.", "module.base_model.", "without 'module.' in front the model has it"),
        ("model.layers.1.", "model.wrap.model.layers.1.", "without 'model.wrap.' in front"),
        ("layers.1.", "layers.7.", "the model has layers 0 to 1"),
        ("experts.1.", "experts.9.", "the model has experts 0-2"),
        ("q_proj.lora_A", "q_proj.lora_down", "PEFT's name of lora_down is lora_A"),
        ("base_model.model.model", "base_model.model.visual", "of a part beside the text model"),
        ("base_model.model.", "base_model.model.base_model.model.", "wrapped a model that it had"),
    ],
)
def test_what_keys_without_a_place_may_mean(tmp_path, old, new, hint):
    assert hint in refused(tmp_path, {key.replace(old, new): x for key, x in KEYS.items()})


def test_several_adapters_in_one_file(tmp_path):
    keys = {
        key.replace("_A.weight", "_A.one.weight").replace("_B.weight", "_B.two.weight"): x
        for key, x in KEYS.items()
    }
    assert "one, two" in refused(tmp_path, keys)


def test_the_same_factor_under_two_names(tmp_path):
    key = "base_model.model.lm_head.lora_A.weight"
    other = key.replace("lm_head", "model.unembed_tokens")
    assert "same factor twice" in refused(tmp_path, {**KEYS, other: KEYS[key]})


def test_two_formats_of_one_layer(tmp_path):
    fused = random_adapter(
        TARGETS, 2, 4.0, torch.Generator().manual_seed(1), linear=False, one_a=True
    )
    keys = {**KEYS, **fused_keys(fused, TARGETS)}
    assert "another format" in refused(tmp_path, keys)


@pytest.mark.parametrize("part", ["A", "B"])
def test_half_a_pair(tmp_path, part):
    for module in ("self_attn.q_proj", "mlp.experts.1.down_proj"):
        key = f"base_model.model.model.layers.0.{module}.lora_{part}.weight"
        message = refused(tmp_path, {k: x for k, x in KEYS.items() if k != key})
        assert f"1 key is missing beside others of the same module:\n  {key} (1 key)" in message


def test_half_a_pair_of_fused_experts(tmp_path):
    fused = random_adapter(
        TARGETS, 2, 4.0, torch.Generator().manual_seed(1), linear=False, one_a=True
    )
    keys = fused_keys(fused, TARGETS)
    for missing in (key for key in keys if "layers.1" in key):
        message = refused(tmp_path, {k: x for k, x in keys.items() if k != missing})
        assert f"  {missing} (1 key)" in message


def test_all_missing_halves_are_one_list(tmp_path):
    kept = {key: x for key, x in KEYS.items() if "_B" not in key}
    message = refused(tmp_path, kept)
    assert f"{len(kept)} keys are missing" in message
    assert "layers.{0,1}.mlp.experts.{0-2}.down_proj.lora_B.weight (6 keys)" in message


def test_a_bias_alone(tmp_path):
    module = "base_model.model.model.layers.0.self_attn.v_proj"
    kept = {key: x for key, x in KEYS.items() if "v_proj" not in key}
    message = refused(tmp_path, {**kept, f"{module}.lora_B.bias": torch.ones(16)})
    assert f"{module}.lora_{{A,B}}.weight (2 keys)" in message


@pytest.mark.parametrize("module", ["self_attn.q_proj", "mlp.experts.1.up_proj"])
def test_a_magnitude_alone(tmp_path, module):
    key = f"base_model.model.model.layers.0.{module}"
    others = {k: x for k, x in KEYS.items() if module.rpartition(".")[2] not in k}
    keys = {**others, f"{key}.lora_magnitude_vector": torch.ones(10)}
    with pytest.raises(AdapterError) as error:
        read_adapter(save(tmp_path, keys, r=2, use_dora=True), TARGETS)
    assert f"{key}.lora_{{A,B}}.weight (2 keys)" in str(error.value)


def test_inner_wrapper_without_the_outer(tmp_path):
    fused = random_adapter(
        TARGETS, 2, 4.0, torch.Generator().manual_seed(1), linear=False, one_a=True
    )
    keys = {k: x for k, x in fused_keys(fused, TARGETS).items() if "base_layer" in k}
    assert "but not base_model.model.model.layers.0.mlp.experts.lora_{A,B}.weight" in refused(
        tmp_path, keys
    )


def test_a_file_of_the_vision_tower_alone(tmp_path):
    tower = "base_model.model.vision_model.layers.0.self_attn.q_proj"
    keys = {f"{tower}.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    keys["base_model.model.multi_modal_projector.linear_1.weight"] = torch.ones(2, 2)
    message = refused(tmp_path, keys)
    assert "exclude_modules" in message
    assert "another base model" not in message


def test_a_full_weight_of_one_expert(tmp_path):
    key = "base_model.model.model.layers.1.mlp.experts.0.up_proj.weight"
    message = refused(tmp_path, {**LINEAR, key: torch.ones(10, 16)})
    assert "(1 key; a full weight of one expert" in message


ROUTER = {"target_modules": ["q_proj", "gate"], "peft_version": "0.17.1", "r": 4, "lora_alpha": 8}


@pytest.mark.parametrize(
    "config",
    [
        {"exclude_modules": ["block_sparse_moe.gate"]},
        {"exclude_modules": r".*block_sparse_moe.*"},
        {"target_modules": r"model\.layers\.\d+\.(?!block_sparse_moe).*\.?(gate|q_proj)$"},
        {"exclude_modules": ["mlp.gate"]},  # transformers 5
        {"modules_to_save": ["mlp.gate"], "target_modules": ["q_proj"]},  # matched nothing there
    ],
)
@pytest.mark.parametrize("model", ["mixtral", "minimax_m2"])
def test_a_router_left_out_by_either_name(tmp_path, model, config):
    targets = replace(tiny_map("mixtral"), model_type=model)
    wanted = random_adapter(targets, 4, 2.0, torch.Generator().manual_seed(0))
    keys = {k: x for k, x in linear_keys(wanted, targets).items() if "q_proj" in k}
    assert read_adapter(save(tmp_path, keys, **{**ROUTER, **config}), targets).warnings == ()


@pytest.mark.parametrize("old", ["mlp", "block_sparse_moe"])
def test_a_lost_router_goes_by_the_files_names(tmp_path, old):
    targets = tiny_map("mixtral")
    wanted = random_adapter(targets, 4, 2.0, torch.Generator().manual_seed(0))
    keys = {k: x for k, x in linear_keys(wanted, targets).items() if "q_proj" in k or "gate" in k}
    keys = {k.replace("mlp", old): x for k, x in keys.items() if "1.mlp" not in k}
    with pytest.raises(AdapterError, match=rf"layers\.1\.{old}\.gate\S+ \(2 keys"):
        read_adapter(save(tmp_path, keys, **ROUTER), targets)
    every = {k.replace("layers.0", f"layers.{i}"): x for k, x in keys.items() for i in (0, 1)}
    assert read_adapter(save(tmp_path, every, **ROUTER), targets).warnings == ()


def test_ernies_statics_are_beside_the_router(tmp_path):
    """In transformers 4; in transformers 5 they are inside it."""
    targets = tiny_map("ernie4_5_moe")
    gate = "model.layers.1.mlp.gate"
    name = f"{gate}.moe_statics.e_score_correction_bias"
    keys = {
        f"base_model.model.{path}.weight": torch.ones(shape)
        for path in targets.targets
        if path.endswith("mlp.gate")
        for shape in [targets.parameters[f"{path}.weight"]]
    }
    config = {"modules_to_save": ["gate"], "target_modules": ["q_proj"], "r": 2}
    supported = frozenset(EXTRAS)
    found = read_adapter(save(tmp_path, keys, **config), targets, supported=supported)
    assert f"{gate}.weight" in found.full
    statics = "base_model.model.model.layers.1.mlp.moe_statics.e_score_correction_bias"
    keys[statics] = torch.ones(targets.parameters[name])
    found = read_adapter(save(tmp_path, keys, **config), targets, supported=supported)
    assert name in found.full
