"""LoRA on the bare-weight routers of transformers: the delta enters before the top-k."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from helpers_adapters import EXPERTS, HIDDEN, CountingBackend, adapter, begin, canonical_delta
from helpers_adapters import tiny_targets as make_targets
from torch import nn
from torch.nn import functional

from vexpert.errors import UnsupportedError
from vexpert.lora.layers import wrap_router
from vexpert.lora.pack import pack
from vexpert.lora.pool import SlotPool
from vexpert.lora.types import LinearTarget, LoraState

CPU = torch.device("cpu")
TARGETS = make_targets()
WEIGHTS = [
    adapter(TARGETS, 0, 4, ("router",)),
    adapter(TARGETS, 1, 8),
    adapter(TARGETS, 2, 2, ("q",)),
]
SLOTS = [0, 1, -1, 2, 1, 0]
ROUTERS = [
    ("qwen3_moe", "Qwen3MoeTopKRouter"),
    ("mixtral", "MixtralTopKRouter"),
    ("olmoe", "OlmoeTopKRouter"),
    ("deepseek_v3", "DeepseekV3TopkRouter"),
    ("glm4_moe", "Glm4MoeTopkRouter"),
    ("gpt_oss", "GptOssTopKRouter"),
    ("phimoe", "PhimoeTopKRouter"),
    ("minimax_m2", "MiniMaxM2TopKRouter"),
    ("ernie4_5_moe", "Ernie4_5_MoeTopKRouter"),
    ("granitemoe", "GraniteMoeTopKRouter"),
    ("dots1", "Dots1TopkRouter"),
    ("llama4", "Llama4Router"),
]
CONFIG = SimpleNamespace(
    hidden_size=HIDDEN,
    num_experts=EXPERTS,
    num_local_experts=EXPERTS,
    n_routed_experts=EXPERTS,
    moe_num_experts=EXPERTS,
    num_experts_per_tok=2,
    moe_k=2,
    moe_norm_min=1e-12,
    norm_topk_prob=True,
    n_group=2,
    topk_group=1,
    routed_scaling_factor=1.5,
    router_jitter_noise=0.01,
    input_jitter_noise=0.0,
)


def build(model: str, name: str, dtype: torch.dtype) -> nn.Module:
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    router: nn.Module = getattr(module, name)(CONFIG)
    router = router.to(dtype).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in router.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return router


def extra_args(model: str) -> tuple[torch.Tensor, ...]:
    return (torch.linspace(-0.1, 0.1, EXPERTS),) if model == "minimax_m2" else ()


def serve(dtype: torch.dtype) -> tuple[LoraState, LinearTarget]:
    pool = SlotPool(TARGETS, 3, 1 << 20, CPU, dtype)
    for weights in WEIGHTS:
        pool.install(pack(weights, TARGETS, dtype))
    target = TARGETS.targets["router"]
    assert isinstance(target, LinearTarget)
    return LoraState(tables=pool.tables), target


def rows_of(outputs: object) -> tuple[torch.Tensor, ...]:
    assert isinstance(outputs, tuple)
    return tuple(part.reshape(len(SLOTS), -1) for part in outputs)


def logits_of(outputs: object) -> torch.Tensor:
    """The router's logits, wherever this version of transformers returns them."""
    (logits,) = (part for part in rows_of(outputs) if part.shape[1] == EXPERTS)
    return logits


@torch.no_grad()
@pytest.mark.parametrize(("model", "name"), ROUTERS, ids=[model for model, _ in ROUTERS])
def test_each_row_is_routed_by_its_own_adapter(model: str, name: str) -> None:
    plain, router = build(model, name, torch.float32), build(model, name, torch.float32)
    state, target = serve(torch.float32)
    assert wrap_router(router, target, state, CountingBackend()) is router
    hidden, extra = torch.randn(len(SLOTS), HIDDEN), extra_args(model)
    base = rows_of(plain(hidden, *extra))
    for got, want in zip(rows_of(router(hidden, *extra)), base, strict=True):
        assert torch.equal(got, want)
    begin(state, SLOTS)
    mixed = rows_of(router(hidden, *extra))
    weight = plain.get_parameter("weight")
    own = weight.clone()
    changed = 0
    for row, slot in enumerate(SLOTS):
        delta = canonical_delta(TARGETS, WEIGHTS[slot], target.site)[0] if slot >= 0 else 0.0
        weight.copy_(own + delta)
        merged = rows_of(plain(hidden, *extra))
        for got, want, before in zip(mixed, merged, base, strict=True):
            torch.testing.assert_close(got[row], want[row], atol=1e-4, rtol=1e-4)
            if slot in (-1, 2):
                assert torch.equal(got[row], before[row])
            else:
                changed += not torch.equal(got[row], before[row])
    assert changed >= 4


@torch.no_grad()
@pytest.mark.parametrize("model", ["deepseek_v3", "granitemoe", "ernie4_5_moe"])
def test_routers_in_bfloat16_models_keep_their_float32_base_rows(model: str) -> None:
    router = build(model, dict(ROUTERS)[model], torch.bfloat16)
    state, target = serve(torch.bfloat16)
    hidden = torch.randn(len(SLOTS), HIDDEN, dtype=torch.bfloat16)
    base = logits_of(router(hidden))
    wrap_router(router, target, state, CountingBackend())
    begin(state, SLOTS)
    logits = logits_of(router(hidden))
    assert logits.dtype == base.dtype == torch.float32
    for row, slot in enumerate(SLOTS):
        if slot in (-1, 2):
            assert torch.equal(logits[row], base[row])
            continue
        delta = canonical_delta(TARGETS, WEIGHTS[slot], target.site)[0] @ hidden[row].float()
        error = (logits[row] - base[row] - delta).norm() / delta.norm()
        assert error < 2e-2


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight) + functional.linear(x, self.weight)


class NoLinear(TwoLinears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


@pytest.mark.parametrize(("module", "calls"), [(TwoLinears(), 2), (NoLinear(), 0)])
def test_a_router_of_another_make_is_refused(module: nn.Module, calls: int) -> None:
    state, target = serve(torch.float32)
    wrap_router(module, target, state, CountingBackend())
    with torch.no_grad():
        module(torch.randn(len(SLOTS), HIDDEN))
        begin(state, SLOTS)
        with pytest.raises(UnsupportedError, match=rf"router: .* calls F.linear {calls} times"):
            module(torch.randn(len(SLOTS), HIDDEN))
