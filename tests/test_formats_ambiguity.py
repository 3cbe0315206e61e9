"""What bytes cannot tell: the version, the option or the config decides, or it is refused."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_writers import (
    assert_same,
    experts_of,
    fused_keys,
    linear_keys,
    per_expert_keys,
    random_adapter,
    save,
    tiny_map,
)

from vexpert.errors import AdapterError
from vexpert.lora.reader import read_adapter
from vexpert.lora.types import AdapterWeights, ExpertsFactors, ExpertsTarget, TargetMap

FIELDS_018 = {"alora_invocation_tokens": None, "megatron_core": "megatron.core"}
FIELDS_019 = {**FIELDS_018, "use_bdlora": None}
FIELDS_021 = {**FIELDS_019, "monteclora_config": None}


def adapter(model: str, *projections: str, **options) -> AdapterWeights:
    return random_adapter(
        tiny_map(model),
        3,
        2.0,
        torch.Generator().manual_seed(5),
        linear=False,
        one_a=True,
        projections=projections or ("gate", "up", "down"),
        **options,
    )


def write(folder: Path, weights: AdapterWeights, model: str, over_input: bool, **config) -> Path:
    keys = fused_keys(weights, tiny_map(model), over_input=over_input)
    return save(folder, keys, **{"r": 3, "lora_alpha": 6, **config})


# The table of docs/adapters.md: is lora_A over the input? By base weights and PEFT version.
SQUARE = [
    ("olmoe", ("gate", "up"), "0.18.0", False),
    ("olmoe", ("gate", "up"), "0.18.2.dev0", False),
    ("olmoe", ("gate", "up"), "0.19.0", False),
    ("olmoe", ("gate", "up"), "0.19.1", True),
    ("olmoe", ("gate", "up"), "0.21.2", True),
    ("gpt_oss_square", ("down",), "0.18.1", True),
    ("gpt_oss_square", ("down",), "0.19.0", False),
    ("gpt_oss_square", ("down",), "0.19.1", True),
    ("gpt_oss_square", ("down",), "0.21.2", True),
]


@pytest.mark.parametrize(("model", "projections", "version", "over_input"), SQUARE)
def test_square_weights_follow_the_version(tmp_path, model, projections, version, over_input):
    wanted = adapter(model, *projections)
    folder = write(tmp_path, wanted, model, over_input, peft_version=version)
    folder_config = {"down": "down_proj"}.get(projections[0], "gate_up_proj")
    save(
        folder,
        fused_keys(wanted, tiny_map(model), over_input=over_input),
        r=3,
        lora_alpha=6,
        peft_version=version,
        target_parameters=[f"mlp.experts.{folder_config}"],
    )
    assert_same(read_adapter(folder, tiny_map(model)), wanted)


def llama4_square() -> TargetMap:
    """Transposed weights without the class's flag, gate_up square."""
    targets = tiny_map("llama4_text")
    changed = {
        path: replace(target, intermediate_size=target.hidden_size // 2)
        if isinstance(target, ExpertsTarget)
        else target
        for path, target in targets.targets.items()
    }
    return replace(targets, targets=changed)


@pytest.mark.parametrize(
    ("version", "over_input"), [("0.18.1", True), ("0.19.0", True), ("0.19.1", False)]
)
def test_square_weights_of_llama4(tmp_path, version, over_input):
    targets = llama4_square()
    wanted = random_adapter(
        targets,
        3,
        2.0,
        torch.Generator().manual_seed(1),
        linear=False,
        one_a=True,
        projections=("gate", "up"),
    )
    keys = fused_keys(wanted, targets, over_input=over_input)
    folder = save(tmp_path, keys, r=3, lora_alpha=6, peft_version=version)
    assert_same(read_adapter(folder, targets), wanted)


@pytest.mark.parametrize("over_input", [True, False])
def test_a_square_weight_follows_its_sibling(tmp_path, over_input):
    """Whatever the version says: down's shapes tell for gate_up too."""
    wanted = adapter("olmoe")
    version = "0.18.1" if over_input else "0.21.2"
    folder = write(tmp_path, wanted, "olmoe", over_input, peft_version=version)
    assert_same(read_adapter(folder, tiny_map("olmoe")), wanted)


@pytest.mark.parametrize(
    ("fields", "over_input"),
    [({"megatron_core": "x"}, False), (FIELDS_018, False), (FIELDS_021, True)],
)
def test_without_a_version_the_fields_of_the_config_tell_the_writer(tmp_path, fields, over_input):
    wanted = adapter("olmoe", "gate", "up")
    folder = write(tmp_path, wanted, "olmoe", over_input, **fields)
    assert_same(read_adapter(folder, tiny_map("olmoe")), wanted)


@pytest.mark.parametrize("fields", [{}, FIELDS_019])
def test_a_square_weight_without_any_evidence_is_refused(tmp_path, fields):
    """A minimal config fits two versions; 0.19.0 and 0.19.1 have the same fields."""
    folder = write(tmp_path, adapter("olmoe", "gate", "up"), "olmoe", True, **fields)
    with pytest.raises(AdapterError, match="peft_version"):
        read_adapter(folder, tiny_map("olmoe"))


def test_a_square_weight_that_all_possible_versions_read_alike(tmp_path):
    wanted = adapter("gpt_oss_square", "down")
    folder = write(tmp_path, wanted, "gpt_oss_square", True)
    found = read_adapter(folder, tiny_map("gpt_oss_square"))
    assert_same(found, wanted)
    assert "transformers 4 can mean the transpose" in " ".join(found.warnings)


@pytest.mark.parametrize(("layout", "over_input"), [("peft-0.18", False), ("peft-0.19.1", True)])
def test_nemo_says_its_layout_in_a_file_of_its_own(tmp_path, layout, over_input):
    wanted = adapter("olmoe", "gate", "up")
    folder = write(tmp_path, wanted, "olmoe", over_input)
    text = f'{{"paramwrapper_layout": "{layout}"}}'
    (folder / "automodel_peft_config.json").write_text(text)
    assert_same(read_adapter(folder, tiny_map("olmoe")), wanted)


# -- order of lora_B's columns --------------------------------------------------------------------

LAYOUTS = ("rank_major", "grouped_by_expert")


@pytest.mark.parametrize(
    ("mark", "option"), list(itertools.product((None, *LAYOUTS), (None, *LAYOUTS)))
)
def test_order_of_columns(tmp_path, mark, option):
    targets, wanted = tiny_map("qwen3_moe"), adapter("qwen3_moe")
    said = mark or option or "rank_major"
    keys = fused_keys(wanted, targets, layout=said)
    folder = save(tmp_path, keys, r=3, lora_alpha=6, **({"lora_B_layout": mark} if mark else {}))
    if mark and option and mark != option:
        with pytest.raises(AdapterError, match="leave the option out"):
            read_adapter(folder, targets, lora_B_layout=option)
        return
    assert_same(read_adapter(folder, targets, lora_B_layout=option), wanted)


def test_unmarked_unsloth_is_read_as_peft_with_a_warning(tmp_path):
    targets, wanted = tiny_map("qwen3_moe"), adapter("qwen3_moe")
    mapping = {"base_model_class": "Qwen3MoeForCausalLM", "unsloth_fixed": True}
    folder = write(tmp_path, wanted, "qwen3_moe", True, auto_mapping=mapping)
    found = read_adapter(folder, targets)
    assert_same(found, wanted)
    assert any("lora_B_layout=grouped_by_expert" in text for text in found.warnings)
    told = read_adapter(folder, targets, lora_B_layout="rank_major")
    assert told.warnings == ()


@pytest.mark.parametrize(
    ("fields", "warns"),
    [({}, True), (FIELDS_018, False), ({"peft_version": "0.21.2"}, False)],
)
def test_fused_files_of_other_exporters_warn(tmp_path, fields, warns):
    """Megatron-Bridge packs PEFT's keys with columns grouped by expert, and says so nowhere."""
    folder = write(tmp_path, adapter("qwen3_moe"), "qwen3_moe", True, **fields)
    found = read_adapter(folder, tiny_map("qwen3_moe"))
    assert any("not PEFT's own" in text for text in found.warnings) == warns


def test_the_option_without_fused_experts_warns(tmp_path):
    targets, wanted = tiny_map("qwen3_moe"), adapter("qwen3_moe")
    folder = save(tmp_path, per_expert_keys(wanted, targets), r=3, lora_alpha=6)
    found = read_adapter(folder, targets, lora_B_layout="grouped_by_expert")
    assert any("no effect" in text for text in found.warnings)


def test_an_unknown_order_is_refused(tmp_path):
    folder = write(tmp_path, adapter("qwen3_moe"), "qwen3_moe", True)
    with pytest.raises(AdapterError, match="rank_major, grouped_by_expert"):
        read_adapter(folder, tiny_map("qwen3_moe"), lora_B_layout="expert_major")


# -- which parameter a single wrapper is of ------------------------------------------------------


def ungated() -> TargetMap:
    """Experts without a gate: up [E, I, H] and down [E, H, I] transposed have one shape."""
    targets = tiny_map("qwen3_moe")
    changed = {
        path: replace(target, has_gate=False) if isinstance(target, ExpertsTarget) else target
        for path, target in targets.targets.items()
    }
    return replace(targets, targets=changed)


@pytest.mark.parametrize("parameter", ["up_proj", "down_proj", None])
def test_a_single_wrapper_whose_shape_fits_both_parameters(tmp_path, parameter):
    targets = ungated()
    target = experts_of(targets)[0]
    experts, hidden, inner = target.num_experts, target.hidden_size, target.intermediate_size
    keys = {
        f"base_model.model.{target.path}.lora_A.weight": torch.randn(experts * 2, hidden),
        f"base_model.model.{target.path}.lora_B.weight": torch.randn(inner, 2 * experts),
    }
    name = f"model.layers.0.mlp.experts.{parameter}"
    named = {} if parameter is None else {"target_parameters": [name]}
    folder = save(tmp_path, keys, r=2, peft_version="0.21.2", **named)
    if parameter is None:
        with pytest.raises(AdapterError, match="target_parameters"):
            read_adapter(folder, targets)
        return
    found = read_adapter(folder, targets).modules[target.path]
    assert isinstance(found, ExpertsFactors)
    assert found.gate is None
    assert (found.up is None, found.down is None) == (
        (False, True) if parameter == "up_proj" else (True, False)
    )


def test_ungated_experts_up_and_down(tmp_path):
    targets = ungated()
    wanted = random_adapter(
        targets, 2, 4.0, torch.Generator().manual_seed(2), projections=("up", "down")
    )
    keys = {**per_expert_keys(wanted, targets), **linear_keys(wanted, targets)}
    assert_same(read_adapter(save(tmp_path, keys, r=2, lora_alpha=8), targets), wanted)


def test_expert_dimension_whose_order_cannot_be_told_is_refused(tmp_path):
    """lora_B [y, r, E] or [E, y, r] with y == r == E."""
    targets = tiny_map("qwen3_moe")
    target = experts_of(targets)[0]
    experts = target.num_experts
    keys = {
        f"base_model.model.{target.path}.lora_A": torch.randn(experts, experts, 16),
        f"base_model.model.{target.path}.lora_B": torch.randn(experts, experts, experts),
    }
    with pytest.raises(AdapterError, match="format is unknown"):
        read_adapter(save(tmp_path, keys), targets)
