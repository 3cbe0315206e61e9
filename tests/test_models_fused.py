"""Fused norms, attention, routers and layers: what is recognised, and that results stay."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from helpers_models import (
    Driver,
    random_sequences,
    reference_logits,
    relative_error,
    tiny_model,
)
from test_models_lora import merge, random_adapter

from vexpert.config import EngineConfig
from vexpert.kernels.norms import Norm
from vexpert.kernels.rope_arguments import Rope
from vexpert.lora.pack import pack
from vexpert.lora.pool import SlotPool
from vexpert.models.fused_attention import FusedAttention
from vexpert.models.fused_embedding import FusedEmbedding
from vexpert.models.fused_layer import FusedLayer
from vexpert.models.fused_norm import FusedNorm, recognise_norm
from vexpert.models.fused_rotary import FusedRotary
from vexpert.models.fused_router import FusedRouter
from vexpert.models.loader import serve
from vexpert.models.types import StepInput

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.gpu] if GPU else []  # `-m gpu` takes them there, on the device
LIMIT = 1e-5
WHOLE = {  # all of it is fused: routers of how many of its two layers, residuals of how many
    "qwen3_moe": (2, 2),  # that are added in the experts' last launch: not with shared experts
    "gpt_oss": (2, 2),
    "dots1": (1, 0),
    "ernie4_5_moe": (2, 0),
    "granitemoe": (2, 2),
    "minimax_m2": (2, 2),
    "mixtral": (2, 2),
    "olmoe": (2, 2),
    "glm4_moe": (1, 0),
    "qwen2_moe": (2, 0),
}
PARTS = {  # norms, attention modules, routers, layers
    "deepseek_v3": (9, 0, 1, 2),
    "llama4_text": (9, 0, 0, 4),
    "phimoe": (0, 2, 0, 0),
    "gemma2": (9, 2, 0, 0),
    "llama": (5, 2, 0, 2),
}
SCALED = ("granitemoe",)  # between the embedding and its norm
# The interpreter is slow: these have all that differs between the others.
PLAYED = tuple(WHOLE) if GPU else ("qwen3_moe", "gpt_oss")
PLAY = random_sequences(2, 30, 0) if GPU else random_sequences(1, 4, 0)
SEQUENCES = [[7, 30, 12, 4]]


class DeviceDriver(Driver):
    """The driver with a step's tensors on the device."""

    def _step(self, *given: Any) -> StepInput:
        step = super()._step(*given)
        tensors = {
            field.name: getattr(step, field.name).to(DEVICE)
            for field in fields(step)
            if isinstance(getattr(step, field.name), torch.Tensor)
        }
        view = step.lora
        if view is not None:
            view = replace(
                view, slots=view.slots.to(DEVICE), logit_slots=view.logit_slots.to(DEVICE)
            )
        return replace(step, **tensors, lora=view)

    def once(self, ids: list[int]) -> list[torch.Tensor]:
        """Logits [len, vocab] of one sequence as one step."""
        step = self.whole_step(ids, list(range(len(ids))))
        return [self.model.forward(replace(step, logit_rows=step.logit_rows.to(DEVICE)))]


def fused(model: Any, **options: Any) -> Any:
    """`model`, changed in place, served with the Triton backend."""
    given = {"model": "tiny", "device": DEVICE, "enable_lora": False, "lora_backend": "triton"}
    config = EngineConfig(**(given | options))
    return serve(model.to(DEVICE), model.config, config, model.dtype, torch.device(DEVICE))


def forwards(served: Any, kind: type) -> list[Any]:
    """The fused forwards of `kind`, in the order of the modules."""
    found = [getattr(module, "forward", None) for module in served.model.modules()]
    found = [getattr(forward, "__wrapped__", forward) for forward in found]  # a router with LoRA
    return [forward for forward in found if type(forward) is kind]


def worst(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    pairs = zip(got, want, strict=True)
    return max(relative_error(ours.cpu(), theirs) for ours, theirs in pairs)


def counts(served: Any) -> tuple[int, ...]:
    kinds = FusedNorm, FusedAttention, FusedRouter, FusedLayer
    return tuple(len(forwards(served, kind)) for kind in kinds)


@pytest.mark.parametrize("model_type", [*WHOLE, *PARTS])
def test_what_is_fused(model_type: str) -> None:
    """And that logits stay, where all of it is."""
    served = fused(tiny_model(model_type))
    if model_type in PARTS:
        assert counts(served) == PARTS[model_type]
    else:
        norms = [type(module) for module in served.model.modules()]
        total = sum(kind.__name__.endswith("Norm") for kind in norms)
        routers, residuals = WHOLE[model_type]
        assert counts(served) == (total, 2, routers, 2)
        (rotary,) = forwards(served, FusedRotary)
        embeddings = forwards(served, FusedEmbedding)
        assert [each.rotary for each in embeddings] == [rotary] * (model_type not in SCALED)
        parts = [layer.parts for layer in forwards(served, FusedLayer)]
        assert all(part.following for part in parts)
        assert sum(part.router is not None for part in parts) == routers
        assert sum(part.experts is not None for part in parts) == residuals
    if model_type in PLAYED:
        want = reference_logits(tiny_model(model_type), PLAY)
        assert worst(DeviceDriver(served).play(PLAY), want) < LIMIT


@pytest.mark.parametrize("model_type", WHOLE if GPU else ["qwen3_moe"])
def test_half_precision(model_type: str) -> None:
    """All is recognised by its roundings; logits are near those of float32."""
    (want,) = reference_logits(tiny_model(model_type), SEQUENCES)
    served = fused(tiny_model(model_type).to(torch.bfloat16 if GPU else torch.float16))
    assert counts(served)[1:] == (2, WHOLE[model_type][0], 2)
    (got,) = DeviceDriver(served).once(SEQUENCES[0])
    assert relative_error(got.cpu(), want) < (0.1 if GPU else 0.01)


def test_planted_errors_are_seen() -> None:
    """One wrong field of one fused part is far above the limit."""
    want = reference_logits(tiny_model("qwen3_moe"), SEQUENCES)
    served = fused(tiny_model("qwen3_moe"))
    driver = DeviceDriver(served)
    attention = forwards(served, FusedAttention)[1]
    second = forwards(served, FusedLayer)[1].parts.second
    router = forwards(served, FusedRouter)[1]
    wrong = [
        (attention, "rope", Rope(12, interleaved=True)),
        (second, "norm", replace(second.norm, form="one_plus")),
        (router, "choice", replace(router.choice, renormalise=not router.choice.renormalise)),
    ]
    for owner, name, value in wrong:
        right = getattr(owner, name)
        setattr(owner, name, value)
        assert worst(driver.once(SEQUENCES[0]), want) > 100 * LIMIT, name
        setattr(owner, name, right)
    # A norm computed ahead is only for its own input: a wrong reader norms what it is given.
    layers = forwards(served, FusedLayer)
    layers[0].parts.following = layers[1].parts.second
    assert worst(driver.once(SEQUENCES[0]), want) < LIMIT


# Adapters on every target, the router too: its delta enters before the top-k.
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "dots1"] if GPU else ["qwen3_moe"])
def test_adapters_equal_merged_weights(model_type: str) -> None:
    served = fused(tiny_model(model_type), enable_lora=True, max_lora_rank=4, max_loras=2)
    assert counts(served)[1:3] == (2, WHOLE[model_type][0])
    assert len(forwards(served, FusedEmbedding)) == 1
    pool = SlotPool(served.targets, 2, 1 << 22, torch.device(DEVICE), torch.float32)
    served.lora.tables = pool.tables
    adapters = [random_adapter(served.targets, seed, 3) for seed in (1, 2)]
    slots = [pool.install(pack(adapter, served.targets, torch.float32)) for adapter in adapters]
    sequences = random_sequences(3, 3, 3)
    got = DeviceDriver(served).play(sequences, [slots[0], -1, slots[1]])
    for i, adapter in enumerate((adapters[0], None, adapters[1])):
        merged = tiny_model(model_type)
        if adapter is not None:
            merge(merged, served.targets, adapter)
        want = reference_logits(merged, [sequences[i]])
        assert worst(got[i : i + 1], want) < 2 * LIMIT
        if adapter is not None:
            base = reference_logits(tiny_model(model_type), [sequences[i]])
            assert worst(base, want) > 0.05


def norm_of(model_type: str) -> torch.nn.Module:
    return tiny_model(model_type).model.norm


@pytest.mark.parametrize(
    ("model_type", "dtype", "form"),
    [
        ("qwen3_moe", torch.float16, "rounded"),
        ("gpt_oss", torch.float16, "wide"),
        ("gemma2", torch.float16, "one_plus"),
        ("gemma2", torch.float32, "one_plus"),
        ("phimoe", torch.float32, None),
    ],
)
def test_forms_of_norms(model_type: str, dtype: torch.dtype, form: str | None) -> None:
    module = norm_of(model_type).to(DEVICE, dtype)
    weight = module.weight.clone()
    norm = recognise_norm(module)
    assert (norm and norm.form) == form
    assert torch.equal(module.weight, weight)


def test_a_norm_of_another_formula_is_kept() -> None:
    class HalfNorm(type(norm_of("qwen3_moe"))):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * super().forward(x)

    module = HalfNorm(40).to(DEVICE)
    assert recognise_norm(module) is None
    assert isinstance(recognise_norm(norm_of("qwen3_moe").to(DEVICE)), Norm)
