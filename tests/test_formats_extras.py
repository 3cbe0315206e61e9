"""What adapters hold beyond pairs of factors: read fully, or refused where it cannot be applied."""

from dataclasses import replace

import pytest
import torch
from helpers_writers import (
    experts_of,
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
WANTED = random_adapter(TARGETS, 2, 4.0, torch.Generator().manual_seed(0))
Q = "model.layers.0.self_attn.q_proj"
KEYS = {k: x for k, x in linear_keys(WANTED, TARGETS).items() if "q_proj" in k}
ALL = frozenset(EXTRAS)
P = "base_model.model."


def read(tmp_path, extra, base=None, supported=ALL, keys=KEYS, **config):
    folder = save(tmp_path, {**keys, **extra}, r=2, lora_alpha=8, **config)
    base_weight = None if base is None else base.get
    return read_adapter(folder, TARGETS, supported=supported, base_weight=base_weight)


def refused(tmp_path, extra, match, **options):
    with pytest.raises(AdapterError, match=match):
        read(tmp_path, extra, **options)


def biases():
    return {f"{P}model.layers.{i}.self_attn.q_proj.lora_B.bias": torch.ones(16) for i in (0, 1)}


def test_lora_bias_is_scaled(tmp_path):
    found = read(tmp_path, biases(), lora_bias=True)
    assert found.extras == {"bias"}
    assert torch.equal(found.bias[Q], torch.full((16,), 4.0))


def test_lora_bias_of_another_size(tmp_path):
    bad = {key: torch.ones(15) for key in biases()}
    refused(tmp_path, bad, r"\[15\].*must be \[16\]", lora_bias=True)


def test_promised_lora_bias_missing(tmp_path):
    refused(tmp_path, {}, "lora_B.bias", lora_bias=True)


MAGNITUDES = {
    f"{P}model.layers.{i}.self_attn.q_proj.lora_magnitude_vector{suffix}": torch.ones(16)
    for i, suffix in ((0, ""), (1, ".weight"))
}


def test_dora(tmp_path):
    found = read(tmp_path, MAGNITUDES, use_dora=True)
    assert found.extras == {"dora"}
    assert set(found.magnitude) == {Q, Q.replace("0", "1")}


@pytest.mark.parametrize(("extra", "dora"), [(MAGNITUDES, False), ({}, True)])
def test_dora_against_the_config(tmp_path, extra, dora):
    refused(tmp_path, extra, "use_dora", use_dora=dora)


def test_dora_of_experts(tmp_path):
    """Experts without factors are not adapted: their magnitude is NaN."""
    target = experts_of(TARGETS)[0]
    pairs = {k: x for k, x in per_expert_keys(WANTED, TARGETS).items() if ".0.mlp.experts.2." in k}
    extra = {
        f"{P}{target.path}.2.{name}.lora_magnitude_vector": torch.full((size,), 2.0)
        for name, size in (("gate_proj", 10), ("up_proj", 10), ("down_proj", 16))
    }
    found = read(tmp_path, extra, keys=pairs, use_dora=True)
    assert found.extras == {"expert_dora"}
    down = found.expert_magnitude[target.path].down
    assert torch.equal(down[2], torch.full((16,), 2.0))
    assert down[:2].isnan().all()


def test_dora_of_experts_needs_every_magnitude(tmp_path):
    pairs = per_expert_keys(WANTED, TARGETS)
    extra = {f"{P}model.layers.0.mlp.experts.0.gate_proj.lora_magnitude_vector": torch.ones(10)}
    refused(tmp_path, extra, "magnitude", keys=pairs, use_dora=True)


@pytest.mark.parametrize("flag", ["use_dora", "lora_bias"])
def test_what_peft_cannot_do_for_fused_experts(tmp_path, flag):
    """Its wrapper of parameters refuses both, so no trainer has written such a file."""
    refused(tmp_path, {}, f"mlp.experts: {flag}", keys=fused_keys(WANTED, TARGETS), **{flag: True})


def test_promised_bias_of_single_experts_missing(tmp_path):
    keys = per_expert_keys(WANTED, TARGETS)
    refused(tmp_path, {}, "mlp.experts: lora_bias", keys=keys, lora_bias=True)


def test_modules_to_save(tmp_path):
    extra = {
        f"{P}lm_head.weight": torch.ones(40, 16),
        f"{P}model.embed_tokens.modules_to_save.default.weight": torch.ones(40, 16),
        f"{P}model.embed_tokens.original_module.weight": torch.zeros(40, 16),
        f"{P}model.layers.0.mlp.gate.weight": torch.ones(3, 16),
        f"{P}model.norm.weight": torch.ones(16),
        f"{P}model.layers.1.self_attn.k_proj.weight": torch.ones(16, 16),
    }
    found = read(tmp_path, extra, modules_to_save=["lm_head", "embed_tokens", "norm"])
    assert found.extras == {
        "full_lm_head",
        "full_embedding",
        "full_router",
        "full_other",
        "full_linear",
    }
    assert torch.equal(found.full["model.embed_tokens.weight"], torch.ones(40, 16))
    assert "model.norm.weight" in found.full


def test_saved_twice_with_two_values(tmp_path):
    extra = {
        f"{P}lm_head.weight": torch.ones(40, 16),
        f"{P}lm_head.modules_to_save.weight": torch.zeros(40, 16),
    }
    refused(tmp_path, extra, "another value")


def test_promised_module_missing(tmp_path):
    refused(tmp_path, {}, "modules_to_save names .lm_head.", modules_to_save=["lm_head"])


def test_added_tokens(tmp_path):
    found = read(tmp_path, {f"{P}lm_head.weight": torch.ones(42, 16)})
    assert found.extras == {"full_lm_head", "vocabulary"}


def test_full_weight_of_another_shape(tmp_path):
    refused(tmp_path, {f"{P}lm_head.weight": torch.ones(40, 15)}, r"lm_head.weight is \[40, 16\]")


def test_full_weight_with_nan(tmp_path):
    refused(tmp_path, {f"{P}lm_head.weight": torch.full((40, 16), torch.nan)}, "NaN")


def test_unchanged_copies_of_the_base_are_left_out(tmp_path):
    base = torch.randn(40, 16)
    extra = {f"{P}lm_head.weight": base.bfloat16(), f"{P}model.embed_tokens.weight": base}
    found = read(
        tmp_path, extra, {"lm_head.weight": base, "model.embed_tokens.weight": base}, frozenset()
    )
    assert found.full == {}
    assert found.warnings == ()


def head() -> dict[str, torch.Tensor]:
    return {k: x for k, x in linear_keys(WANTED, TARGETS).items() if "lm_head" in k}


def test_a_copy_under_lora_that_is_not_the_base(tmp_path):
    base = torch.randn(40, 16)
    extra = {**head(), f"{P}lm_head.base_layer.weight": base}
    assert read(tmp_path, extra, {"lm_head.weight": base}).full == {}
    refused(tmp_path, extra, "another full weight", base={"lm_head.weight": base + 1})


def test_a_copy_under_lora_that_cannot_be_compared_warns(tmp_path):
    found = read(tmp_path, {**head(), f"{P}lm_head.base_layer.weight": torch.randn(40, 16)})
    assert "not compared" in found.warnings[0]


def test_full_biases(tmp_path):
    """bias='all' stores whole biases; the model must have them."""
    refused(tmp_path, {f"{P}model.norm.bias": torch.ones(16)}, "no place", bias="all")


def test_full_biases_of_gpt_oss(tmp_path):
    """bias='all' takes every parameter with "bias" in its name, the experts' too."""
    targets = tiny_map("gpt_oss")
    keys = {
        **{
            f"{P}{name}": torch.ones(shape)
            for name, shape in targets.parameters.items()
            if name.endswith("_proj.bias") and name != "model.layers.0.self_attn.q_proj.bias"
        },
        f"{P}model.layers.1.mlp.router.bias": torch.ones(3),
        f"{P}model.layers.0.self_attn.q_proj.base_layer.bias": torch.ones(16),
        f"{P}model.layers.0.mlp.router.bias": torch.ones(3),
        f"{P}model.layers.0.mlp.experts.base_layer.base_layer.down_proj_bias": torch.ones(3, 16),
        f"{P}model.layers.0.mlp.experts.gate_up_proj_bias": torch.ones(3, 24),
    }
    found = read_adapter(save(tmp_path, keys, bias="all"), targets, supported=ALL)
    assert found.extras == {"full_bias"}
    linear = {name for name in targets.parameters if name.endswith(".bias") and "norm" not in name}
    assert set(found.full) == linear | {
        "model.layers.0.mlp.experts.down_proj_bias",
        "model.layers.0.mlp.experts.gate_up_proj_bias",
    }
    keys.pop(f"{P}model.layers.0.mlp.router.bias")
    with pytest.raises(AdapterError, match=r"bias='all', but 1 bias (?s:.*)layers\.0\.mlp\.router"):
        read_adapter(save(tmp_path, keys, bias="all"), targets, supported=ALL)


TOKENS = f"{P}model.embed_tokens.token_adapter.trainable_tokens_delta"


def test_token_rows(tmp_path):
    rows = torch.randn(2, 16)
    found = read(tmp_path, {TOKENS: rows}, trainable_token_indices=[7, 3])
    assert found.extras == {"tokens"}
    assert found.tokens["model.embed_tokens"].indices == (7, 3)
    assert torch.equal(found.tokens["model.embed_tokens"].rows, rows)


@pytest.mark.parametrize(
    ("indices", "rows", "match"),
    [
        ([7, 40], 2, "outside the vocabulary of 40"),
        ([-1, 2], 2, "outside"),
        ([7], 2, "names 1 tokens"),
        ({"lm_head": [1, 2]}, 2, "which rows they are is unknown"),
        (None, 2, "which rows they are is unknown"),
    ],
)
def test_token_rows_that_do_not_fit(tmp_path, indices, rows, match):
    refused(tmp_path, {TOKENS: torch.ones(rows, 16)}, match, trainable_token_indices=indices)


def test_promised_token_rows_missing(tmp_path):
    refused(
        tmp_path, {}, "trainable_token_indices names .embed_tokens.", trainable_token_indices=[1]
    )


EVERY = [
    ("bias", biases(), {"lora_bias": True}),
    ("dora", MAGNITUDES, {"use_dora": True}),
    ("full_lm_head", {f"{P}lm_head.weight": torch.ones(40, 16)}, {}),
    ("full_other", {f"{P}model.norm.weight": torch.ones(16)}, {}),
    ("tokens", {TOKENS: torch.ones(1, 16)}, {"trainable_token_indices": [1]}),
]


@pytest.mark.parametrize(("kind", "extra", "fields"), EVERY, ids=[kind for kind, _, _ in EVERY])
def test_an_extra_that_cannot_be_applied_is_refused(tmp_path, kind, extra, fields):
    refused(tmp_path, extra, "cannot be applied here", supported=ALL - {kind}, **fields)
    assert read(tmp_path, extra, supported=frozenset({kind}), **fields).extras == {kind}


TIED = replace(TARGETS, tied=frozenset({"lm_head"}), input_embedding="model.embed_tokens")


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_tied_adapters_are_refused(tmp_path, name):
    keys = {k: x for k, x in linear_keys(WANTED, TARGETS).items() if name in k}
    folder = save(tmp_path, keys, r=2, lora_alpha=8, ensure_weight_tying=True)
    with pytest.raises(AdapterError, match="ensure_weight_tying"):
        read_adapter(folder, TIED)
    assert read_adapter(folder, TARGETS).modules  # nothing is tied: as without it


@pytest.mark.parametrize("ensure", [True, False])
def test_token_rows_of_a_tied_head_are_the_embeddings(tmp_path, ensure):
    indices = {"embed_tokens": [1], "lm_head": [1]}
    config = {"r": 2, "trainable_token_indices": indices, "ensure_weight_tying": ensure}
    folder = save(tmp_path, {TOKENS: torch.ones(1, 16)}, **config)
    assert read_adapter(folder, TIED, supported=ALL).tokens.keys() == {"model.embed_tokens"}
    refused_by = "trainable_token_indices names 'lm_head'"
    with pytest.raises(AdapterError, match=refused_by):
        read_adapter(folder, TARGETS, supported=ALL)
    config["trainable_token_indices"] = {**indices, "lm_head": [2]}
    with pytest.raises(AdapterError, match=refused_by):
        read_adapter(save(tmp_path, {TOKENS: torch.ones(1, 16)}, **config), TIED, supported=ALL)


def test_token_rows_of_a_head_with_a_bias_are_told(tmp_path):
    """PEFT's forward leaves the bias out."""
    shapes = {**TARGETS.parameters, "lm_head.bias": (40,)}
    rows = {TOKENS.replace("model.embed_tokens", "lm_head"): torch.ones(1, 16)}
    folder = save(tmp_path, rows, r=2, trainable_token_indices={"lm_head": [1]})
    targets = replace(TARGETS, parameters=shapes)
    (warning,) = read_adapter(folder, targets, supported=ALL).warnings[-1:]
    assert "lm_head has a bias" in warning
    assert "bias" not in " ".join(read_adapter(folder, TARGETS, supported=ALL).warnings)


def test_what_cannot_be_applied_is_named(tmp_path):
    """Of a whole block in modules_to_save, the norms alone."""
    block = [k for k in TARGETS.parameters if "layers.0.self_attn" in k]
    extra = {P + k: torch.ones(TARGETS.parameters[k]) for k in block}
    match = r"first: \S*layers\.0\.self_attn\.[qk]_norm\.weight, \S*[qk]_norm\.weight\)"
    refused(tmp_path, extra, match, keys={}, supported=ALL - {"full_other"})


def test_biases_that_peft_lost(tmp_path):
    targets = tiny_map("gpt_oss")
    wanted = random_adapter(targets, 2, 4.0, torch.Generator().manual_seed(0))
    keys = {k: x for k, x in linear_keys(wanted, targets).items() if "q_proj" in k}
    with pytest.raises(AdapterError, match=r'(?s)lora_only.*so they are lost: train with bias="a'):
        read_adapter(save(tmp_path, keys, r=2, bias="lora_only"), targets, supported=ALL)
