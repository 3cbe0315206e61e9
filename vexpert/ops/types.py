"""What every backend of the LoRA operations agrees on: sites, tables, routing.

All integer tables live on the device of the arena. A *row* is one line of an activation matrix:
a token for a dense Linear, a (token, k-th expert) pair for routed experts.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from vexpert.kernels.activations import Activation
from vexpert.kernels.norms import Norm
from vexpert.ops.routing import Routing


@dataclass(frozen=True)
class OutputSlice:
    """Columns `start, start + stride, ...` (`size` of them) of a site's output."""

    start: int
    size: int
    stride: int = 1


@dataclass(frozen=True)
class LoraSite:
    """One place where LoRA adds: a dense Linear, or one product of an experts module.

    A site has one shrink of up to `max_rank` columns, and one expand per output slice. Gate and
    up are two slices of one site, so they share the shrink whether their A is shared or not.
    """

    index: int  # row of this site in the per-site tables
    name: str  # e.g. "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.gate_up"
    num_experts: int  # 1 for a dense Linear; the vocabulary for an embedding
    in_features: int
    out_features: int
    slices: tuple[OutputSlice, ...]
    max_rank: int  # columns of the shrunk buffer: len(slices) * max_lora_rank


@dataclass(frozen=True)
class SiteTable:
    """Where each slot's factors of one site lie in the arena. Updated in place, never replaced.

    Factors of (slot s, expert e), all offsets and strides in elements of `arena`:
      A   = arena[a_offset[s] + e * a_stride[s]:]              viewed [rank[s], in_features]
      B^T = arena[b_offset[i, s] + e * b_stride[i, s]:]        viewed [slice_rank[i, s], slice size]
    Slice i multiplies shrunk columns `slice_column[i, s] ...+ slice_rank[i, s]`. A stride of 0 is a
    factor shared by all experts. rank 0: the slot does not adapt this site. B holds the scale.

    `packed` holds all of these arrays, one row each, in the order of the properties below: one
    argument where eight would cost more than the work. The properties are views of it.
    """

    arena: torch.Tensor  # [N] weights in the model's dtype, on the device
    packed: torch.Tensor  # [3 + 4 * n, S] int64, for a site of n output slices
    host_rank: list[
        int
    ]  # [S] copy of `rank` on the host: decides, without a sync, what can be skipped
    alignment: int = 1  # every factor starts at a multiple of so many elements
    # [1] int32 on the device, zero between launches, whose programs wait by it.
    arrivals: torch.Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        zero = torch.zeros(1, dtype=torch.int32, device=self.packed.device)
        object.__setattr__(self, "arrivals", zero)

    @cached_property
    def found(self) -> dict[Any, Any]:
        """What was worked out from this table and others of its pool; it lives as long as they."""
        return {}

    @cached_property
    def rank(self) -> torch.Tensor:
        """[S]"""
        return self.packed[0]

    @cached_property
    def a_offset(self) -> torch.Tensor:
        """[S]"""
        return self.packed[1]

    @cached_property
    def a_stride(self) -> torch.Tensor:
        """[S]"""
        return self.packed[2]

    @cached_property
    def slice_rank(self) -> torch.Tensor:
        """[n, S]"""
        return self._slice_rows(0)

    @cached_property
    def slice_column(self) -> torch.Tensor:
        """[n, S]"""
        return self._slice_rows(1)

    @cached_property
    def b_offset(self) -> torch.Tensor:
        """[n, S]"""
        return self._slice_rows(2)

    @cached_property
    def b_stride(self) -> torch.Tensor:
        """[n, S]"""
        return self._slice_rows(3)

    def _slice_rows(self, index: int) -> torch.Tensor:
        slices = (self.packed.shape[0] - 3) // 4
        return self.packed[3 + index * slices : 3 + (index + 1) * slices]


@dataclass(frozen=True)
class PackedLora:
    """One step's adapters on dense sites that read one input and write adjacent columns, in order.

    Every site has num_experts 1 and one slice, which is its whole output.
    """

    sites: tuple[LoraSite, ...]
    tables: tuple[SiteTable, ...]
    routing: Routing  # of the input's rows, by the backend's `route` without experts
    active_slots: tuple[int, ...]
    most_ranks: tuple[int, ...] | None = None  # bounds at the sites; None: as the tables say
    most_adapters: int | None = None  # bound of how many are active; None: as many as there are

    @property
    def num_adapters(self) -> int:
        """No more adapters are active."""
        return len(self.active_slots) if self.most_adapters is None else self.most_adapters

    @property
    def most_rank(self) -> int:
        """No active slot has a larger rank at any of the sites; known on the host."""
        if self.most_ranks is not None:
            return max(self.most_ranks)
        return max(
            (table.host_rank[slot] for table in self.tables for slot in self.active_slots),
            default=0,
        )


@dataclass(frozen=True)
class ExpertsTensors:
    """Weights of a layer's routed experts as views, in the model's dtype."""

    gate_up: torch.Tensor  # [E, n * I, H]
    down: torch.Tensor  # [E, H, I]
    gate_up_bias: torch.Tensor | None  # [E, n * I]
    down_bias: torch.Tensor | None  # [E, H]
    activation: Activation
    is_interleaved: bool  # gate is columns 0::2 and up 1::2 of gate_up's output, not two halves
    scale_input: bool  # the routing weight multiplies the input of gate_up, not down's output

    @property
    def columns(self) -> tuple[int, int, int]:
        """(I, first column of up, step between columns) of gate_up's output."""
        size = self.down.shape[2]
        if not self.activation.has_gate:
            return size, 0, 1
        return (size, 1, 2) if self.is_interleaved else (size, size, 1)


@dataclass(frozen=True)
class ExpertsLora:
    """One step's adapters on one layer's routed experts; a product without any is None."""

    slots: torch.Tensor  # [T] int64, < 0: base
    active_slots: tuple[int, ...]
    gate_up: tuple[LoraSite, SiteTable] | None
    down: tuple[LoraSite, SiteTable] | None
    most_ranks: tuple[int, int] | None = None  # bounds at gate_up and down; None: as the tables say
    most_adapters: int | None = None  # bound of how many are active; None: as many as there are

    @property
    def num_adapters(self) -> int:
        """No more adapters are active."""
        return len(self.active_slots) if self.most_adapters is None else self.most_adapters

    def most_rank(self, is_down: bool) -> int:
        """No active adapter has a higher rank at this product."""
        if self.most_ranks is not None:
            return self.most_ranks[is_down]
        pair = self.down if is_down else self.gate_up
        ranks = [] if pair is None else pair[1].host_rank
        return max((ranks[slot] for slot in self.active_slots if ranks), default=0)


@dataclass
class Finish:
    """What follows a layer's experts and may run in their last launch; that launch fills it in.

    total = residual + multiplier * what the experts give; normed = the norm of it. All in the
    model's dtype.
    """

    residual: torch.Tensor  # [T, H]
    multiplier: float
    norm: Norm | None
    total: torch.Tensor | None = None  # [T, H]; None: it is not done
    normed: torch.Tensor | None = None  # [T, H]
