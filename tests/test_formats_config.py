"""adapter_config.json: every field that matters is checked, and the message names it."""

import json
import math

import pytest
import torch
from helpers_writers import linear_keys, random_adapter, save, tiny_map

from vexpert.errors import AdapterError
from vexpert.lora.adapter_config import read_config
from vexpert.lora.reader import read_adapter
from vexpert.lora.versions import peft_version, possible_eras


def config(tmp_path, **fields):
    raw = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **fields}
    (tmp_path / "adapter_config.json").write_text(json.dumps(raw))
    return read_config(tmp_path)


BAD = [
    ({"peft_type": "ADALORA"}, "ADALORA"),
    (
        {"peft_type": None},
        'peft_type is missing: if these are LoRA factors, add "peft_type": "LORA"',
    ),
    ({"peft_type": "lora"}, "write it in capitals"),
    ({"r": 0}, "r=0"),
    ({"r": -1}, "r=-1"),
    ({"r": 2.5}, "r=2.5"),
    ({"r": True}, "r=True"),
    ({"lora_alpha": math.nan}, "lora_alpha=nan"),
    ({"lora_alpha": math.inf}, "lora_alpha=inf"),
    ({"lora_alpha": "8"}, "lora_alpha='8'"),
    ({"lora_alpha": 10**400}, "finite"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern"),
    ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
    ({"rank_pattern": {"q_proj(": 2}}, "regular expression"),
    ({"alpha_pattern": {"q_proj": math.nan}}, "alpha_pattern"),
    ({"bias": "some"}, "none, all, lora_only"),
    ({"use_rslora": "yes"}, "use_rslora"),
    ({"use_dora": 1}, "use_dora"),
    ({"lora_B_layout": "column_blocks"}, "rank_major, grouped_by_expert"),
    ({"lora_B_layout": 3}, "lora_B_layout"),
    ({"modules_to_save": "lm_head"}, "modules_to_save"),
    ({"target_parameters": [1]}, "target_parameters"),
    ({"trainable_token_indices": [1, 1]}, "repeated"),
    ({"trainable_token_indices": ["a"]}, "token ids"),
    ({"peft_version": "latest"}, "peft_version"),
    ({"peft_version": 0.21}, "peft_version"),
    ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
    ({"init_lora_weights": "olora"}, "as it was saved before training"),
    ({"init_lora_weights": "loftq"}, "no conversion of LoftQ"),
    ({"init_lora_weights": "newinit"}, "'newinit': an initialisation that this version does not"),
    ({"use_qalora": True}, "use_qalora"),
    ({"layer_replication": [[0, 4]]}, "layer_replication"),
    ({"alora_invocation_tokens": [1, 2]}, "PEFT cannot merge it either"),
    ({"use_newlora": True}, "use_newlora"),
    ({"newlora_config": {"x": 1}}, "newlora_config"),
]


@pytest.mark.parametrize(("fields", "named"), BAD, ids=lambda value: str(value)[:40])
def test_bad_field(tmp_path, fields, named):
    with pytest.raises(AdapterError, match=named.replace("(", r"\(")):
        config(tmp_path, **fields)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"x"', "nul", "[" * 100_000, '{"r": 1' + "0" * 5000]
)
def test_broken_json(tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        read_config(tmp_path)


def test_not_utf8(tmp_path):
    (tmp_path / "adapter_config.json").write_bytes(b'{"peft_type": "\xff"}')
    with pytest.raises(AdapterError, match="JSON"):
        read_config(tmp_path)


def test_fields_that_change_nothing(tmp_path):
    found = config(
        tmp_path,
        lora_dropout=0.1,
        init_lora_weights="gaussian",
        layers_to_transform=[1],
        fan_in_fan_out=False,
        task_type="CAUSAL_LM",
        target_modules="all-linear",
        use_newlora=False,
        newlora_config=None,
        trainer_note="x",
    )
    assert found.warnings == ("adapter_config.json: unknown fields ignored: trainer_note",)


@pytest.mark.parametrize("kind", ["SEQ_CLS", "TOKEN_CLS", "FEATURE_EXTRACTION", ["x"]])
def test_an_adapter_of_another_task_is_told(tmp_path, kind):
    (warning,) = config(tmp_path, task_type=kind).warnings
    assert "task_type" in warning
    assert "another head" in warning


def test_fan_in_fan_out_is_told(tmp_path):
    """PEFT sets it to false where the module is an nn.Linear, with a warning."""
    (warning,) = config(tmp_path, fan_in_fan_out=True).warnings
    assert "fan_in_fan_out" in warning
    assert "without effect" in warning
    assert config(tmp_path, fan_in_fan_out=None, task_type=None).warnings == ()
    with pytest.raises(AdapterError, match=r"fan_in_fan_out=.*true or false"):
        config(tmp_path, fan_in_fan_out="yes")


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_leave_the_base_as_it_is(tmp_path, init):
    assert config(tmp_path, init_lora_weights=init).warnings == ()


def test_missing_alpha_is_pefts_default_with_a_warning(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    found = read_config(tmp_path)
    assert found.scale("q_proj", 2, []) == 4.0
    assert "lora_alpha" in found.warnings[0]


def test_patterns_match_as_pefts(tmp_path):
    """The whole name, or the part after a dot; the first pattern that matches wins."""
    found = config(
        tmp_path,
        peft_version="0.15.0",
        rank_pattern={"q_proj": 2, ".*": 7},
        alpha_pattern={"layers.1.mlp.experts.down_proj": 20, r".*\.gate_up_proj": 12},
    )
    assert found.patterns.ranks("model.layers.0.self_attn.q_proj") == {2}
    assert found.patterns.ranks("model.layers.0.self_attn.k_q_proj") == {7}
    assert found.scale("model.layers.1.mlp.experts.down_proj", 5, []) == 4.0
    assert found.scale("model.layers.11.mlp.experts.down_proj", 4, []) == 2.0
    assert found.scale("model.layers.0.mlp.experts.gate_up_proj", 4, []) == 3.0


def test_rslora_divides_by_the_root_of_the_files_rank(tmp_path):
    assert config(tmp_path, use_rslora=True).scale("q_proj", 16, []) == 2.0


@pytest.mark.parametrize(
    ("text", "version"),
    [("0.18", (0, 18, 0)), ("0.19.1", (0, 19, 1)), ("0.18.2.dev0@abc", (0, 18, 2)), ("x", None)],
)
def test_versions(text, version):
    assert peft_version(text) == version


def test_eras_without_a_version():
    assert possible_eras(None, {"loftq_config"}) == ("up to 0.18",)
    assert possible_eras(None, {"arrow_config"}) == ("up to 0.18",)
    assert possible_eras(None, {"use_bdlora"}) == ("0.19.0", "from 0.19.1")
    assert possible_eras(None, {"kasa_config"}) == ("from 0.19.1",)
    assert possible_eras("0.19.0", {"kasa_config"}) == ("0.19.0",)


def test_another_base_class_is_refused(tmp_path):
    targets = tiny_map("qwen3_moe")
    weights = random_adapter(targets, 2, 2.0, torch.Generator().manual_seed(0))
    keys = linear_keys(weights, targets)
    keys = {key: x for key, x in keys.items() if "q_proj" in key}
    save(tmp_path, keys, r=2, auto_mapping={"base_model_class": "MixtralForCausalLM"})
    with pytest.raises(AdapterError, match="MixtralForCausalLM"):
        read_adapter(tmp_path, targets)
    save(tmp_path, keys, r=2, auto_mapping={"base_model_class": "Qwen3MoeModel"})
    assert read_adapter(tmp_path, targets).modules
