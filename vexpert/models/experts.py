"""Routed experts through transformers' ExpertsInterface: one runner on each experts module."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from vexpert.errors import ModelError
from vexpert.moe.types import ExpertWeights, MoeHooks
from vexpert.ops.types import Finish, LoraSite

NAME = "vexpert"


class Runner(Protocol):
    """The MoE runner of one layer."""

    def __call__(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        hooks: MoeHooks | None = None,
        finish: Finish | None = None,
    ) -> torch.Tensor: ...


@dataclass
class ExpertsLayer:
    """What stands behind one experts module; without a runner, it only counts its calls."""

    weights: ExpertWeights
    runner: Runner | None = None
    hooks: Callable[[], MoeHooks | None] | None = None
    calls: int = 0
    sites: tuple[LoraSite, ...] = ()  # that adapters may change: of gate_up and of down
    finish: Finish | None = None  # of the next call; see `models/fused_layer.py`

    def __call__(
        self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """Sum of the routed experts' outputs: hidden [T, H], ids and weights [T, K] -> [T, H]."""
        if self.runner is None:
            self.calls += 1
            return torch.zeros_like(hidden)
        finish, self.finish = self.finish, None
        hooks = self.hooks() if self.hooks else None
        return self.runner(hidden, topk_ids, topk_weights, hooks, finish)


def experts_forward(
    module: nn.Module, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """The function of ExpertsInterface: hidden [T, H], ids and weights [T, K] -> [T, H]."""
    layer = module.vexpert_experts
    assert isinstance(layer, ExpertsLayer)
    return layer(hidden, topk_ids, topk_weights)


def attach_experts(model: nn.Module) -> dict[str, ExpertsLayer]:
    """Put an ExpertsLayer on every experts module; its path -> layer. Changes the modules.

    Raises ModelError for experts that cannot be run.
    """
    layers = {}
    for path, module in model.named_modules():
        weights = None
        if type(module).__name__ == "Llama4TextMoe":
            path, module, weights = _attach_llama4(path, module)
        elif hasattr(module, "is_concatenated"):
            weights = _weights(path, module)
        if weights is not None:
            layers[path] = ExpertsLayer(weights)
            module.vexpert_experts = layers[path]
    _refuse_other_experts(model)
    return layers


def _refuse_other_experts(model: nn.Module) -> None:
    """Raise ModelError for stacked weights [E, ., .] outside the experts that we run."""
    for path, module in model.named_modules():
        stacked = any(p.dim() == 3 for p in module.parameters(recurse=False))
        if stacked and not hasattr(module, "vexpert_experts"):
            raise ModelError(
                f"{path}: the experts of {type(module).__name__} do not run through "
                "ExpertsInterface in this version of transformers; use a newer one"
            )


def _weights(path: str, module: Any) -> ExpertWeights:
    """The tensors and flags of a module that `use_experts_implementation` decorates."""
    if getattr(module, "has_post_expert_norm", False):
        raise ModelError(f"{path}: experts with a norm after the down projection are not served")
    name = "gate_up_proj" if module.has_gate else "up_proj"
    activate = module._apply_gate if module.has_gate else module.act_fn
    return make_weights(
        gate_up=getattr(module, name),
        down=module.down_proj,
        gate_up_bias=getattr(module, name + "_bias") if module.has_bias else None,
        down_bias=module.down_proj_bias if module.has_bias else None,
        is_transposed=module.is_transposed,
        has_gate=module.has_gate,
        is_interleaved=module.has_gate and not module.is_concatenated,
        scale_input=False,
        activate=activate,
    )


def make_weights(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    is_transposed: bool,
    **facts: Any,
) -> ExpertWeights:
    """ExpertWeights with its sizes read off `down`."""
    inner, outer = (1, 2) if is_transposed else (2, 1)
    return ExpertWeights(
        gate_up=gate_up,
        down=down,
        is_transposed=is_transposed,
        num_experts=down.shape[0],
        hidden_size=down.shape[outer],
        intermediate_size=down.shape[inner],
        **facts,
    )


def _attach_llama4(path: str, block: Any) -> tuple[str, nn.Module, ExpertWeights]:
    """Make a Llama4TextMoe route each token to its top-k experts only; transformers runs all.

    The routing weight multiplies the experts' input. Returns path, module and weights of the
    experts.
    """
    experts = block.experts
    act = experts.act_fn

    def activate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        product: torch.Tensor = up * act(gate)
        return product

    def forward(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden_states.reshape(-1, block.hidden_dim)
        scores, logits = block.router(hidden)  # scores [T, E]: 0 where an expert is not chosen
        ids = torch.topk(logits, block.top_k, dim=1).indices
        routed = experts_forward(experts, hidden, ids, scores.gather(1, ids))
        return block.shared_expert(hidden) + routed, logits

    block.forward = forward
    weights = make_weights(
        gate_up=experts.gate_up_proj,
        down=experts.down_proj,
        is_transposed=True,
        gate_up_bias=None,
        down_bias=None,
        has_gate=True,
        is_interleaved=False,
        scale_input=True,
        activate=activate,
    )
    return f"{path}.experts", experts, weights
