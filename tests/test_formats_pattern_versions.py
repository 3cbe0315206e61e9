"""Patterns as each version of PEFT reads them, and which version a config shows."""

import json
import re
from itertools import chain
from pathlib import Path

import pytest
import torch
from helpers_writers import linear_keys, random_adapter, save, tiny_map

from vexpert.errors import AdapterError
from vexpert.lora.adapter_config import parse_config
from vexpert.lora.reader import read_adapter
from vexpert.lora.versions import possible_pattern_rules

TARGETS = tiny_map("qwen3_moe")
WANTED = random_adapter(TARGETS, 4, 1.0, torch.Generator().manual_seed(0))
LINEAR = linear_keys(WANTED, TARGETS)
Q, OUT, OTHER = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.o_proj",
    "model.layers.1.self_attn.q_proj",
)
PEFT_012 = dict.fromkeys(
    ("auto_mapping", "layers_pattern", "loftq_config", "megatron_config", "revision")
)
PEFT_014 = {**PEFT_012, "eva_config": None, "exclude_modules": None, "lora_bias": False}
PEFT_015 = {**PEFT_014, "corda_config": None, "trainable_token_indices": None}
WRITERS = {"0.12": PEFT_012, "0.14": PEFT_014, "0.15": PEFT_015}


def pefts(version: str, name: str, ranks: dict[str, int], alphas: dict[str, float]) -> float:
    """lora_alpha as PEFT of this version finds it, 8 by default; the tables in their order."""

    def first(patterns, form):
        return next((p for p in patterns if re.match(form.replace("{}", p), name)), name)

    if version == "0.12":
        return alphas.get(first(chain(ranks, alphas), r".*\.{}$"), 8)
    return alphas.get(first(alphas, r".*\.{}$" if version == "0.14" else r"(.*\.)?({})$"), 8)


TABLES = [
    ({"q_proj": 4}, {r"layers.0.self_attn.q_proj": 30}),
    ({"q_proj": 4}, {"q_proj": 30, r"layers\.1.*": 5}),
    ({r"layers\.1.*": 4, "o_proj": 4}, {"o_proj": 30}),
    ({}, {"q_proj|o_proj": 30}),
    ({}, {"^model.layers.0.self_attn.q_proj": 30}),
    ({}, {Q: 30}),
    ({}, {"q_proj": 30, Q: 5}),
    ({}, {Q: 5, r"self_attn\.q.*": 30}),
    ({}, {".*q_proj": 30, "model.*": 5}),
]


def scale(folder: Path, name: str, **config) -> float:
    keys = {key: x for key, x in LINEAR.items() if f"{name}." in key}
    weights = read_adapter(save(folder, keys, r=4, lora_alpha=8, **config), TARGETS)
    return weights.modules[name].scale


@pytest.mark.parametrize(("ranks", "alphas"), TABLES)
@pytest.mark.parametrize("version", WRITERS)
def test_the_writers_reading(tmp_path, version, ranks, alphas):
    config = {"rank_pattern": ranks, "alpha_pattern": alphas, "pattern_order": "trainer"}
    for name in (Q, OUT, OTHER):
        wanted = pefts(version, name, ranks, alphas) / 4
        assert scale(tmp_path, name, **WRITERS[version], **config) == wanted, name
        assert scale(tmp_path, name, peft_version=version, **config) == wanted, name


@pytest.mark.parametrize(("ranks", "alphas"), TABLES)
def test_a_writer_that_does_not_show(tmp_path, ranks, alphas):
    """Loads only where all versions agree; the remedy in the message is one."""
    config = {"rank_pattern": ranks, "alpha_pattern": alphas, "pattern_order": "trainer"}
    for name in (Q, OUT, OTHER):
        values = {pefts(version, name, ranks, alphas) for version in WRITERS}
        if len(values) == 1:
            assert scale(tmp_path, name, **config) == values.pop() / 4
            continue
        with pytest.raises(AdapterError, match=rf"{name}.* lora_alpha of .*peft_version"):
            scale(tmp_path, name, **config)


def test_the_files_rank_tells_the_version(tmp_path):
    """Of "q_proj|o_proj" PEFT up to 0.14 finds no o_proj: its rank stays r, here 2."""
    config = {"r": 2, "lora_alpha": 8, "rank_pattern": {"q_proj|o_proj": 4}}
    config["alpha_pattern"] = {"q_proj|o_proj": 12}
    keys = {key: x for key, x in LINEAR.items() if OUT in key}  # rank 4
    found = read_adapter(save(tmp_path, keys, **config), TARGETS)
    assert found.modules[OUT].scale == 12 / 4
    assert any("read as PEFT from 0.15 does: rank 4" in text for text in found.warnings)


def test_an_order_that_one_table_has_lost(tmp_path):
    """Up to 0.13 the key of the ranks decides; sorted, the file's rank tells which it was."""
    ranks = {r"layers\.0\..*": 2, "q_proj": 4}
    config = {**PEFT_012, "rank_pattern": ranks, "alpha_pattern": {"q_proj": 30}}
    assert scale(tmp_path, Q, **config) == 30 / 4
    with pytest.raises(AdapterError, match="pattern_order"):
        scale(tmp_path, Q, **{**config, "rank_pattern": dict.fromkeys(ranks, 4)})


def test_a_pattern_that_only_brackets_allow(tmp_path):
    """Other versions could not have trained with it."""
    assert scale(tmp_path, Q, alpha_pattern={"q_proj)|(o_proj": 12}) == 12 / 4
    with pytest.raises(AdapterError, match="a regular expression"):
        scale(tmp_path, Q, alpha_pattern={"q_proj)": 12})


ALL = ("up to 0.13", "0.14", "from 0.15")


@pytest.mark.parametrize(
    ("version", "fields", "wanted"),
    [
        (None, PEFT_012, ALL[:1]),
        (None, PEFT_014, ALL[1:2]),
        (None, PEFT_015, ALL[2:]),
        (None, {"target_parameters"}, ALL[2:]),
        (None, {"alora_invocation_tokens"}, ALL[2:]),
        (None, {"loftq_config", "megatron_core"}, ALL),  # without its nulls it shows nothing
        (None, {"lora_bias"}, ALL[1:]),
        (None, {"r", "alpha_pattern"}, ALL),
        ("0.13.2", PEFT_015, ALL[:1]),
        ("0.14", {"r"}, ALL[1:2]),
        ("0.21.2", {"r"}, ALL[2:]),
    ],
)
def test_what_fields_show(version, fields, wanted):
    assert possible_pattern_rules(version, frozenset(fields)) == wanted


def test_many_patterns_of_an_unknown_writer_are_fast(tmp_path):
    patterns = {f"layers.{n}.self_attn.q_proj": 4 for n in range(2000)}
    raw = {"peft_type": "LORA", "r": 4, "rank_pattern": patterns, "alpha_pattern": patterns}
    found = parse_config(json.loads(json.dumps(raw)))
    assert found.patterns.alpha(Q, 4) == (4, "")
    assert len(found.patterns.unused()["rank_pattern"]) == 1999
