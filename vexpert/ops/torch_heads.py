"""Deltas of latent attention's expanding Linear in the absorbed form, adapter by adapter."""

import numpy as np
import torch

from vexpert.kernels.dense_factors import HeadColumns
from vexpert.ops.torch_routing import TorchRouting
from vexpert.ops.types import PackedLora


def add_by_head(
    x: torch.Tensor,
    y: torch.Tensor,
    lora: PackedLora,
    routing: TorchRouting,
    columns: HeadColumns,
    of_keys: bool,
) -> None:
    """See `LoraBackend.add_by_head`; sums of half dtypes in float32."""
    (site,), (table,) = lora.sites, lora.tables
    first = 0 if of_keys else columns.key
    width = columns.key if of_keys else columns.value
    for slot in routing.active_slots:
        rank = table.host_rank[slot]
        if rank == 0:
            continue
        a_at, b_at = int(table.a_offset[slot]), int(table.b_offset[0, slot])
        a = table.arena[a_at:][: rank * site.in_features].view(rank, -1).float()
        b = table.arena[b_at:][: rank * site.out_features].view(rank, columns.heads, columns.width)
        b = b[:, :, first : first + width].float()  # [r, H, key or value]
        rows = torch.from_numpy(np.flatnonzero(routing.slots == slot))
        its = x[rows].float()
        if of_keys:
            delta = torch.einsum("thn,rhn->thr", its, b) @ a
        else:
            delta = torch.einsum("thr,rhn->thn", its @ a.t(), b)
        y[rows] = (y[rows].float() + delta).to(y.dtype)
