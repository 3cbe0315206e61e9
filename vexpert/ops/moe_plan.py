"""Which kernels a MoE layer of so many pairs runs, and the shapes of their tiles."""

from dataclasses import dataclass

from vexpert.kernels.moe_gate_up import TileShape
from vexpert.kernels.moe_shrink import ShrinkShape


@dataclass(frozen=True)
class MoePlan:
    """One choice. `is_identity`: no order, every pair alone; only for a handful of tokens."""

    is_identity: bool
    block_m: int
    gate_up: TileShape
    down: TileShape
    shrink: ShrinkShape
    pdl: bool = True
