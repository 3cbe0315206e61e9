"""Helpers for tests of adapter files: the TargetMap of a model, adapters in numbers."""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from vexpert.lora.types import (
    AdapterWeights,
    EmbeddingTarget,
    ExpertsFactors,
    ExpertsTarget,
    Factors,
    LinearTarget,
    Target,
    TargetMap,
)
from vexpert.models.targets import tied_modules
from vexpert.ops.types import LoraSite, OutputSlice

CASES = Path(__file__).resolve().parents[2] / "shared" / "cases"


class _Sites:
    """Hands out sites with running indices."""

    def __init__(self) -> None:
        self.made: list[LoraSite] = []

    def add(
        self, name: str, experts: int, inputs: int, slices: tuple[OutputSlice, ...]
    ) -> LoraSite:
        outputs = sum(part.size for part in slices)
        site = LoraSite(len(self.made), name, experts, inputs, outputs, slices, 64 * len(slices))
        self.made.append(site)
        return site


def target_map(model: Any) -> TargetMap:
    """Every Linear, router, embedding and experts module of a transformers model."""
    sites = _Sites()
    targets: dict[str, Target] = {}
    for path, module in model.named_modules():
        target = _target(path, module, model, sites)
        if target is not None:
            targets[path] = target
    parameters = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    return TargetMap(
        model.config.model_type,
        type(model).__name__,
        targets,
        tuple(sites.made),
        parameters,
        tied=tied_modules(model),
    )


def _target(path: str, module: Any, model: Any, sites: _Sites) -> Target | None:
    if isinstance(module, nn.Embedding):
        vocabulary, dim = module.weight.shape
        site = sites.add(path, vocabulary, 1, (OutputSlice(0, dim),))
        return EmbeddingTarget(path, site, vocabulary, dim)
    if hasattr(module, "down_proj") and isinstance(module.down_proj, nn.Parameter):
        return _experts(path, module, model, sites)
    weight = getattr(module, "weight", None)
    if isinstance(weight, nn.Parameter) and weight.ndim == 2:
        outputs, inputs = weight.shape
        return LinearTarget(
            path, sites.add(path, 1, inputs, (OutputSlice(0, outputs),)), inputs, outputs
        )
    return None


def _experts(path: str, module: Any, model: Any, sites: _Sites) -> ExpertsTarget:
    has_gate = hasattr(module, "gate_up_proj")
    down = module.down_proj
    hidden = model.config.get_text_config().hidden_size
    name = type(module).__name__
    transposed = name in ("GptOssExperts", "Llama4TextExperts")
    experts = down.shape[0]
    inner = down.shape[1 if transposed else 2]
    interleaved = name == "GptOssExperts"
    stride = 2 if interleaved else 1
    starts = (0, 1 if interleaved else inner) if has_gate else (0,)
    slices = tuple(OutputSlice(start, inner, stride) for start in starts)
    return ExpertsTarget(
        path,
        sites.add(f"{path}.gate_up", experts, hidden, slices),
        sites.add(f"{path}.down", experts, inner, (OutputSlice(0, hidden),)),
        experts,
        hidden,
        inner,
        has_gate,
        transposed,
        interleaved,
        name,
    )


def load_model(name: str) -> nn.Module:
    """A case model in float32 with eager attention."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        CASES / "models" / name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def meta_model(config: Any) -> nn.Module:
    """A model of `config` without memory."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def case_target_map(name: str) -> TargetMap:
    """TargetMap of a case model, from its config alone."""
    return target_map(meta_model(AutoConfig.from_pretrained(CASES / "models" / name)))


def dense(factors: Factors) -> torch.Tensor:
    """[E or 1, out, in]: the dense difference that a pair of factors stands for."""
    return factors.scale * factors.b.float() @ factors.a.float()


def log_probs(model: Any, ids: list[int]) -> torch.Tensor:
    """[n, V] log-softmax after each token."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits.float().log_softmax(-1)


@contextlib.contextmanager
def applied(model: Any, weights: AdapterWeights) -> Iterator[nn.Module]:
    """A copy of `model` with the adapter folded into its weights, extras included."""
    merged = copy.deepcopy(model)
    hooks = []
    with torch.no_grad():
        for name, value in weights.full.items():
            _replace(merged, name, value)
        for path, found in weights.modules.items():
            module = merged.get_submodule(path)
            if isinstance(found, ExpertsFactors):
                _merge_experts(module, found, weights.expert_magnitude.get(path))
            elif isinstance(module, nn.Embedding):
                # A tied head keeps the base weight: the embedding gets a table of its own.
                table = module.weight + dense(found)[0].T
                module.weight = nn.Parameter(table)
            else:
                _merge_linear(module, found, weights.magnitude.get(path))
        for path, rows in weights.tokens.items():
            merged.get_submodule(path).weight[list(rows.indices)] = rows.rows
        for path, bias in weights.bias.items():
            module = merged.get_submodule(path)
            hooks.append(module.register_forward_hook(lambda m, i, out, bias=bias: out + bias))
    try:
        yield merged
    finally:
        for hook in hooks:
            hook.remove()


def _replace(model: Any, name: str, value: torch.Tensor) -> None:
    path, _, param = name.rpartition(".")
    setattr(model.get_submodule(path), param, nn.Parameter(value.float()))


def _merge_linear(module: Any, found: Factors, magnitude: torch.Tensor | None) -> None:
    weight = module.weight + dense(found)[0]
    if magnitude is not None:
        weight = weight * (magnitude / weight.norm(dim=1))[:, None]
    module.weight.copy_(weight)


def _merge_experts(module: Any, found: ExpertsFactors, magnitude: Any) -> None:
    name = type(module).__name__
    transposed = name in ("GptOssExperts", "Llama4TextExperts")
    for projection in ("gate", "up", "down"):
        factors = getattr(found, projection)
        if factors is None:
            continue
        weight = _expert_view(module, projection, transposed, name == "GptOssExperts")
        new = weight + dense(factors)
        if magnitude is not None and getattr(magnitude, projection) is not None:
            scale = getattr(magnitude, projection) / new.norm(dim=2)
            new = new * torch.nan_to_num(scale, nan=1.0)[..., None]
        weight.copy_(new)


def _expert_view(module: Any, projection: str, transposed: bool, interleaved: bool) -> torch.Tensor:
    """[E, out, in] view of one projection of the base parameters."""
    name = {"down": "down_proj"}.get(projection, "gate_up_proj")
    both: torch.Tensor = getattr(module, name if hasattr(module, name) else "up_proj")
    both = both.mT if transposed else both
    if not hasattr(module, "gate_up_proj") or projection == "down":
        return both
    if interleaved:
        return both[:, 0::2] if projection == "gate" else both[:, 1::2]
    half = both.shape[1] // 2
    return both[:, :half] if projection == "gate" else both[:, half:]
