"""Configs from memory may have numpy's numbers, as trainers compute them."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from vexpert.errors import AdapterError
from vexpert.lora.adapter_config import AdapterConfig, parse_config
from vexpert.lora.memory_source import adapter_tensors


def in_memory(**fields) -> AdapterConfig:
    source = adapter_tensors({"a": torch.ones(1)}, {"peft_type": "LORA", **fields})
    return parse_config(source.config)


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint32])
def test_numpys_whole_numbers(kind):
    found = in_memory(
        r=kind(4),
        lora_alpha=kind(8),
        rank_pattern={"q_proj": kind(2)},
        layers_to_transform=[kind(0), kind(1)],
        trainable_token_indices={"embed_tokens": [kind(5)]},
    )
    assert (found.r, found.alpha, found.rank_pattern) == (4, 8.0, {"q_proj": 2})
    assert (found.layers_to_transform, found.token_indices) == ((0, 1), {"embed_tokens": (5,)})


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, Fraction])
def test_numpys_numbers(kind):
    found = in_memory(r=4, lora_alpha=kind(0.5), alpha_pattern={"q_proj": kind(2)})
    assert (found.alpha, found.alpha_pattern) == (0.5, {"q_proj": 2.0})


def test_numpys_truth():
    assert in_memory(use_rslora=np.bool_(True), use_dora=np.bool_(False)).use_rslora


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", np.float32(4)),
        ("r", np.bool_(True)),
        ("lora_alpha", np.bool_(True)),
        ("lora_alpha", np.float32("nan")),
        ("lora_alpha", np.complex64(1)),
        ("use_dora", np.int64(1)),
        ("layers_to_transform", [np.float64(1)]),
    ],
)
def test_numpys_values_of_another_kind(field, value):
    with pytest.raises(AdapterError, match=f"{field}="):
        in_memory(**{field: value})


def test_a_number_that_no_float_holds():
    with pytest.raises(AdapterError, match="config cannot be written as JSON"):
        in_memory(lora_alpha=Fraction(10**400))
