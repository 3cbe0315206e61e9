"""Which kernels a MoE layer of so many pairs runs, and the shapes of their tiles.

The choices are data, `moe_plans.json` (see `plan_rows`). Its rows were measured on one H200 with
128 experts, top-8, hidden 2048, intermediate 768. What decides is how many rows an expert, and a
run of one adapter on one expert, has on average, so other shapes read the same rows; those of
`vexpert bench tune` are of one shape.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from vexpert.kernels.moe_delta import DeltaShape
from vexpert.kernels.moe_product import TileShape
from vexpert.kernels.moe_shrink import ShrinkShape
from vexpert.ops.plan_rows import PlanRows, Row, make, packaged, plan_part


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
class DeltaPlan:
    """LoRA of each product in one kernel, whose result the base product adds; `moe_delta`."""

    piece: int  # positions
    gate_up: DeltaShape
    down: DeltaShape


@dataclass(frozen=True)
class LoraPlan:
    """What LoRA adds to it."""

    shrink: ShrinkShape
    down_shrink: ShrinkShape
    by_run: bool  # an item of a tile's expand is a run; else a row: pairs are then ordered at once
    group: int  # items of one dot
    item_stages: int = 1  # of the loop over groups
    prefetch: bool = False  # the first group's factors before the base product; of runs, where
    early: bool = False  # shrunk rows before it too; runs only
    delta: DeltaPlan | None = None  # in place of all of it, unless ranks are too many
    inner: bool = False  # shrinks in the launches of the products; rows that are ordered only


@dataclass(frozen=True)
class MoePlan:
    """One choice."""

    base: BasePlan
    lora: LoraPlan


@dataclass(frozen=True)
class MoeShape:
    """What a choice depends on."""

    tokens: int
    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    can_use_tma: bool  # both weights contiguous as [E, N, K], gate and up in two halves
    can_use_pdl: bool

    @property
    def pairs(self) -> int:
        return self.tokens * self.top_k

    def facts(self, adapters: int = 0, rank: int = 0) -> dict[str, float]:
        """What rows ask for; `rank`: the largest of the active adapters'."""
        runs = min(self.pairs, self.num_experts * max(1, adapters))
        return {
            "tokens": self.tokens,
            "rows_per_expert": self.pairs / self.num_experts,
            "rows_per_run": self.pairs / max(1, runs),
            "adapters": adapters,
            "rank": rank,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "block_loads": int(self.can_use_tma),
        }


@lru_cache(maxsize=4096)  # every layer of a step asks the same
def choose_plan(
    shape: MoeShape, adapters: int, rank: int = 16, rows: PlanRows | None = None
) -> MoePlan:
    """The plan of a step in which at most `adapters` adapters are active (0: none).

    The base plan does not depend on them: a base row is the same with and without adapters beside.
    """
    rows = rows or packaged()
    kind = "float32" if shape.dtype == torch.float32 else "half"
    base = rows.first("moe", f"base {kind}", **shape.facts())
    lora = rows.first("moe", f"lora {kind}", **shape.facts(max(1, adapters), rank))
    return fit_plan(MoePlan(base_plan(base), lora_plan(lora)), shape)


def base_plan(row: Row) -> BasePlan:
    """Of a row of kind "base ..."; before it is fitted to a shape."""
    return make(BasePlan, {"is_identity": False} | plan_part("moe", row))


def lora_plan(row: Row) -> LoraPlan:
    """Of a row of kind "lora ..."."""
    return make(LoraPlan, plan_part("moe", row))


def fit_plan(plan: MoePlan, shape: MoeShape) -> MoePlan:
    """`plan` with what is not a choice: the order's chunks, what loads and launches can be."""
    chunk = order_chunk(shape.pairs)
    base = replace(
        plan.base,
        gate_up=_fit(plan.base.gate_up, shape.hidden_size, shape),
        down=_fit(plan.base.down, shape.intermediate_size, shape),
        order_chunk=chunk,
        pdl=shape.can_use_pdl,
    )
    return MoePlan(base, replace(plan.lora, by_run=plan.lora.by_run or chunk > 0))


def order_chunk(pairs: int) -> int:
    """Pairs of a chunk when they are ordered by counting; 0: all are compared."""
    return 0 if pairs <= 1024 else 64 if pairs <= 8192 else 256


def _fit(tile: TileShape, depth: int, shape: MoeShape) -> TileShape:
    """Block loads need whole blocks of the depth, and rows that start at 16 bytes."""
    fits = shape.can_use_tma and depth % tile.block_k == 0
    return replace(tile, tma=tile.tma and fits)
