"""Puts the MoE runner and the LoRA-aware layers into a loaded model."""

from typing import Any

import torch
from torch import nn

from vexpert.lora.layers import LoraEmbedding, LoraLinear, LoraLmHead, experts_hooks, wrap_router
from vexpert.lora.types import EmbeddingTarget, ExpertsTarget, LinearTarget, LoraState, TargetMap
from vexpert.models.experts import ExpertsLayer
from vexpert.moe.runner import MoeRunner
from vexpert.ops.backend import LoraBackend
from vexpert.ops.wide_linear import Product, choose_linear


def attach_runners(experts: dict[str, ExpertsLayer], backend: LoraBackend) -> None:
    """Give every experts layer its MoE runner."""
    for layer in experts.values():
        layer.runner = MoeRunner(layer.weights, backend)


def swap_layers(
    model: Any,
    targets: TargetMap,
    experts: dict[str, ExpertsLayer],
    state: LoraState,
    backend: LoraBackend,
) -> None:
    """Replace, in place, each target of `model` by its LoRA-aware module."""
    head = model.get_output_embeddings()
    for path, target in targets.targets.items():
        module = model.get_submodule(path)
        if isinstance(target, ExpertsTarget):
            experts[path].hooks = experts_hooks(target, state, backend)
            experts[path].sites = target.gate_up, target.down
        elif isinstance(target, EmbeddingTarget):
            _replace(model, path, LoraEmbedding.wrap(module, target, state, backend))
        elif module is head:
            _replace(model, path, LoraLmHead.wrap(module, target, state, backend))
        else:
            _replace(model, path, _wrap_linear(module, target, state, backend))


class WideHead(nn.Linear):
    """lm_head without LoRA, in the form of its product that this machine runs fastest.

    Its outputs are of `head_dtype`, float32 where the weight need not be copied for that.
    """

    product: Product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight, self.bias)


def swap_head(model: Any) -> None:
    """Replace, in place, the lm_head of a model, unless it is LoRA-aware or more than a Linear."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return
    wide = WideHead.__new__(WideHead)
    wide.__dict__.update(head.__dict__)
    wide.product = choose_linear(head.weight)
    for path, module in model.named_modules():
        if module is head:
            _replace(model, path, wide)
            return


def _wrap_linear(
    module: nn.Module, target: LinearTarget, state: LoraState, backend: LoraBackend
) -> nn.Module:
    if type(module) is nn.Linear:
        return LoraLinear.wrap(module, target, state, backend)
    return wrap_router(module, target, state, backend)


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
