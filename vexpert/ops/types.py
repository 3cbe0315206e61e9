"""What every backend of the LoRA operations agrees on: sites, tables, routing.

All integer tables live on the device of the arena. A *row* is one line of an activation matrix:
a token for a dense Linear, a (token, k-th expert) pair for routed experts.
"""

from dataclasses import dataclass

import torch


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
    """

    arena: torch.Tensor  # [N] weights, on the device
    rank: torch.Tensor  # [S] int64
    a_offset: torch.Tensor  # [S] int64
    a_stride: torch.Tensor  # [S] int64
    slice_rank: torch.Tensor  # [n, S] int64
    slice_column: torch.Tensor  # [n, S] int64
    b_offset: torch.Tensor  # [n, S] int64
    b_stride: torch.Tensor  # [n, S] int64
    host_rank: list[
        int
    ]  # [S] copy of `rank` on the host: decides, without a sync, what can be skipped
