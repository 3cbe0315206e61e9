"""Numbers in keys are those that models have, 0, 1, ..., 10: another spelling names no module."""

import pytest
import torch
from helpers_writers import (
    assert_same,
    linear_keys,
    per_expert_keys,
    random_adapter,
    save,
    tiny_map,
)

from vexpert.errors import AdapterError
from vexpert.lora.halves import check_half_keys
from vexpert.lora.names import Names
from vexpert.lora.reader import read_adapter

TARGETS = tiny_map("qwen3_moe")
WANTED = random_adapter(TARGETS, 2, 4.0, torch.Generator().manual_seed(0))
KEYS = {**linear_keys(WANTED, TARGETS), **per_expert_keys(WANTED, TARGETS)}
FIELDS = {
    "r": 2,
    "lora_alpha": 8,
    "peft_version": "0.17.1",
    "target_modules": ["gate_proj", "up_proj", "down_proj"],
}
SPELLINGS = ["01", "0001", "+1", "1_", "\u0661", " 1", "1 ", "\uff11", "\u00b9", "-1", "1.0", "0x1"]


def respelled(numbers: dict[str, str], kind: str) -> dict[str, torch.Tensor]:
    """KEYS with other spellings of the numbers of layers or experts."""
    keys = KEYS
    for old, new in numbers.items():
        keys = {k.replace(f".{kind}.{old}.", f".{kind}.{new}."): x for k, x in keys.items()}
    return keys


def refused(tmp_path, keys) -> str:
    with pytest.raises(AdapterError) as error:
        read_adapter(save(tmp_path, keys, **FIELDS), TARGETS)
    return str(error.value)


@pytest.mark.parametrize("kind", ["layers", "experts"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_another_spelling_is_no_module(tmp_path, kind, spelling):
    message = refused(tmp_path, respelled({"1": spelling}, kind))
    assert "have no place in Qwen3MoeForCausalLM" in message


@pytest.mark.parametrize("kind", ["layers", "experts"])
@pytest.mark.parametrize("spelling", ["01", "+1", "\u0661", "1 "])
def test_the_remedy_is_told(tmp_path, kind, spelling):
    message = refused(tmp_path, respelled({"1": spelling}, kind))
    told = f"models number their modules 0, 1, 2, ...: write 1 in place of {spelling!r}"
    assert told in message


def test_padding_hides_no_missing_expert(tmp_path):
    """Under padded names nothing was held against the config, so an adapter loaded in part."""
    padded = respelled({str(i): f"{i:02d}" for i in range(3)}, "experts")
    kept = {k: x for k, x in padded.items() if ".experts.02." not in k}
    assert "write 0 in place of '00'" in refused(tmp_path, kept)
    kept = {k: x for k, x in padded.items() if ".layers.1.mlp.experts." not in k}
    assert "write 0 in place of '00'" in refused(tmp_path, kept)


@pytest.mark.parametrize("spelling", [*SPELLINGS, "00"])
def test_experts_behind_their_projection(spelling):
    """Unsloth's names of gpt-oss."""
    names = Names(tiny_map("gpt_oss"))
    module = "model.layers.1.mlp.experts.gate_up_projs."
    assert names.find(f"{module}1") is not None
    assert names.find(f"{module}{spelling}") is None


@pytest.mark.parametrize("spelling", ["00", "\u0660"])
def test_halves_of_two_spellings(spelling):
    """Known from the keys alone, without a model: a shared lora_A goes with experts' lora_B."""
    shared = "model.layers.0.mlp.experts.gate_proj.lora_A.weight"
    one = "model.layers.0.mlp.experts.{}.gate_proj.lora_B.weight"
    check_half_keys([shared, one.format(0)])
    with pytest.raises(AdapterError, match="missing beside others"):
        check_half_keys([shared, one.format(spelling)])


def test_plain_numbers(tmp_path):
    fields = {**FIELDS, "target_modules": []}
    assert_same(read_adapter(save(tmp_path, KEYS, **fields), TARGETS), WANTED)
