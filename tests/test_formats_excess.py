"""What the file holds and the config leaves out: PEFT would drop it, so it is refused, or told."""

from typing import Any

import pytest
import torch
from helpers_writers import (
    NAMES,
    W_NAMES,
    fused_keys,
    linear_keys,
    per_expert_keys,
    random_adapter,
    save,
    tiny_map,
)

from vexpert.errors import AdapterError
from vexpert.lora.extras import EXTRAS
from vexpert.lora.reader import read_adapter

TARGETS = tiny_map("qwen3_moe")
WANTED = random_adapter(TARGETS, 4, 2.0, torch.Generator().manual_seed(0), one_a=True)
LINEAR = linear_keys(WANTED, TARGETS)
FUSED = fused_keys(WANTED, TARGETS)
SINGLE = per_expert_keys(WANTED, TARGETS)
ATTENTION = {key: x for key, x in LINEAR.items() if "self_attn" in key}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PEFT = {"peft_version": "0.21.2", "r": 4, "lora_alpha": 8}


def read(tmp_path, keys, **config):
    folder = save(tmp_path, keys, **{**PEFT, **config})
    return read_adapter(folder, TARGETS, supported=frozenset(EXTRAS))


MEANS_LESS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "names": (
        ATTENTION,
        {"target_modules": ["q_proj", "k_proj"]},
        r"8 keys (?s:.*)\{0,1\}\.self_attn\.v_proj\S+ \(4 keys(?s:.*)add 'o_proj', 'v_proj' to "
        "target_modules; else remove",
    ),
    "pattern": (
        ATTENTION,
        {"target_modules": r".*\.(q|k|v)_proj"},
        "let the pattern target_modules match 'o_proj'",
    ),
    "layers": (
        ATTENTION,
        {"target_modules": PROJECTIONS, "layers_to_transform": [0]},
        r"layers\.1\.self_attn\.q_proj(?s:.*)add 1 to layers_to_transform",
    ),
    "exclude": (
        ATTENTION,
        {"target_modules": PROJECTIONS, "exclude_modules": ["o_proj"]},
        r"o_proj\S+ \(4 keys(?s:.*)keep exclude_modules from matching",
    ),
    "down alone": (
        FUSED,
        {"target_parameters": ["mlp.experts.down_proj"]},
        r"experts\.base_layer\.lora\S+ \(4 keys(?s:.*)add 'experts.gate_up_proj' to target_param",
    ),
    "gate_up alone": (
        FUSED,
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        r"experts\.lora\S+ \(4 keys(?s:.*)add 'experts.down_proj' to target_parameters",
    ),
    "no parameters": (
        {**ATTENTION, **FUSED},
        {"target_modules": PROJECTIONS},
        "8 keys(?s:.*)add 'experts.gate_up_proj', 'experts.down_proj' to target_parameters",
    ),
    "single experts": (
        {**ATTENTION, **SINGLE},
        {"target_modules": [*PROJECTIONS, "gate_proj", "up_proj"]},
        r"\{0,1\}\.mlp\.experts\.\{0-2\}\.down_proj\S+ \(12 keys(?s:.*)add 'down_proj'",
    ),
    "embedding": (
        LINEAR,
        {"target_modules": [*PROJECTIONS, "gate", "lm_head"]},
        r"embed_tokens\.lora_embedding_\{A,B\} \(2 keys",
    ),
}


@pytest.mark.parametrize("name", MEANS_LESS)
def test_a_config_that_means_less(tmp_path, name):
    keys, config, message = MEANS_LESS[name]
    with pytest.raises(AdapterError, match=message):
        read(tmp_path, keys, **config)
    config = {**config, "peft_version": None}  # other writers fill the config less exactly
    warnings = " ".join(read(tmp_path, keys, **config).warnings)
    assert "applied, though PEFT would drop them" in warnings


ROWS = {
    "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(1, 16)
}
HEAD = {"base_model.model.lm_head.weight": torch.ones(40, 16)}
ROUTERS = {key: x for key, x in LINEAR.items() if "mlp.gate." in key}
AGREES = {
    "converted names": (FUSED, {"target_modules": ["gate_proj", "up_proj", "down_proj"]}),
    "converted pattern": (FUSED, {"target_modules": r".*\.mlp\..*_proj"}),
    "names of PEFT's conversion": (
        {**ROUTERS, **FUSED},
        {"target_modules": [], "target_parameters": ["gate.weight", "gate_up_proj", "down_proj"]},
    ),
    "all-linear": ({**ATTENTION, **FUSED}, {"target_modules": "all-linear"}),
    "whole names": (
        ATTENTION,
        {"target_modules": [k[17:].split(".lora")[0] for k in ATTENTION]},
    ),
    "Linear as parameters": (
        ATTENTION,
        {"target_modules": [], "target_parameters": [f"{n}.weight" for n in PROJECTIONS]},
    ),
    "rows and full weights": (
        {**ATTENTION, **ROWS, **HEAD},
        {"target_modules": PROJECTIONS, "trainable_token_indices": [3]},
    ),
    "modules_to_save": (
        {**ATTENTION, **HEAD},
        {"target_modules": PROJECTIONS, "modules_to_save": ["lm_head"]},
    ),
    "layers of the model's own row": (
        {k: x for k, x in SINGLE.items() if "layers.1." in k},
        {"target_modules": ["gate_proj", "up_proj", "down_proj"], "layers_to_transform": [1]},
    ),
    "layers by an expression": (
        {k: x for k, x in ATTENTION.items() if "layers.1." in k},
        {"target_modules": PROJECTIONS, "layers_to_transform": [1], "layers_pattern": "la.*"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AGREES)
def test_a_config_that_means_all_of_it(tmp_path, name):
    keys, config = AGREES[name]
    assert not [w for w in read(tmp_path, keys, **config).warnings if "drop" in w]


@pytest.mark.parametrize(
    ("names", "rename"), [(NAMES, ("", "")), (W_NAMES, (".mlp.", ".block_sparse_moe."))]
)
def test_names_of_transformers_4(tmp_path, names, rename):
    targets = tiny_map("mixtral")
    wanted = random_adapter(targets, 4, 2.0, torch.Generator().manual_seed(0), linear=False)
    keys = per_expert_keys(wanted, targets, names, rename)
    pattern = r"model\.layers\.\d+\.(mlp|block_sparse_moe)\.experts\.\d+\.\w+"
    for wanted_modules in (list(names.values()), pattern):
        folder = save(tmp_path, keys, **PEFT, target_modules=wanted_modules)
        assert read_adapter(folder, targets).warnings == ()


def test_names_of_another_prefix(tmp_path):
    """The pattern is for the trainer's model, which had the language model one step deeper."""
    inner = {
        k.replace("model.layers", "model.language_model.layers"): x for k, x in ATTENTION.items()
    }
    pattern = r"model\.language_model\.layers\.\d+\.self_attn\.\w_proj"
    assert read(tmp_path, inner, target_modules=pattern).warnings == ()
    wrapped = {k.replace("model.layers", "_orig_mod.model.layers"): x for k, x in ATTENTION.items()}
    found = read(tmp_path, wrapped, target_modules=r"_orig_mod\.model\.layers.*_proj").warnings
    assert "8 modules with factors" in found[-1]  # told: keys are read without the wrapper


def test_no_names_of_modules(tmp_path):
    """An empty target_modules may be PEFT's default list: told, not refused."""
    keys = {**ATTENTION, **FUSED}
    found = read(tmp_path, keys, target_modules=None, target_parameters=BOTH).warnings
    assert "target_modules leaves out 8 modules" in found[-1]
    assert read(tmp_path, keys, target_modules=None).warnings == ()
