"""One MoE layer's experts: route, gate_up, hook, activation, down, hook, combine."""

import torch

from vexpert.errors import UnsupportedError
from vexpert.log import get_logger, log_once
from vexpert.moe.types import ExpertWeights, MoeHooks, PairRows
from vexpert.ops.activation import recognise
from vexpert.ops.backend import Arrangement, FusedExperts, LoraBackend
from vexpert.ops.types import ExpertsTensors, Finish

logger = get_logger(__name__)

NO_HOOKS = MoeHooks()


class MoeRunner:
    """Runs `weights` on `backend`, which may store them anew (in place: pass the Parameters)."""

    def __init__(self, weights: ExpertWeights, backend: LoraBackend) -> None:
        _check(weights)
        self.weights = weights
        self.backend = backend
        for weight in (weights.gate_up, weights.down):
            backend.prepare_weight(weight, weights.is_transposed)
        self.fused = _fuse(weights, backend)

    def __call__(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        hooks: MoeHooks | None = None,
        finish: Finish | None = None,
    ) -> torch.Tensor:
        """hidden [T, H], topk_ids [T, K] int64, topk_weights [T, K] -> [T, H] in hidden's dtype.

        Pairs with a sentinel expert add nothing. Both hooks of one call get the same `rows`. Only a
        layer that runs as one operation fills in `finish`, whose total is then the result.
        """
        weights, backend = self.weights, self.backend
        if self.fused is not None and (hooks is None or hooks.fused is not None):
            lora = hooks.fused if hooks else None
            return self.fused(hidden, topk_ids, topk_weights, lora, finish)
        hooks = hooks or NO_HOOKS
        pairs = backend.arrange(topk_ids, weights.num_experts)
        rows = PairRows(pairs.token, pairs.expert)
        x: torch.Tensor = hidden
        x_rows: torch.Tensor | None = pairs.token
        if weights.scale_input:
            x, x_rows = _scaled_rows(hidden, topk_weights, pairs), None
        y = backend.grouped_gemm(
            x, x_rows, weights.gate_up, weights.gate_up_bias, pairs, weights.is_transposed
        )
        if hooks.after_gate_up is not None:
            hooks.after_gate_up(x, x_rows, y, rows)
        inner = weights.activate(y)
        out = backend.grouped_gemm(
            inner, None, weights.down, weights.down_bias, pairs, weights.is_transposed
        )
        if hooks.after_down is not None:
            hooks.after_down(inner, None, out, rows)
        return backend.combine(out, None if weights.scale_input else topk_weights, pairs)


def _fuse(weights: ExpertWeights, backend: LoraBackend) -> FusedExperts | None:
    """The layer as one operation, if the backend has it and knows the activation; logged."""
    if not backend.can_fuse:
        return None
    activation = recognise(
        weights.activate,
        weights.has_gate,
        weights.is_interleaved,
        weights.intermediate_size,
        weights.down.device,
    )
    if activation is None:
        log_once(logger, f"MoE layers run step by step on {backend.name}: unknown activation")
        return None

    def view(weight: torch.Tensor) -> torch.Tensor:
        return weight.transpose(1, 2) if weights.is_transposed else weight

    fused = backend.fuse_experts(
        ExpertsTensors(
            gate_up=view(weights.gate_up),
            down=view(weights.down),
            gate_up_bias=weights.gate_up_bias,
            down_bias=weights.down_bias,
            activation=activation,
            is_interleaved=weights.is_interleaved,
            scale_input=weights.scale_input,
        )
    )
    how = "step by step" if fused is None else "as one operation"
    log_once(logger, f"MoE layers run {how} on {backend.name}, activation {activation.name}")
    return fused


def _scaled_rows(
    hidden: torch.Tensor, topk_weights: torch.Tensor, pairs: Arrangement
) -> torch.Tensor:
    """Each pair's input times its routing weight, [P, H] in hidden's dtype."""
    scale = topk_weights.reshape(-1).index_select(0, pairs.pair).unsqueeze(1)
    return (hidden.index_select(0, pairs.token) * scale).to(hidden.dtype)


def _check(weights: ExpertWeights) -> None:
    """Raise UnsupportedError unless shapes and dtypes agree with the sizes and flags."""
    e, h, i = weights.num_experts, weights.hidden_size, weights.intermediate_size
    n = 2 * i if weights.has_gate else i
    gate_up, down = ((e, h, n), (e, i, h)) if weights.is_transposed else ((e, n, h), (e, h, i))
    expected = {
        "gate_up": (weights.gate_up, gate_up),
        "down": (weights.down, down),
        "gate_up_bias": (weights.gate_up_bias, (e, n)),
        "down_bias": (weights.down_bias, (e, h)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape or tensor.dtype != weights.gate_up.dtype:
            raise UnsupportedError(
                f"experts' {name} is {tuple(tensor.shape)} {tensor.dtype}, expected {shape} "
                f"{weights.gate_up.dtype} for {e} experts, hidden {h}, intermediate {i}, "
                f"is_transposed={weights.is_transposed}, has_gate={weights.has_gate}"
            )
