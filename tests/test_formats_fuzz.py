"""Mutated adapter folders: each loads or raises AdapterError, never anything else."""

import functools
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from helpers_fuzz import mutate
from helpers_writers import (
    W_NAMES,
    fused_keys,
    linear_keys,
    mixed_keys,
    per_expert_keys,
    random_adapter,
    save,
    stacked_keys,
    tiny_map,
)

from vexpert.errors import AdapterError
from vexpert.lora.extras import EXTRAS
from vexpert.lora.reader import read_adapter

ROUNDS = int(os.environ.get("VEXPERT_FUZZ_ROUNDS", "60"))


def fused(weights, targets):
    return fused_keys(weights, targets)


def dora(weights, targets):
    keys = per_expert_keys(weights, targets)
    magnitudes = {
        key.replace("lora_B.weight", "lora_magnitude_vector"): x[:, 0].abs()
        for key, x in {**keys, **linear_keys(weights, targets)}.items()
        if key.endswith("lora_B.weight")
    }
    return {**keys, **magnitudes}


def extras(weights, targets):
    return {
        "base_model.model.lm_head.base_layer.weight": torch.ones(40, 16),
        "base_model.model.model.norm.weight": torch.ones(16),
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(
            2, 16
        ),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias": torch.ones(16),
    }


KINDS = {
    "fused": ("qwen3_moe", fused, {}, {"peft_version": "0.21.2"}),
    "square": ("olmoe", fused, {}, {"peft_version": "0.21.2"}),
    "interleaved": ("gpt_oss", fused, {}, {"peft_version": "0.21.2"}),
    "per expert": ("mixtral", per_expert_keys, {}, {"rank_pattern": {"q_proj": 3}}),
    "tinker": ("gpt_oss", lambda w, t: stacked_keys(w, t, W_NAMES), {"shared": True}, {}),
    "mixed": ("qwen3_moe", mixed_keys, {"shared": True}, {}),
    "dora": ("qwen3_moe", dora, {"embedding": False}, {"use_dora": True}),
    "extras": ("qwen3_moe", extras, {}, {"trainable_token_indices": [1, 2], "lora_bias": None}),
}


@functools.cache
def original(kind: str, root: Path) -> Path:
    model, write, options, config = KINDS[kind]
    targets = tiny_map(model)
    one_a = write is fused
    has_embedding = options.get("embedding", True)
    weights = random_adapter(
        targets, 3, 2.0, torch.Generator().manual_seed(1), one_a=one_a,
        shared=options.get("shared", False),
    )  # fmt: skip
    keys = {
        key: x
        for key, x in {**linear_keys(weights, targets), **write(weights, targets)}.items()
        if has_embedding or "embed_tokens" not in key
    }
    return save(root / kind.replace(" ", "_"), keys, r=3, lora_alpha=6, **config)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("originals")


def attempt(folder: Path, kind: str) -> bool:
    """True when it loads, False when it is refused; anything else is a failure."""
    targets = tiny_map(KINDS[kind][0])
    try:
        found = read_adapter(folder, targets, supported=frozenset(EXTRAS), max_rank=64)
    except AdapterError:
        return False
    assert found.modules or found.full or found.tokens
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_mutations(kind, root, tmp_path):
    source = original(kind, root)
    assert attempt(source, kind)
    loaded = 0
    for seed in range(ROUNDS):
        folder = tmp_path / str(seed)
        shutil.copytree(source, folder, symlinks=True)
        mutate(folder, random.Random(f"{kind} {seed}"))
        loaded += attempt(folder, kind)
        shutil.rmtree(folder)
    assert 0 < loaded < ROUNDS
