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
    # down's shrink as a launch of its own; None: partial sums in gate_up's epilogue
    down_shrink: ShrinkShape | None = None
    order_chunk: int = 0  # pairs of a chunk when pairs are ordered by counting; 0: by comparing all
    pdl: bool = True
