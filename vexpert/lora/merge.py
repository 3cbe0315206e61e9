"""Folds an adapter into the weights of a plain transformers model: the slow, obvious way.

`W + s B A` in float32, rounded to the weight's dtype; what `vexpert adapter check` compares with.
"""

import torch
from torch import nn

from vexpert.errors import AdapterError
from vexpert.lora.build_extras import first_parameter
from vexpert.lora.types import (
    AdapterWeights,
    EmbeddingTarget,
    ExpertsFactors,
    ExpertsTarget,
    Factors,
    TargetMap,
)


@torch.no_grad()
def merge_adapter(model: nn.Module, weights: AdapterWeights, targets: TargetMap) -> None:
    """Change the parameters of `model`, in place, to what its adapter makes of them.

    AdapterError for a bias on a module that has no place for one.
    """
    for name, value in weights.full.items():
        _set(model, name, value)
    for path, rows in weights.tokens.items():
        table = model.get_parameter(f"{path}.weight")
        table[list(rows.indices)] = rows.rows.to(table)
    for path, found in weights.modules.items():
        target = targets.targets[path]
        if isinstance(target, ExpertsTarget):
            assert isinstance(found, ExpertsFactors), path
            _merge_experts(model, target, found, weights)
        else:
            assert isinstance(found, Factors), path
            _merge_matrix(model, path, found, weights, isinstance(target, EmbeddingTarget))
    for path, bias in weights.bias.items():
        _add_bias(model, path, bias)


def _set(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """A new parameter in place of the one called `name`; one tied to it keeps the old one."""
    path, _, leaf = name.rpartition(".")
    old = model.get_parameter(name)
    new = nn.Parameter(value.to(old), requires_grad=False)
    setattr(model.get_submodule(path), leaf, new)


def _merge_matrix(
    model: nn.Module, path: str, found: Factors, weights: AdapterWeights, is_embedding: bool
) -> None:
    weight = model.get_parameter(f"{path}.weight")
    delta = _delta(found, 0, weight.device)
    new = weight.float() + (delta.T if is_embedding else delta)
    magnitude = weights.magnitude.get(path)
    if magnitude is not None:
        new *= (magnitude.to(new) / new.norm(dim=1))[:, None]
    _set(model, f"{path}.weight", new)


def _merge_experts(
    model: nn.Module, target: ExpertsTarget, found: ExpertsFactors, weights: AdapterWeights
) -> None:
    slices = target.gate_up.slices
    gate_up = [found.gate, found.up] if target.has_gate else [found.up]
    names = ["gate", "up"] if target.has_gate else ["up"]
    first = first_parameter(target)
    parts = [*zip(names, gate_up, slices, [first] * len(slices), strict=True)]
    parts.append(("down", found.down, target.down.slices[0], "down_proj"))
    magnitudes = weights.expert_magnitude.get(target.path)
    for projection, pair, output, name in parts:
        if pair is None:
            continue
        stored = model.get_parameter(f"{target.path}.{name}")
        weight = stored.mT if target.is_transposed else stored  # [E, out, in]
        columns = slice(output.start, output.start + output.size * output.stride, output.stride)
        magnitude = getattr(magnitudes, projection, None)
        for expert in range(target.num_experts):
            rows = weight[expert, columns]
            new = rows.float() + _delta(pair, expert, weight.device)
            if magnitude is not None and not bool(magnitude[expert, 0].isnan()):
                new *= (magnitude[expert].to(new) / new.norm(dim=1))[:, None]
            rows.copy_(new)


def _delta(pair: Factors, expert: int, device: torch.device) -> torch.Tensor:
    """[out, in] float32 of one expert."""
    a, b = (x[expert if len(x) > 1 else 0].to(device, torch.float32) for x in (pair.a, pair.b))
    return (b @ a) * pair.scale


def _add_bias(model: nn.Module, path: str, bias: torch.Tensor) -> None:
    module = model.get_submodule(path)
    if not isinstance(module, nn.Linear):
        raise AdapterError(f"{path}: a {type(module).__name__} has no place to merge a bias into")
    old = module.bias
    new = bias.to(module.weight) if old is None else (old.float() + bias.to(old.device)).to(old)
    module.bias = nn.Parameter(new, requires_grad=False)
