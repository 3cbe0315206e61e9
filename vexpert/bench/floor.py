"""The least time that a step's bytes and products allow, counted from the rows that were drawn.

Bytes: every distinct (adapter, expert) that a row visits reads its A and B once, every distinct
expert its base weights and biases once. Activations, tables and indices are left out.
"""

from dataclasses import dataclass

import torch

from vexpert.bench.draw import Draw
from vexpert.bench.layer import BenchLayer

BANDWIDTH = 4.3e12  # bytes/s, copy rate measured on an H200
FLOPS = 790e12  # of dense bf16 products, measured on an H200


@dataclass(frozen=True)
class Floor:
    """What one step must at least read and multiply."""

    base_bytes: int
    lora_bytes: int
    lora_row_bytes: int  # inputs of both shrinks, of pairs that have an adapter; not in the floor
    base_flops: int

    def base_us(self, bandwidth: float) -> float:
        return self.base_bytes / bandwidth * 1e6

    def lora_us(self, bandwidth: float) -> float:
        return self.lora_bytes / bandwidth * 1e6

    def arithmetic_us(self, flops: float) -> float:
        return self.base_flops / flops * 1e6


def expert_bytes(layer: BenchLayer) -> int:
    """Of one expert's base weights and biases."""
    weights = layer.run.weights
    tensors = (weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias)
    return sum(t[0].numel() * t.element_size() for t in tensors if t is not None)


def adapter_bytes(layer: BenchLayer, slot: int) -> int:
    """Of one virtual expert's factors at both sites."""
    elements = 0
    for site, table in layer.sites:
        elements += int(table.rank[slot]) * site.in_features
        for part, rank in zip(site.slices, table.slice_rank[:, slot].tolist(), strict=True):
            elements += rank * part.size
    return elements * layer.dtype.itemsize


def row_bytes(layer: BenchLayer) -> int:
    """Of what one pair gives to both shrinks."""
    return sum(site.in_features for site, _ in layer.sites) * layer.dtype.itemsize


def count_floor(layer: BenchLayer, draw: Draw) -> Floor:
    """Of one step; every expert id is on this rank."""
    shape = layer.shape
    slots = draw.slots.cpu()[:, None].expand(-1, shape.top_k)
    ids = draw.topk_ids.cpu()
    adapted = slots >= 0
    virtual = torch.unique((slots * shape.experts + ids)[adapted])
    visits = torch.bincount(virtual // shape.experts)  # distinct experts of each slot
    lora = sum(n * adapter_bytes(layer, slot) for slot, n in enumerate(visits.tolist()) if n)
    weights = layer.run.weights
    products = weights.gate_up[0].numel() + weights.down[0].numel()
    return Floor(
        base_bytes=torch.unique(ids).numel() * expert_bytes(layer),
        lora_bytes=lora,
        lora_row_bytes=int(adapted.sum()) * row_bytes(layer),
        base_flops=2 * ids.numel() * products,
    )
