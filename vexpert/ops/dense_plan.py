"""Which kernels a dense layer of so many rows runs, and the shapes of their tiles.

The choices are data, `dense_plans.json`: the first row that fits. Rows were measured on one H200
with q, k, v [2048 -> 5120] and o [4096 -> 2048] of Qwen3-30B-A3B.
"""

import json
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from vexpert.kernels.dense_shrink import DenseShrink
from vexpert.kernels.dense_tiles import DenseTile

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
    few_rows: int = 0  # up to so many go to `dense_few`, if a reader ends their LoRA


@cache
def _rows() -> dict[str, list[dict[str, Any]]]:
    text = (Path(__file__).parent / "dense_plans.json").read_text(encoding="utf-8")
    rows: dict[str, list[dict[str, Any]]] = json.loads(text)
    return rows


def _first(kind: str, **facts: float) -> dict[str, Any]:
    """The first row none of whose `most_...` is exceeded; the last has none."""
    for row in _rows()[kind]:
        if all(facts[key[5:]] <= row[key] for key in row if key.startswith("most_")):
            return row
    raise AssertionError(f"dense_plans.json: no row of {kind} fits {facts}")


@lru_cache(maxsize=4096)  # every layer of a step asks the same
def choose_dense_plan(shape: DenseShape, adapters: int) -> DensePlan:
    """The plan of a step in which at most `adapters` adapters are active (0: none).

    A row of "linear" that is not `alone` leaves steps without any adapter to the library, whose
    product is then the faster one; base rows of other steps may differ from those in a rounding.
    """
    dtype = "float32" if shape.dtype == torch.float32 else "half"
    base = _first(f"linear {dtype}", rows=shape.rows, columns=shape.columns)
    runs = min(shape.rows, max(1, adapters))
    lora = _first(f"lora {dtype}", rows=shape.rows, rows_per_run=shape.rows / max(1, runs))
    tile = None
    serves = adapters > 0 or base["alone"]
    if base["tile"] is not None and serves and shape.dtype in DOTS:
        tile = DenseTile(**base["tile"], group=lora["group"])
    few = _first(f"few {dtype}", columns=shape.columns)["rows_with_lora" if adapters else "rows"]
    shrink, expand = DenseShrink(**lora["shrink"]), DenseTile(**lora["expand"])
    return DensePlan(tile, shrink, expand, lora["fork"], lora.get("inner", False), few)
