"""Which modules adapters may change, and the sites they get."""

import pytest
from helpers_models import served, tiny_model

from vexpert.lora.types import EmbeddingTarget, ExpertsTarget, LinearTarget, TargetMap
from vexpert.ops.types import OutputSlice


def targets_of(model_type: str) -> TargetMap:
    return served(tiny_model(model_type), enable_lora=True, max_lora_rank=16).targets


def test_qwen3_moe() -> None:
    targets = targets_of("qwen3_moe")
    layer = "model.layers.1."
    attention = [f"{layer}self_attn.{name}_proj" for name in "qkvo"]
    own = [path for path in targets.targets if path.startswith(layer)]
    assert sorted(own) == sorted([*attention, f"{layer}mlp.experts", f"{layer}mlp.gate"])
    assert set(targets.targets) - {path for path in targets.targets if "layers" in path} == {
        "model.embed_tokens",
        "lm_head",
    }
    assert [site.index for site in targets.sites] == list(range(len(targets.sites)))
    assert targets.architecture == "Qwen3MoeForCausalLM"


def test_sites_of_experts() -> None:
    experts = targets_of("qwen3_moe").targets["model.layers.0.mlp.experts"]
    assert isinstance(experts, ExpertsTarget)
    assert experts.gate_up.slices == (OutputSlice(0, 20), OutputSlice(20, 20))
    assert (experts.gate_up.in_features, experts.gate_up.out_features) == (40, 40)
    assert experts.gate_up.max_rank == 32
    assert (experts.down.in_features, experts.down.out_features) == (20, 40)
    assert experts.down.max_rank == 16
    assert experts.class_name == "Qwen3MoeExperts"


def test_interleaved_gate_and_up() -> None:
    experts = targets_of("gpt_oss").targets["model.layers.0.mlp.experts"]
    assert isinstance(experts, ExpertsTarget)
    assert experts.is_interleaved
    assert experts.is_transposed
    assert experts.gate_up.slices == (OutputSlice(0, 28, 2), OutputSlice(1, 28, 2))


def test_llama4_is_transposed_with_halves() -> None:
    experts = targets_of("llama4_text").targets["model.layers.1.feed_forward.experts"]
    assert isinstance(experts, ExpertsTarget)
    assert experts.is_transposed
    assert not experts.is_interleaved


@pytest.mark.parametrize(
    ("model_type", "router"),
    [
        ("gpt_oss", "mlp.router"),
        ("phimoe", "mlp.router"),
        ("deepseek_v3", "mlp.gate"),
        ("minimax_m2", "mlp.gate"),
        ("ernie4_5_moe", "mlp.gate"),
        ("llama4_text", "feed_forward.router"),
    ],
)
def test_routers(model_type: str, router: str) -> None:
    target = targets_of(model_type).targets[f"model.layers.1.{router}"]
    assert isinstance(target, LinearTarget)
    assert (target.in_features, target.out_features) == (40, 6)


def test_embedding() -> None:
    target = targets_of("mixtral").targets["model.embed_tokens"]
    assert isinstance(target, EmbeddingTarget)
    site = target.site
    assert (site.num_experts, site.in_features, site.out_features) == (61, 1, 40)


def test_latent_projections() -> None:
    names = {path.rpartition(".")[2] for path in targets_of("deepseek_v3").targets}
    assert {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} <= names


def test_no_targets_without_lora() -> None:
    model = tiny_model("qwen3_moe")
    targets = served(model, enable_lora=False).targets
    assert not targets.targets
    assert not any(type(module).__module__.startswith("vexpert.lora") for module in model.modules())


@pytest.mark.parametrize(
    ("model_type", "path"),
    [("qwen3_moe", "model.embed_tokens"), ("gpt_neox", "gpt_neox.embed_in")],
)
def test_the_input_embedding_has_its_own_name(model_type: str, path: str) -> None:
    assert targets_of(model_type).input_embedding == path
