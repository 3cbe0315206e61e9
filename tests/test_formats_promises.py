"""What the config promises and the file lacks: refused where PEFT always saves it, else told."""

from dataclasses import replace

import pytest
import torch
from helpers_writers import fused_keys, linear_keys, per_expert_keys, random_adapter, save, tiny_map

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
    refused(tmp_path, r"'q_proj', 'v_proj', but 4 keys (?s:.*)layers\.1\.", "layers.1.", **config)
    warnings = read(tmp_path, "layers.1.", peft_version=None, **config).warnings
    assert "2 modules of the model without factors" in warnings[-1]
    assert "layer 1 has none at all" in warnings[-1]


@pytest.mark.parametrize("names", [["q_proj", "v_proj"], r".*\.(q|v)_proj"])
def test_one_layer_of_a_linear(tmp_path, names):
    refused(
        tmp_path,
        r"layers\.1\.self_attn\.q_proj\.lora_\{A,B\}\.weight \(2 keys\)",
        "layers.1.self_attn.q_proj",
        target_modules=names,
    )
    excluded = {"exclude_modules": ["layers.1.self_attn.q_proj"]}
    found = read(tmp_path, "layers.1.self_attn.q_proj", target_modules=names, **excluded)
    assert found.warnings == ()


def test_one_layer_of_the_experts(tmp_path):
    refused(tmp_path, r"experts\.gate_up_proj'(?s:.*)full names", "layers.1.mlp.experts")
    refused(tmp_path, r"4 keys(?s:.*)1\.mlp\.experts\.base_layer\.lora", "layers.1.mlp.experts")
    full = [f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    assert read(tmp_path, "layers.1.mlp.experts", target_parameters=full).warnings == ()


def test_a_kind_that_a_pattern_means_is_gone(tmp_path):
    pattern = r"model\.layers\.\d+\.self_attn\.(q|v)_proj"
    missing = r"layers\.\{0,1\}\.self_attn\.q_proj\S+ \(4 keys"
    refused(tmp_path, missing, "q_proj", target_modules=pattern)


def test_names_of_another_prefix(tmp_path):
    """The pattern is for the trainer's names, and so are the missing keys."""
    inner = "model.language_model.layers"
    keys = {key.replace("model.layers", inner): x for key, x in KEYS.items()}
    pattern = r"model\.language_model\..*\.(q|v)_proj"
    missing = r"model\.language_model\.layers\.\{0,1\}\.self_attn\.q_proj"
    refused(tmp_path, missing, "q_proj", keys=keys, target_modules=pattern)


SINGLE = {
    key: x
    for key, x in {**linear_keys(WANTED, TARGETS), **per_expert_keys(WANTED, TARGETS)}.items()
    if "q_proj" in key or "experts" in key
}
SINGLE_NAMES = {
    "target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"],
    "target_parameters": None,
    "peft_version": "0.18.1",
}


@pytest.mark.parametrize(
    ("drop", "missing"),
    [
        ("layers.1.mlp.experts.2.up_proj", r"1\.mlp\.experts\.2\.up_proj\S+ \(2 keys"),
        ("layers.1.mlp.experts.2.", r"1\.mlp\.experts\.2\.gate_proj\S+ \(2 keys"),
        ("0.up_proj", r"layers\.\{0,1\}\.mlp\.experts\.0\.up_proj\S+ \(4 keys"),
        ("layers.0.mlp.experts", r"0\.mlp\.experts\.\{0-2\}\.down_proj\S+ \(6 keys"),
        ("down_proj", r"\{0,1\}\.mlp\.experts\.\{0-2\}\.down_proj\S+ \(12 keys"),
    ],
)
def test_single_experts(tmp_path, drop, missing):
    config = {"keys": SINGLE, **SINGLE_NAMES}
    refused(tmp_path, rf"(?s)target_modules names.*{missing}", drop, **config)
    config["peft_version"] = None  # as other trainers write
    assert "unchanged" in " ".join(read(tmp_path, drop, **config).warnings)


def test_whole_single_experts(tmp_path):
    assert read(tmp_path, keys=SINGLE, **SINGLE_NAMES).warnings == ()
    some = {**SINGLE_NAMES, "target_modules": ["q_proj", "up_proj"]}
    kept = {k: x for k, x in SINGLE.items() if "q_proj" in k or "up_proj" in k}
    assert read(tmp_path, keys=kept, **some).warnings == ()


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"layers_to_transform": [1], "layers_pattern": "layers"}, "layers.1."),
        # Without a pattern some versions of PEFT took the expert's number for the layer's.
        ({"layers_to_transform": [1]}, "layers.1."),
        ({"layers_to_transform": [1]}, "experts.1."),
        ({"exclude_modules": [f"{i}.{n}_proj" for i in (0, 2) for n in ("gate", "up", "down")]},
         "experts.1."),
    ],
)  # fmt: skip
def test_single_experts_left_out_on_purpose(tmp_path, fields, kept):
    keys = {key: x for key, x in SINGLE.items() if kept in key and "experts" in key}
    config = {**SINGLE_NAMES, "target_modules": SINGLE_NAMES["target_modules"][1:]}
    assert read(tmp_path, keys=keys, **config, **fields).warnings == ()


def test_a_config_that_names_nothing(tmp_path):
    """Gaps are told all the same: of other layers the file has the module."""
    nothing = {"target_modules": None, "peft_version": None, "target_parameters": None}
    found = read(tmp_path, "layers.1.mlp.experts.2.up_proj", SINGLE, **nothing)
    assert found.warnings[-1] == (
        "1 module of the model without factors in the file, though others of its kind have them; "
        "unchanged: model.layers.1.mlp.experts.2.up_proj"
    )


def test_a_dense_layer_beside_experts(tmp_path):
    targets = tiny_map("deepseek_v3")
    wanted = random_adapter(targets, 4, 2.0, torch.Generator().manual_seed(0))
    names = ("gate_proj", "up_proj", "down_proj")
    keys = {**linear_keys(wanted, targets), **per_expert_keys(wanted, targets)}
    keys = {key: x for key, x in keys.items() if any(name in key for name in names)}
    config = {**PEFT, "target_modules": list(names)}
    assert read_adapter(save(tmp_path, keys, **config), targets).warnings == ()
    for lost in ("layers.0.mlp.gate_proj", "shared_experts.up_proj"):
        kept = {key: x for key, x in keys.items() if lost not in key}
        with pytest.raises(AdapterError, match=lost.replace(".", r"\.")):
            read_adapter(save(tmp_path, kept, **config), targets)


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_the_head_and_the_embedding(tmp_path, name):
    keys = {**KEYS, **{k: x for k, x in linear_keys(WANTED, TARGETS).items() if name in k}}
    form = r"lora_embedding_\{A,B\}" if name == "embed_tokens" else r"lora_\{A,B\}\.weight"
    for wanted in (["q_proj", "v_proj", name], rf".*(q_proj|v_proj|{name})"):
        assert read(tmp_path, keys=keys, target_modules=wanted).warnings == ()
        refused(tmp_path, rf"{name}\.{form} \(2 keys", name, keys=keys, target_modules=wanted)


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


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["score"], "names 'score', which no"),
        (["lm_head."], "names 'lm_head.', which no"),
        (["score", "gate", "classifier"], "names 'score', 'classifier', which no"),
        ([f"head{i}" for i in range(9)], "'head4' and 4 more, which no"),
    ],
)
def test_modules_to_save_that_the_model_lacks(tmp_path, names, told):
    """Such as the heads that PEFT adds to the names for other tasks."""
    found = read(tmp_path, keys={**KEYS, **gates()}, modules_to_save=names)
    assert [told in warning for warning in found.warnings] == [True]
    assert "module of the model is called: without effect" in found.warnings[0]


@pytest.mark.parametrize("name", ["head", "", "_head"])
def test_modules_to_save_by_a_part_of_a_word(tmp_path, name):
    """PEFT takes every module whose name ends so."""
    refused(tmp_path, f"modules_to_save names '{name}', but", modules_to_save=[name])
    keys = {**KEYS, f"{P}lm_head.weight": torch.ones(40, 16)}
    if name:
        assert read(tmp_path, keys=keys, modules_to_save=[name]).warnings == ()


def test_tokens_of_a_module_that_the_model_lacks(tmp_path):
    found = read(tmp_path, trainable_token_indices={"score": [1], "embed_tokens": []})
    assert [("trainable_token_indices names 'score'" in text) for text in found.warnings] == [True]


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
    found = read_adapter(folder, TARGETS, model_names=(served,)).warnings
    assert [("is served" in text) for text in found] == ([True] if warns else [])


@pytest.mark.parametrize("name", ["OptimizedModule", "FSDPQwen3MoeForCausalLM", "Qwen3MoeModel"])
def test_wrappers_are_no_other_model(tmp_path, name):
    folder = save(tmp_path, KEYS, **PEFT, auto_mapping={"base_model_class": name})
    assert read_adapter(folder, TARGETS).modules


def test_layers_in_two_formats_have_no_gaps(tmp_path):
    fused = {key: x for key, x in fused_keys(WANTED, TARGETS).items() if "layers.0" in key}
    single = {key: x for key, x in per_expert_keys(WANTED, TARGETS).items() if "layers.1" in key}
    nothing = {"target_modules": None, "target_parameters": None}
    assert read(tmp_path, keys={**fused, **single}, **nothing).warnings == ()
    (warning,) = read(tmp_path, "layers.1", keys=fused_keys(WANTED, TARGETS), **nothing).warnings
    assert "2 modules of the model without factors" in warning
    assert (
        "unchanged: model.layers.1.mlp.experts.base_layer, model.layers.1.mlp.experts;" in warning
    )
