"""Winners as rows of a plan file: for which steps each of them counts."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vexpert.bench.shapes import LayerShape
from vexpert.ops.plan_rows import Row

HOST = ("order_chunk", "pdl")  # of a plan, but no choice


def ranges(values: Sequence[int]) -> dict[int, tuple[int, int]]:
    """The least and most for which each tuned value stands: up to the geometric middle between two.

    1 stands for itself alone; beyond the ends a value stands for half an octave.
    """
    ordered = sorted(set(values))
    found = {}
    for i, value in enumerate(ordered):
        below = ordered[i - 1] if i else None
        above = ordered[i + 1] if i + 1 < len(ordered) else None
        least = math.ceil(value / math.sqrt(2)) if below is None else _middle(below, value) + 1
        most = math.floor(value * math.sqrt(2)) if above is None else _middle(value, above)
        found[value] = (least, max(most, value))
    return found


def _middle(low: int, high: int) -> int:
    return 1 if low == 1 else math.isqrt(low * high)


def shape_facts(shape: LayerShape) -> Row:
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inter,
        "num_experts": shape.experts,
        "top_k": shape.top_k,
    }


def within(name: str, bounds: tuple[int, int]) -> Row:
    """Conditions that a fact lies within bounds."""
    return {f"least_{name}": bounds[0], f"most_{name}": bounds[1]}


def up_to(values: Sequence[int], value: int) -> tuple[int, int]:
    """A rank stands for those above the next lower one that was tuned."""
    lower = [other for other in values if other < value]
    return (max(lower) + 1 if lower else 1, value)


def plan_row(plan: Any) -> Row:
    """A plan's dataclass as JSON takes it, without what is no choice."""
    return {key: value for key, value in dataclasses.asdict(plan).items() if key not in HOST}


def write_rows(path: str, families: Mapping[str, Any], about: Mapping[str, str]) -> None:
    """A file that `--kernel-plans` reads; one row a line."""
    parts = [f'"about": {json.dumps(dict(about))}']
    for family, kinds in families.items():
        lists = [_list(kind, rows) for kind, rows in kinds.items() if rows]
        parts.append(f"{json.dumps(family)}: {{\n  " + ",\n  ".join(lists) + "\n}")
    Path(path).write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _list(kind: str, rows: Sequence[Row]) -> str:
    lines = ",\n    ".join(json.dumps(row) for row in rows)
    return f"{json.dumps(kind)}: [\n    {lines}\n  ]"
