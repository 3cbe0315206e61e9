"""Random canonical adapters, written in every format by the tests' own writers, read back equal."""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers_writers import (
    W_NAMES,
    assert_same,
    experts_of,
    fused_keys,
    gpt_oss_4bit_keys,
    linear_keys,
    mixed_keys,
    packed_keys,
    per_expert_keys,
    random_adapter,
    save,
    stacked_keys,
    tiny_map,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from vexpert.lora.reader import read_adapter
from vexpert.lora.types import AdapterWeights, Factors

quick = settings(max_examples=12, deadline=None, derandomize=True)
ranks = st.integers(1, 6)
seeds = st.integers(0, 2**31)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def read(model: str, tensors: dict[str, torch.Tensor], config: dict, **options) -> AdapterWeights:
    with tempfile.TemporaryDirectory() as folder:
        return read_adapter(save(Path(folder), tensors, **config), tiny_map(model), **options)


def same(model: str, wanted: AdapterWeights, experts: dict, config: dict, **options):
    targets = tiny_map(model)
    found = read(model, {**experts, **linear_keys(wanted, targets)}, config, **options)
    assert_same(found, wanted)
    return found


FUSED_MODELS = ["qwen3_moe", "mixtral", "gpt_oss", "llama4_text", "deepseek_v3"]


@quick
@given(
    st.sampled_from(FUSED_MODELS),
    ranks,
    seeds,
    st.booleans(),
    st.booleans(),
    st.sampled_from([("gate", "up", "down"), ("gate", "up"), ("down",)]),
    st.sampled_from(["rank_major", "grouped_by_expert"]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_fused_experts(model, rank, seed, over_input, rslora, projections, layout, dtype):
    targets = tiny_map(model)
    scale = 5.0 / (math.sqrt(rank) if rslora else rank)
    wanted = random_adapter(
        targets, rank, scale, generator(seed), projections=projections, one_a=True, dtype=dtype
    )
    keys = fused_keys(wanted, targets, over_input=over_input, layout=layout)
    config = {"r": rank, "lora_alpha": 5.0, "use_rslora": rslora, "lora_B_layout": layout}
    found = same(model, wanted, keys, config)
    for target in experts_of(targets):
        factors = found.modules[target.path]
        if factors.gate is not None:
            assert factors.gate.a is factors.up.a


@quick
@given(st.sampled_from(FUSED_MODELS), ranks, seeds, st.booleans())
def test_fused_experts_that_keep_the_expert_dimension(model, rank, seed, over_input):
    targets = tiny_map(model)
    if rank == experts_of(targets)[0].num_experts:
        rank += 1  # [y, r, E] and [E, y, r] would have to differ by more than r and E
    wanted = random_adapter(targets, rank, 2.0 / rank, generator(seed), one_a=True)
    keys = fused_keys(wanted, targets, over_input=over_input, three_dims=True)
    same(model, wanted, keys, {"r": rank, "lora_alpha": 2})


PER_EXPERT: dict[str, tuple[str, Callable]] = {
    "transformers 4": ("qwen3_moe", per_expert_keys),
    "mixtral w1 w2 w3": (
        "mixtral",
        lambda w, t: per_expert_keys(w, t, W_NAMES, (".mlp.", ".block_sparse_moe.")),
    ),
    "deepseek": ("deepseek_v3", per_expert_keys),
    "interleaved base": ("gpt_oss", per_expert_keys),
    "sglang": ("qwen3_moe", stacked_keys),
    "tinker": ("gpt_oss", lambda w, t: stacked_keys(w, t, W_NAMES)),
}


@pytest.mark.parametrize("name", PER_EXPERT)
@quick
@given(ranks, seeds, st.sets(st.sampled_from(["gate", "up", "down"]), min_size=1))
def test_separate_projections(name, rank, seed, projections):
    model, write = PER_EXPERT[name]
    targets = tiny_map(model)
    wanted = random_adapter(
        targets, rank, 3.0 / rank, generator(seed), projections=tuple(sorted(projections))
    )
    same(model, wanted, write(wanted, targets), {"r": rank, "lora_alpha": 3})


@pytest.mark.parametrize("write", [stacked_keys, mixed_keys])
@quick
@given(st.sampled_from(["qwen3_moe", "gpt_oss"]), ranks, seeds)
def test_shared_outer(write, model, rank, seed):
    targets = tiny_map(model)
    wanted = random_adapter(targets, rank, 3.0 / rank, generator(seed), shared=True)
    same(model, wanted, write(wanted, targets), {"r": rank, "lora_alpha": 3})


@pytest.mark.parametrize("write", [gpt_oss_4bit_keys, packed_keys])
@quick
@given(ranks, seeds)
def test_gate_up_in_one_factor(write, rank, seed):
    targets = tiny_map("gpt_oss")
    wanted = random_adapter(targets, rank, 3.0 / rank, generator(seed), one_a=True)
    same("gpt_oss", wanted, write(wanted, targets), {"r": rank, "lora_alpha": 3})


def test_experts_without_factors_are_zero() -> None:
    targets = tiny_map("qwen3_moe")
    wanted = random_adapter(targets, 2, 2.0, generator(1), linear=False)
    keys = {k: x for k, x in per_expert_keys(wanted, targets).items() if ".experts.1." in k}
    found = read("qwen3_moe", keys, {"r": 2, "lora_alpha": 4})
    for path, factors in found.modules.items():
        for name in ("gate", "up", "down"):
            have, want = getattr(factors, name), getattr(wanted.modules[path], name)
            assert torch.equal(have.a[1], want.a[1])
            assert torch.equal(have.b[1], want.b[1])
            assert not have.b[[0, 2]].any()


def test_ranks_and_alphas_by_expert() -> None:
    """One layer's experts with ranks 1 and 3 and alphas 4 and 9: padded, the scale in B."""
    targets = tiny_map("qwen3_moe")
    target = experts_of(targets)[0]
    tensors, deltas = {}, []
    for expert, rank in enumerate([1, 3, 3]):
        a, b = torch.randn(rank, target.hidden_size), torch.randn(target.intermediate_size, rank)
        tensors[f"base_model.model.{target.path}.{expert}.up_proj.lora_A.weight"] = a
        tensors[f"base_model.model.{target.path}.{expert}.up_proj.lora_B.weight"] = b
        deltas.append((9.0 if expert == 2 else 4.0) / rank * b @ a)
    config = {
        "r": 3,
        "lora_alpha": 4,
        "rank_pattern": {"experts.0.up_proj": 1},
        "alpha_pattern": {r"experts\.2\.up_proj": 9},
    }
    up = read("qwen3_moe", tensors, config).modules[target.path].up
    assert up.rank == 3
    torch.testing.assert_close(up.scale * up.b @ up.a, torch.stack(deltas))


def test_factors_own_their_memory() -> None:
    """What is read lives on when the file is gone or overwritten, and takes only its own bytes."""
    targets = tiny_map("qwen3_moe")
    wanted = random_adapter(targets, 2, 2.0, generator(3))
    keys = {**per_expert_keys(wanted, targets), **linear_keys(wanted, targets)}
    with tempfile.TemporaryDirectory() as folder:
        found = read_adapter(save(Path(folder), keys, r=2, lora_alpha=4), targets)
        data = (Path(folder) / "adapter_model.safetensors").read_bytes()
        with (Path(folder) / "adapter_model.safetensors").open("r+b") as file:
            file.write(b"\0" * len(data))
    assert_same(found, wanted)
    for factors in found.modules.values():
        if isinstance(factors, Factors):
            assert factors.a.untyped_storage().nbytes() == factors.a.nbytes
