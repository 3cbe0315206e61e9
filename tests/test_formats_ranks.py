"""Ranks of experts' lora_A and lora_B that differ: the error names the keys at fault, no others."""

import pytest
import torch
from helpers_writers import per_expert_keys, random_adapter, save, tiny_map

from vexpert.errors import AdapterError
from vexpert.lora.reader import read_adapter

TARGETS = tiny_map("mixtral")
NAMES = {"gate": "w1", "up": "w3", "down": "w2"}
WANTED = random_adapter(TARGETS, 3, 1.0, torch.Generator().manual_seed(0), linear=False)
KEYS = per_expert_keys(WANTED, TARGETS, NAMES)
EXPERTS = "base_model.model.model.layers.1.mlp.experts"


def key(expert: int, part: str) -> str:
    return f"{EXPERTS}.{expert}.w1.lora_{part}.weight"


def with_rank(keys: dict[str, torch.Tensor], name: str, rank: int) -> dict[str, torch.Tensor]:
    """`keys` with another rank of one factor."""
    inputs = keys[name].shape[1 if ".lora_A." in name else 0]
    shape = (rank, inputs) if ".lora_A." in name else (inputs, rank)
    return {**keys, name: torch.ones(shape)}


def refused(tmp_path, keys) -> str:
    with pytest.raises(AdapterError) as error:
        read_adapter(save(tmp_path, keys, r=3, lora_alpha=3), TARGETS)
    return str(error.value).removeprefix(f"{tmp_path}: ")


@pytest.mark.parametrize("rank", [1, 2, 4, 7])
@pytest.mark.parametrize("expert", [0, 2])
def test_one_experts_lora_a(tmp_path, expert, rank):
    assert refused(tmp_path, with_rank(KEYS, key(expert, "A"), rank)) == (
        f"{key(expert, 'A')} [{rank}, 16], {key(expert, 'B')} [12, 3]: lora_A has rank {rank}, "
        "lora_B 3; the file is broken, save the adapter again"
    )


@pytest.mark.parametrize("rank", [2, 4])
def test_one_experts_lora_b_beside_a_shared_lora_a(tmp_path, rank):
    """Missing columns were filled with zeros."""
    shared = f"{EXPERTS}.w1.lora_A.weight"
    keys = {k: x for k, x in KEYS.items() if not (k.startswith(EXPERTS) and "w1.lora_A" in k)}
    keys = {**keys, shared: torch.ones(1, 3, 16)}
    message = refused(tmp_path, with_rank(keys, key(1, "B"), rank))
    assert message.startswith(f"{shared} [1, 3, 16], {key(1, 'B')} [12, {rank}]: lora_A has rank 3")


def test_several_experts(tmp_path):
    keys = with_rank(with_rank(KEYS, key(2, "A"), 4), key(1, "B"), 5)
    message = refused(tmp_path, keys)
    assert message.startswith(f"{key(1, 'A')} [3, 16], {key(1, 'B')} [12, 5]: ")
    assert message.endswith(
        ", and those of expert 2 differ too; the file is broken, save the adapter again"
    )
    assert "experts.0" not in message


def test_stacked_experts(tmp_path):
    keys = {
        f"{EXPERTS}.w1.lora_A.weight": torch.ones(3, 4, 16),
        f"{EXPERTS}.w1.lora_B.weight": torch.ones(3, 12, 3),
    }
    message = refused(tmp_path, keys)
    assert "w1.lora_A.weight [3, 4, 16]" in message
    assert "lora_A has rank 4, lora_B 3; the file is broken" in message
