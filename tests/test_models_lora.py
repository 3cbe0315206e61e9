"""Two adapters on every target and base rows, mixed in steps, equal models with merged weights."""

from typing import Any

import pytest
import torch
from helpers_models import (
    Driver,
    random_sequences,
    reference_logits,
    relative_error,
    served,
    tiny_model,
)

from vexpert.lora.pack import pack
from vexpert.lora.pool import SlotPool
from vexpert.lora.types import (
    AdapterWeights,
    EmbeddingTarget,
    ExpertsFactors,
    ExpertsTarget,
    Factors,
    Target,
    TargetMap,
)

MODELS: tuple[str, ...] = (
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "llama4_text",
    "phimoe",
    "dots1",
)
MODELS += ("ernie4_5_moe", "granitemoe", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "glm4_moe")


def random_factors(
    generator: torch.Generator, experts: int, inputs: int, outputs: int, rank: int
) -> Factors:
    a = torch.randn(experts, rank, inputs, generator=generator) * inputs**-0.5
    b = torch.randn(experts, outputs, rank, generator=generator) * 0.4
    return Factors(a, b, 0.5)


def random_adapter(targets: TargetMap, seed: int, rank: int) -> AdapterWeights:
    """Factors on every target."""
    generator = torch.Generator().manual_seed(seed)

    def make(target: Target) -> Factors | ExpertsFactors:
        if isinstance(target, ExpertsTarget):
            sizes = target.num_experts, target.hidden_size, target.intermediate_size, rank
            gate, up = (random_factors(generator, *sizes) for _ in range(2))
            count, hidden, inner, _ = sizes
            return ExpertsFactors(gate, up, random_factors(generator, count, inner, hidden, rank))
        if isinstance(target, EmbeddingTarget):
            return random_factors(generator, 1, target.num_embeddings, target.embedding_dim, rank)
        return random_factors(generator, 1, target.in_features, target.out_features, rank)

    return AdapterWeights({path: make(target) for path, target in targets.targets.items()})


def delta(factors: Factors | None) -> torch.Tensor:
    assert factors is not None
    return factors.scale * factors.b @ factors.a


def merge(model: Any, targets: TargetMap, adapter: AdapterWeights) -> None:
    """Add the dense deltas to the weights of an untouched transformers model.

    Adapters of a tied embedding and of lm_head are separate, so the copy is untied first.
    """
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    for path, target in targets.targets.items():
        module, factors = model.get_submodule(path), adapter.modules[path]
        if isinstance(factors, ExpertsFactors):
            assert isinstance(target, ExpertsTarget)
            gate, up, down = delta(factors.gate), delta(factors.up), delta(factors.down)
            gate_up = torch.cat((gate, up), 1)
            if target.is_interleaved:
                gate_up = torch.stack((gate, up), 2).flatten(1, 2)
            flip = target.is_transposed
            module.gate_up_proj.add_(gate_up.mT if flip else gate_up)
            module.down_proj.add_(down.mT if flip else down)
        else:
            dense = delta(factors)[0]
            module.weight.add_(dense.t() if isinstance(target, EmbeddingTarget) else dense)


@pytest.mark.parametrize("model_type", MODELS)
def test_mixed_batch_equals_merged_models(model_type: str) -> None:
    model = served(tiny_model(model_type), enable_lora=True, max_lora_rank=4, max_loras=3)
    pool = SlotPool(model.targets, 3, 1 << 22, torch.device("cpu"), torch.float32)
    model.lora.tables = pool.tables
    adapters = [random_adapter(model.targets, seed, rank) for seed, rank in ((1, 3), (2, 4))]
    slots = [pool.install(pack(adapter, model.targets, torch.float32)) for adapter in adapters]
    sequences = random_sequences(6, 24, 7)
    chosen = [-1, slots[0], slots[1], slots[0], -1, slots[1]]
    got = Driver(model).play(sequences, chosen)
    for slot, adapter in ((-1, None), *zip(slots, adapters, strict=True)):
        merged = tiny_model(model_type)
        if adapter is not None:
            merge(merged, model.targets, adapter)
        want = reference_logits(merged, sequences)
        for i in (i for i, own in enumerate(chosen) if own == slot):
            assert relative_error(got[i], want[i]) < 2e-5
            if slot >= 0:
                base = reference_logits(tiny_model(model_type), [sequences[i]])
                assert relative_error(base[0], want[i]) > 0.05
