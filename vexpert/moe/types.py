"""What an experts module is made of, and the hooks the MoE runner calls. Knows nothing of LoRA."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from vexpert.ops.types import ExpertsLora


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of all routed experts of one layer, as the checkpoint's module holds them.

    n = 2 with a gate, else 1. All in the model's dtype.
    """

    gate_up: torch.Tensor  # [E, n*I, H], transposed: [E, H, n*I]
    down: torch.Tensor  # [E, H, I], transposed: [E, I, H]
    gate_up_bias: torch.Tensor | None  # [E, n*I]
    down_bias: torch.Tensor | None  # [E, H]
    is_transposed: bool
    has_gate: bool
    is_interleaved: bool  # gate is columns 0::2 and up 1::2 of gate_up's output, not two halves
    scale_input: (
        bool  # the routing weight multiplies the input of gate_up, not down's output (llama4)
    )
    activate: Callable[[torch.Tensor], torch.Tensor]  # gate_up's output [P, n*I] -> [P, I]
    num_experts: int
    hidden_size: int
    intermediate_size: int


@dataclass(frozen=True)
class PairRows:
    """Which pair each row of a layer's activation matrices is. Rows may be in any order."""

    token: torch.Tensor  # [P] int64: row of the layer's input
    expert: torch.Tensor  # [P] int64: local expert, or a sentinel (< 0 or >= num_experts)


class ExpertsHook(Protocol):
    """Adds to `y` in place. Rows of `y` are pairs; `x_rows`: their rows of `x` (None: the same)."""

    def __call__(
        self, x: torch.Tensor, x_rows: torch.Tensor | None, y: torch.Tensor, rows: PairRows
    ) -> None: ...


@dataclass(frozen=True)
class MoeHooks:
    """after_gate_up(x [T or P, H], ..., y [P, n*I]); after_down(x [P, I], ..., y [P, H]).

    y is the product with its bias, before the activation, or before the routing weight.
    `fused` says the same as both to a fused layer, which passes it on as it is; None: this step
    needs the calls, and so the layer step by step.
    """

    after_gate_up: ExpertsHook | None = None
    after_down: ExpertsHook | None = None
    fused: ExpertsLora | None = None
