"""Which kernels a dense layer of so many rows runs, and the shapes of their tiles.

The choices are data, `dense_plans.json` (see `plan_rows`). Its rows were measured on one H200
with q, k, v [2048 -> 5120] and o [4096 -> 2048] of Qwen3-30B-A3B.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from vexpert.kernels.dense_factors import ReaderTile
from vexpert.kernels.dense_shrink import DenseShrink
from vexpert.kernels.dense_tiles import DenseTile
from vexpert.ops.plan_rows import PlanRows, Row, make, packaged, plan_part

DOTS = (torch.float32, torch.float16, torch.bfloat16)  # what the kernels multiply


@dataclass(frozen=True)
class DenseShape:
    """What a choice depends on."""

    rows: int
    depth: int
    columns: int
    dtype: torch.dtype


@dataclass(frozen=True)
class DensePlan:
    """One choice."""

    linear: DenseTile | None  # of the product with LoRA in it; None: the library's, then `expand`
    shrink: DenseShrink
    expand: DenseTile
    fork: bool = False  # the shrink beside the library's product, where a graph is captured
    inner: bool = False  # the shrink in the launch of `linear`, for rows of one tile
    reader: ReaderTile | None = None  # of many rows: who reads them ends their LoRA, by tiles
    few_rows: int = 0  # up to so many go to `dense_few`, if a reader ends their LoRA


@lru_cache(maxsize=4096)  # every layer of a step asks the same
def choose_dense_plan(shape: DenseShape, adapters: int, rows: PlanRows | None = None) -> DensePlan:
    """The plan of a step in which at most `adapters` adapters are active (0: none).

    A row of "linear" that is not `alone` leaves steps without any adapter to the library, whose
    product is then the faster one; base rows of other steps may differ from those in a rounding.
    """
    rows = rows or packaged()
    dtype = "float32" if shape.dtype == torch.float32 else "half"
    facts: dict[str, float] = {"rows": shape.rows, "columns": shape.columns, "depth": shape.depth}
    base = rows.first("dense", f"linear {dtype}", **facts)
    runs = min(shape.rows, max(1, adapters))
    facts |= {"adapters": adapters, "rows_per_run": shape.rows / max(1, runs)}
    group, plan = dense_lora_part(rows.first("dense", f"lora {dtype}", **facts))
    few = dense_few_part(rows.first("dense", f"few {dtype}", columns=shape.columns))
    plan = replace(plan, few_rows=few[adapters > 0])
    tile, alone = dense_linear_part(base)
    if tile is None or not (adapters > 0 or alone) or shape.dtype not in DOTS:
        return plan
    return replace(plan, linear=replace(tile, group=group))


def dense_few_part(row: Row) -> tuple[int, int]:
    """Of a row of kind "few ...": up to how many rows `dense_few` takes, without and with LoRA."""
    return int(row["base"]), int(row["with_lora"])


def dense_linear_part(row: Row) -> tuple[DenseTile | None, bool]:
    """Of a row of kind "linear ...": the product's tile, and whether it also runs without LoRA."""
    tile = row["tile"]
    return None if tile is None else make(DenseTile, tile), bool(row["alone"])


def dense_lora_part(row: Row) -> tuple[int, DensePlan]:
    """Of a row of kind "lora ...": the group of the product with LoRA, and the plan without it."""
    rest = plan_part("dense", row)
    group = rest.pop("group")
    return group, make(DensePlan, rest | {"linear": None})
