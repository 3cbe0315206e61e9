"""Adapters that the installed PEFT trains and saves, read here: same log-probs as PEFT's model."""

import copy
import functools
import warnings
from typing import Any

import peft
import pytest
import torch
from helpers_formats import applied, log_probs, target_map
from helpers_writers import COMMON, CONFIGS
from transformers import AutoConfig, AutoModelForCausalLM

from vexpert.lora.extras import EXTRAS
from vexpert.lora.reader import read_adapter

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "experts, router, attention": (
        "qwen3_moe",
        {"target_modules": ["q_proj"], "target_parameters": [*EXPERTS, "mlp.gate.weight"]},
    ),
    "only down": ("qwen3_moe", {"target_parameters": ["down_proj"]}),
    "only gate_up, square": ("olmoe", {"target_parameters": ["gate_up_proj"]}),
    "only down, square": ("gpt_oss_square", {"target_parameters": ["down_proj"]}),
    "transposed without the flag": ("llama4_text", {"target_parameters": EXPERTS}),
    "patterns": (
        "gpt_oss",
        {
            "target_modules": ["q_proj", "v_proj"],
            "target_parameters": EXPERTS,
            "rank_pattern": {"q_proj": 1, r"layers\.1\.mlp\.experts\.down_proj": 5},
            "alpha_pattern": {"v_proj": 3, "experts.gate_up_proj": 7},
        },
    ),
    "rslora": (
        "qwen3_moe",
        {
            "target_modules": ["o_proj"],
            "target_parameters": EXPERTS,
            "use_rslora": True,
            "rank_pattern": {"down_proj": 4},
        },
    ),
    "layers_to_transform, exclude_modules": (
        "qwen3_moe",
        {
            "target_modules": ["q_proj", "k_proj"],
            "layers_to_transform": [1],
            "exclude_modules": ["k_proj"],
        },
    ),
    "dora with the head": (
        "qwen3_moe",
        {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    ),
    "dora, rslora": (
        "deepseek_v3",
        {"target_modules": ["o_proj", "kv_b_proj"], "use_dora": True, "use_rslora": True},
    ),
    "lora_bias": (
        "gpt_oss",
        {"target_modules": ["q_proj", "o_proj"], "lora_bias": True, "rank_pattern": {"q_proj": 4}},
    ),
    "bias lora_only": ("gpt_oss", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "bias all": (
        "gpt_oss",
        {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "bias": "all"},
    ),
    "embedding and head": ("qwen3_moe", {"target_modules": ["embed_tokens", "lm_head"]}),
    "modules_to_save": (
        "qwen3_moe",
        {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]},
    ),
    "token rows": (
        "qwen3_moe",
        {"target_modules": ["v_proj"], "trainable_token_indices": [5, 3, 39]},
    ),
    "token rows of the head too": (
        "qwen3_moe",
        {
            "target_modules": ["v_proj"],
            "trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [7]},
        },
    ),
    "pissa converted": ("mixtral", {"target_modules": ["q_proj"], "init_lora_weights": "pissa"}),
    "all-linear": ("mixtral", {"target_modules": "all-linear"}),
    "one rank": ("mixtral", {"target_parameters": EXPERTS, "r": 1}),
    "rank is the number of experts": ("mixtral", {"target_parameters": EXPERTS, "r": 3}),
}


@functools.cache
def base_model(name: str) -> torch.nn.Module:
    config = AutoConfig.for_model(name.removesuffix("_square"), **{**COMMON, **CONFIGS[name]})
    torch.manual_seed(0)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **eager).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    return model


def train(model: torch.nn.Module) -> None:
    """Stand-in for training: every trainable parameter gets a random step."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("name", CASES)
def test_reads_as_peft_means(name, tmp_path):
    model_name, options = CASES[name]
    model = base_model(model_name)
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 5, **options}, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of saving embeddings and of target names
        tuned = peft.get_peft_model(copy.deepcopy(model), config)
        if "pissa" in name:
            tuned.save_pretrained(tmp_path / "before")
        train(tuned)
        ids = [5, 9, 3, 1, 7, 39, 2, 2, 11]
        wanted = log_probs(tuned.eval(), ids)
        converting = "pissa" in name
        tuned.save_pretrained(
            tmp_path,
            path_initial_model_for_weight_conversion=str(tmp_path / "before")
            if converting
            else None,
        )
    weights = read_adapter(
        tmp_path,
        target_map(model),
        supported=frozenset(EXTRAS),
        base_weight=dict(model.named_parameters()).get,
    )
    assert (wanted - log_probs(model, ids)).abs().max() > 0.01
    with applied(model, weights) as merged:
        torch.testing.assert_close(log_probs(merged, ids), wanted, atol=2e-4, rtol=0)
