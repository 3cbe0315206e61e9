"""Which kernels a MoE layer of so many pairs runs, and the shapes of their tiles."""

from dataclasses import dataclass

from vexpert.kernels.moe_gate_up import TileShape
from vexpert.kernels.moe_shrink import ShrinkShape


@dataclass(frozen=True)
class BasePlan:
    """The base path. `is_identity`: no order, every pair alone; for a token or so."""

    is_identity: bool
    block_m: int
    gate_up: TileShape
    down: TileShape
    order_chunk: int = 0  # pairs of a chunk when pairs are ordered by counting; 0: by comparing all
    pdl: bool = True


@dataclass(frozen=True)
class LoraPlan:
    """What LoRA adds to it."""

    shrink: ShrinkShape
    down_shrink: ShrinkShape
    by_run: bool  # an item of a tile's expand is a run; else a row
    group: int  # items of one dot
    item_stages: int = 1  # of the loop over groups
    prefetch: bool = False  # the first group's factors before the base product
    early: bool = False  # shrunk rows before it too; runs only


@dataclass(frozen=True)
class MoePlan:
    """One choice."""

    base: BasePlan
    lora: LoraPlan
