"""Which kernels a MoE layer of so many pairs runs, and the shapes of their tiles.

The choices are data, `moe_plans.json`: the first row that fits. Rows were measured on one H200 with
128 experts, top-8, hidden 2048, intermediate 768. What decides is how many rows an expert, and a
run of one adapter on one expert, has on average, so other shapes read the same rows.
"""

import json
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from vexpert.kernels.moe_delta import DeltaShape
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


@lru_cache(maxsize=4096)  # every layer of a step asks the same
def choose_plan(shape: MoeShape, adapters: int, rank: int = 16) -> MoePlan:
    """The plan of a step in which at most `adapters` adapters, of at most `rank`, are active."""
    return MoePlan(_base(shape), _lora(shape, max(1, adapters), rank))


@cache
def _rows() -> dict[str, list[dict[str, Any]]]:
    text = (Path(__file__).parent / "moe_plans.json").read_text(encoding="utf-8")
    rows: dict[str, list[dict[str, Any]]] = json.loads(text)
    return rows


def _kind(dtype: torch.dtype) -> str:
    return "float32" if dtype == torch.float32 else "half"


def _first(kind: str, **facts: float) -> dict[str, Any]:
    """The first row none of whose `most_...` is exceeded; the last has none."""
    for row in _rows()[kind]:
        if all(facts[key[5:]] <= row[key] for key in row if key.startswith("most_")):
            return row
    raise AssertionError(f"moe_plans.json: no row of {kind} fits {facts}")


def _base(shape: MoeShape) -> BasePlan:
    row = _first(
        f"base {_kind(shape.dtype)}",
        tokens=shape.tokens,
        rows_per_expert=shape.pairs / shape.num_experts,
    )
    gate_up, down = TileShape(**row["gate_up"]), TileShape(**row["down"])
    return BasePlan(
        is_identity=row.get("is_identity", False),
        block_m=row["block_m"],
        gate_up=_fit(gate_up, shape.hidden_size, shape),
        down=_fit(down, shape.intermediate_size, shape),
        order_chunk=order_chunk(shape.pairs),
        pdl=shape.can_use_pdl,
    )


def order_chunk(pairs: int) -> int:
    """Pairs of a chunk when they are ordered by counting; 0: all are compared."""
    return 0 if pairs <= 1024 else 64 if pairs <= 8192 else 256


def _fit(tile: TileShape, depth: int, shape: MoeShape) -> TileShape:
    """Block loads need whole blocks of the depth, and rows that start at 16 bytes."""
    fits = shape.can_use_tma and depth % tile.block_k == 0
    return replace(tile, tma=tile.tma and fits)


def _lora(shape: MoeShape, adapters: int, rank: int) -> LoraPlan:
    runs = min(shape.pairs, shape.num_experts * adapters)
    row = _first(
        f"lora {_kind(shape.dtype)}",
        tokens=shape.tokens,
        rows_per_expert=shape.pairs / shape.num_experts,
        rows_per_run=shape.pairs / max(1, runs),
        rank=rank,
    )
    keys = ("by_run", "group", "item_stages", "prefetch", "early", "inner")
    rest = {key: row[key] for key in keys if key in row}
    plan = LoraPlan(ShrinkShape(**row["shrink"]), ShrinkShape(**row["down_shrink"]), **rest)
    delta = None
    if "delta" in row:
        its = row["delta"]
        delta = DeltaPlan(its["piece"], DeltaShape(**its["gate_up"]), DeltaShape(**its["down"]))
    return replace(plan, by_run=plan.by_run or order_chunk(shape.pairs) > 0, delta=delta)
