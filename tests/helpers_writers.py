"""Writers of adapter folders: canonical factors in, one trainer's file format out."""

import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from helpers_formats import meta_model, target_map
from safetensors.torch import save_file
from transformers import AutoConfig

from vexpert.lora.types import (
    AdapterWeights,
    EmbeddingTarget,
    ExpertsFactors,
    ExpertsTarget,
    Factors,
    TargetMap,
)

Tensors = dict[str, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]  # A and B
PREFIX = "base_model.model."

COMMON = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 10, "num_experts": 3, "intermediate_size": 20},
    "mixtral": {"intermediate_size": 12, "num_local_experts": 3},
    "olmoe": {"intermediate_size": 8, "num_experts": 3},  # gate_up is square
    "gpt_oss": {"intermediate_size": 12, "num_local_experts": 3},  # transposed, interleaved
    "gpt_oss_square": {"intermediate_size": 16, "num_local_experts": 3},  # down is square
    "llama4_text": {"intermediate_size": 10, "num_local_experts": 3},  # transposed, no flag
    "ernie4_5_moe": {
        "moe_intermediate_size": 10,
        "moe_num_experts": 3,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "intermediate_size": 20,
        "num_key_value_heads": 2,
    },
    "deepseek_v3": {
        "moe_intermediate_size": 10,
        "n_routed_experts": 4,
        "intermediate_size": 20,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 6,
        "kv_lora_rank": 6,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "head_dim": 4,
    },
}


@functools.cache
def tiny_map(name: str) -> TargetMap:
    """TargetMap of a tiny model of one of CONFIGS, built without weights."""
    config = AutoConfig.for_model(name.removesuffix("_square"), **{**COMMON, **CONFIGS[name]})
    return target_map(meta_model(config))


def experts_of(targets: TargetMap) -> list[ExpertsTarget]:
    return [t for t in targets.targets.values() if isinstance(t, ExpertsTarget)]


# -- canonical adapters ---------------------------------------------------------------------------


def random_adapter(
    targets: TargetMap,
    rank: int,
    scale: float,
    generator: torch.Generator,
    *,
    linear: bool = True,
    projections: tuple[str, ...] = ("gate", "up", "down"),
    one_a: bool = False,
    shared: bool = False,
    dtype: torch.dtype = torch.float32,
) -> AdapterWeights:
    """Random factors of one rank and scale. `one_a`: gate and up have one A, as fused files give;
    `shared`: the hidden side of every pair is shared by all experts.
    """

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    modules: dict[str, Factors | ExpertsFactors] = {}
    for path, target in targets.targets.items():
        if isinstance(target, ExpertsTarget):
            modules[path] = _experts(target, rank, scale, draw, projections, one_a, shared)
        elif linear:
            if isinstance(target, EmbeddingTarget):
                inputs, outputs = target.num_embeddings, target.embedding_dim
            else:
                inputs, outputs = target.in_features, target.out_features
            modules[path] = Factors(draw(1, rank, inputs), draw(1, outputs, rank), scale)
    return AdapterWeights(modules)


def _experts(
    target: ExpertsTarget,
    rank: int,
    scale: float,
    draw: Callable[..., torch.Tensor],
    projections: tuple[str, ...],
    one_a: bool,
    shared: bool,
) -> ExpertsFactors:
    experts, hidden, inner = target.num_experts, target.hidden_size, target.intermediate_size
    outer = 1 if shared else experts
    a = draw(outer, rank, hidden)
    found = {}
    for name in projections:
        if name == "down":
            found[name] = Factors(draw(experts, rank, inner), draw(outer, hidden, rank), scale)
        else:
            own = a if one_a else draw(outer, rank, hidden)
            found[name] = Factors(own, draw(experts, inner, rank), scale)
    return ExpertsFactors(**found)


def assert_same(found: AdapterWeights, wanted: AdapterWeights) -> None:
    """Equal bit for bit, scales to rounding."""
    assert found.modules.keys() == wanted.modules.keys()
    for path, module in wanted.modules.items():
        other = found.modules[path]
        if isinstance(module, Factors):
            assert isinstance(other, Factors)
            _same_pair(other, module)
            continue
        for name in ("gate", "up", "down"):
            want, have = getattr(module, name), getattr(other, name)
            assert (want is None) == (have is None), f"{path}.{name}"
            if want is not None:
                _same_pair(have, want)


def _same_pair(found: Factors, wanted: Factors) -> None:
    assert math.isclose(found.scale, wanted.scale, rel_tol=1e-12)
    for have, want in ((found.a, wanted.a), (found.b, wanted.b)):
        assert have.dtype == want.dtype
        assert have.is_contiguous()
        assert torch.equal(have, want)


# -- files ----------------------------------------------------------------------------------------


def save(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """An adapter folder with these tensors and fields of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(
        {key: x.contiguous().clone() for key, x in tensors.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def linear_keys(weights: AdapterWeights, targets: TargetMap) -> Tensors:
    """PEFT's keys of Linear modules, routers and embeddings."""
    tensors: Tensors = {}
    for path, found in weights.modules.items():
        if isinstance(found, ExpertsFactors):
            continue
        if isinstance(targets.targets[path], EmbeddingTarget):
            tensors[f"{PREFIX}{path}.lora_embedding_A"] = found.a[0]
            tensors[f"{PREFIX}{path}.lora_embedding_B"] = found.b[0]
        else:
            tensors[f"{PREFIX}{path}.lora_A.weight"] = found.a[0]
            tensors[f"{PREFIX}{path}.lora_B.weight"] = found.b[0]
    return tensors


def _gate_up_b(target: ExpertsTarget, found: ExpertsFactors) -> torch.Tensor:
    """[E or 1, 2I, r]: B of the fused gate_up in the base weight's row order."""
    assert found.gate is not None
    assert found.up is not None
    if target.is_interleaved:
        return torch.stack([found.gate.b, found.up.b], 2).flatten(1, 2)
    return torch.cat([found.gate.b, found.up.b], 1)


def fused_keys(
    weights: AdapterWeights,
    targets: TargetMap,
    *,
    over_input: bool = True,
    layout: str = "rank_major",
    three_dims: bool = False,
) -> Tensors:
    """PEFT's ParamWrapper: gate_up inner, down outer; a single one outer."""
    tensors: Tensors = {}
    for target in experts_of(targets):
        found = _found(weights, target)
        pairs = {}
        if found.gate is not None:
            pairs["gate_up"] = found.gate.a, _gate_up_b(target, found)
        if found.down is not None:
            pairs["down"] = found.down.a, found.down.b
        for name, (a, b) in pairs.items():
            inner = name == "gate_up" and len(pairs) == 2
            key = f"{PREFIX}{target.path}{'.base_layer' if inner else ''}"
            first, second = (a, b) if over_input else (b.mT, a.mT)
            second = second.permute(1, 2, 0) if layout == "rank_major" else second.permute(1, 0, 2)
            if not three_dims:
                first, second = first.flatten(0, 1), second.flatten(1)
            tensors[f"{key}.lora_A.weight"] = first
            tensors[f"{key}.lora_B.weight"] = second
    return tensors


NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
W_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


def per_expert_keys(
    weights: AdapterWeights,
    targets: TargetMap,
    names: dict[str, str] = NAMES,
    rename: tuple[str, str] = ("", ""),
) -> Tensors:
    """One 2D pair for each expert."""
    tensors: Tensors = {}
    for target, name, pair in _pairs(weights, targets):
        for expert in range(target.num_experts):
            path = f"{target.path}.{expert}.{names[name]}".replace(*rename)
            tensors[f"{PREFIX}{path}.lora_A.weight"] = pair.a[expert]
            tensors[f"{PREFIX}{path}.lora_B.weight"] = pair.b[expert]
    return tensors


def stacked_keys(
    weights: AdapterWeights, targets: TargetMap, names: dict[str, str] = NAMES
) -> Tensors:
    """Tinker's and SGLang's 3D tensors, a leading 1 for shared factors."""
    tensors: Tensors = {}
    for target, name, pair in _pairs(weights, targets):
        path = f"{PREFIX}{target.path}.{names[name]}"
        tensors[f"{path}.lora_A.weight"] = pair.a
        tensors[f"{path}.lora_B.weight"] = pair.b
    return tensors


def mixed_keys(weights: AdapterWeights, targets: TargetMap) -> Tensors:
    """Megatron-Bridge's shared outer: the shared side stacked, the other one per expert."""
    tensors: Tensors = {}
    for target, name, pair in _pairs(weights, targets):
        for part, x in (("A", pair.a), ("B", pair.b)):
            if x.shape[0] == 1:
                tensors[f"{PREFIX}{target.path}.{NAMES[name]}.lora_{part}.weight"] = x
                continue
            for expert in range(target.num_experts):
                key = f"{PREFIX}{target.path}.{expert}.{NAMES[name]}.lora_{part}.weight"
                tensors[key] = x[expert]
    return tensors


def gpt_oss_4bit_keys(weights: AdapterWeights, targets: TargetMap) -> Tensors:
    """Unsloth's 4-bit gpt-oss: a Linear for each expert, gate_up in one, rows interleaved."""
    tensors: Tensors = {}
    for target in experts_of(targets):
        pairs = _stacked(weights, target)
        for expert in range(target.num_experts):
            for name, (a, b) in zip(("gate_up_projs", "down_projs"), pairs, strict=True):
                path = f"{PREFIX}{target.path}.{name}.{expert}"
                tensors[f"{path}.lora_A.weight"] = a[expert]
                tensors[f"{path}.lora_B.weight"] = b[expert]
    return tensors


def packed_keys(weights: AdapterWeights, targets: TargetMap) -> Tensors:
    """Megatron-Bridge's packed names with stacked tensors: experts.gate_up_proj, down_proj."""
    tensors: Tensors = {}
    for target in experts_of(targets):
        pairs = _stacked(weights, target)
        for name, (a, b) in zip(("gate_up_proj", "down_proj"), pairs, strict=True):
            path = f"{PREFIX}{target.path}.{name}"
            tensors[f"{path}.lora_A"], tensors[f"{path}.lora_B"] = a, b
    return tensors


def _stacked(weights: AdapterWeights, target: ExpertsTarget) -> tuple[Pair, Pair]:
    """(A, B) of gate_up and of down, all experts' [E, ...]."""
    found = _found(weights, target)
    assert found.gate is not None
    assert found.down is not None
    gate_up = found.gate.a, _gate_up_b(target, found)
    return gate_up, (found.down.a, found.down.b)


def _found(weights: AdapterWeights, target: ExpertsTarget) -> ExpertsFactors:
    found = weights.modules[target.path]
    assert isinstance(found, ExpertsFactors)
    return found


def _pairs(
    weights: AdapterWeights, targets: TargetMap
) -> Iterator[tuple[ExpertsTarget, str, Factors]]:
    for target in experts_of(targets):
        for name in ("gate", "up", "down"):
            pair = getattr(weights.modules[target.path], name)
            if pair is not None:
                yield target, name, pair
