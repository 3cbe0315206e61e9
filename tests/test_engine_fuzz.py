"""Mutated adapter folders given to a running engine: each is served whole or leaves nothing."""

import functools
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_extras import Files, make_llm
from helpers_fuzz import mutate
from helpers_writers import COMMON, CONFIGS, PREFIX, W_NAMES, fused_keys, linear_keys, stacked_keys
from helpers_writers import random_adapter as random_factors
from transformers import AutoConfig, AutoModelForCausalLM

from vexpert import LLM, SamplingParams
from vexpert.errors import AdapterError, AdapterNotFoundError

ROUNDS = int(os.environ.get("VEXPERT_FUZZ_ROUNDS", "25"))  # folders for each kind
ONE = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
PROMPT = {"prompt_token_ids": [3, 1, 2, 39]}


def fused(files: Files) -> Path:
    weights = random_factors(files.targets, 2, 2.0, files.generator, one_a=True)
    keys = linear_keys(weights, files.targets) | fused_keys(weights, files.targets)
    return files.save("fused", keys, peft_version="0.21.2")


def stacked(files: Files) -> Path:
    weights = random_factors(files.targets, 2, 2.0, files.generator, shared=True)
    return files.save("stacked", stacked_keys(weights, files.targets, W_NAMES))


def per_expert(files: Files) -> Path:
    return files.save("per_expert", files.factors)


def dora(files: Files) -> Path:
    return files.save("dora", files.with_magnitudes(files.factors), use_dora=True)


def extras(files: Files) -> Path:
    """Biases, full weights and token rows in one file."""
    factors = files.with_biases(files.some(".q_proj."))
    key = f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"
    keys = factors | files.changed("lm_head.weight", "model.layers.1.mlp.gate.weight")
    tokens = {key: files.draw(2, 16)}
    return files.save("extras", keys | tokens, trainable_token_indices=[1, 2], lora_bias=True)


KINDS = {
    "fused": ("qwen3_moe", fused),
    "square": ("olmoe", fused),
    "interleaved": ("gpt_oss", fused),
    "stacked": ("gpt_oss", stacked),
    "per expert": ("mixtral", per_expert),
    "latent attention": ("deepseek_v3", per_expert),
    "dora": ("qwen3_moe", dora),
    "extras": ("qwen3_moe", extras),
}


@functools.cache
def model(name: str) -> Any:
    config = AutoConfig.for_model(name, **{**COMMON, **CONFIGS[name], "pad_token_id": None})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).float().eval()


def names(llm: LLM) -> list[str]:
    return [info.name for info in llm.adapters()]


def attempt(llm: LLM, folder: Path) -> bool:
    """True when it loads and answers, False when it is refused; anything else is a failure."""
    before = names(llm)
    try:
        llm.load_adapter("fuzzed", str(folder))
    except AdapterError:
        assert names(llm) == before
        with pytest.raises(AdapterNotFoundError):
            llm.generate(PROMPT, ONE, adapter="fuzzed")
        return False
    llm.generate([PROMPT, PROMPT], ONE, adapter=["fuzzed", None])
    llm.unload_adapter("fuzzed")
    assert names(llm) == before
    llm.engine._adapters.check_integrity()
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_folders(kind: str, tmp_path: Path) -> None:
    name, write = KINDS[kind]
    files = Files(model(name), tmp_path)
    source = write(files)
    llm = make_llm(files.model, max_loras=1)
    assert attempt(llm, source)
    base = llm.generate(PROMPT, ONE)[0].outputs[0]
    loaded = 0
    for seed in range(ROUNDS):
        folder = tmp_path / "mutated"
        shutil.copytree(source, folder, symlinks=True)
        mutate(folder, random.Random(f"{kind} {seed}"))
        loaded += attempt(llm, folder)
        shutil.rmtree(folder)
    assert 0 < loaded < ROUNDS
    after = llm.generate(PROMPT, ONE)[0].outputs[0]
    assert (after.token_ids, after.logprobs) == (base.token_ids, base.logprobs)
