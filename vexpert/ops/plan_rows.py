"""Plans as data: rows of JSON by family and kind, of which the first that fits a step counts.

| in a row | holds |
|---|---|
| `most_F`, `least_F`, `F` | fact F of the step at most, at least, exactly this; all must hold |
| the rest | the plan: what the family's module makes of it |

Packaged rows lie beside this file. A user's file (`--kernel-plans`, from `vexpert bench tune`)
has the same families, and an `about` in words; its rows are tried before the packaged ones.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from vexpert.errors import ConfigError

Plan = TypeVar("Plan")
Row = dict[str, Any]
Families = Mapping[str, Mapping[str, Sequence[Row]]]  # family -> kind -> rows

SHAPE_FACTS = ("hidden_size", "intermediate_size", "num_experts", "top_k", "block_loads")
FACTS = {
    "moe": ("tokens", "rows_per_expert", "rows_per_run", "adapters", "rank", *SHAPE_FACTS),
    "dense": ("rows", "columns", "depth", "rows_per_run", "adapters"),
}
KINDS = {
    "moe": ("base half", "lora half", "base float32", "lora float32"),
    "dense": (
        *("few half", "linear half", "lora half"),
        *("few float32", "linear float32", "lora float32"),
    ),
}


class PlanRows:
    """Rows of all families, and in words where they are from. Equal only to itself, as keys are."""

    def __init__(self, families: Families, source: str, about: Mapping[str, str] | None = None):
        self.families = families
        self.source = source
        self.about = about or {}

    @property
    def is_batch_invariant(self) -> bool:
        """Whether every step has the same plans."""
        kinds = (rows for kinds in self.families.values() for rows in kinds.values())
        return all(len(rows) == 1 for rows in kinds)

    def first(self, family: str, kind: str, **facts: float) -> Row:
        """The first row of a kind that fits; a packaged kind's last row always does."""
        for row in self.families.get(family, {}).get(kind, ()):
            if fits(row, facts):
                return row
        raise AssertionError(f"{self.source}: no row of {family}, {kind} fits {facts}")

    def before(self, others: "PlanRows") -> "PlanRows":
        """These rows, then the others."""
        merged = {
            family: {
                kind: (
                    *self.families.get(family, {}).get(kind, ()),
                    *others.families[family][kind],
                )
                for kind in kinds
            }
            for family, kinds in others.families.items()
        }
        return PlanRows(merged, f"{self.source}, then {others.source}", self.about)


def fits(row: Row, facts: Mapping[str, float]) -> bool:
    """Whether all conditions of `row` hold."""
    for name, fact in facts.items():
        if name in row and fact != row[name]:
            return False
        if fact > row.get(f"most_{name}", fact) or fact < row.get(f"least_{name}", fact):
            return False
    return True


def plan_part(family: str, row: Row) -> Row:
    """`row` without its conditions."""
    prefixes = ("", "most_", "least_")
    conditions = {prefix + fact for prefix in prefixes for fact in FACTS[family]}
    return {name: value for name, value in row.items() if name not in conditions}


def make(kind: type[Plan], row: Row) -> Plan:
    """A plan's dataclass from its part of a row; objects become the dataclasses of their fields.

    Raises TypeError for fields that are missing, unknown, or of another type.
    """
    hints = get_type_hints(kind)
    given: dict[str, Any] = {}
    for name, value in row.items():
        if name not in hints:
            raise TypeError(f"{kind.__name__} has no field {name!r}")
        types = get_args(hints[name]) or (hints[name],)
        nested = next(
            (t for t in types if isinstance(t, type) and dataclasses.is_dataclass(t)), None
        )
        if nested is not None and isinstance(value, dict):
            given[name] = make(nested, value)
        elif type(value) in types or (value is None and type(None) in types):
            given[name] = value
        else:
            raise TypeError(f"{kind.__name__}.{name}={value!r} is of another type")
    return kind(**given)


@cache
def packaged(file: str = "") -> PlanRows:
    """The rows beside this module: `moe_plans.json` and `dense_plans.json`."""
    folder = Path(__file__).parent
    names = {family: f"{file}{family}_plans.json" for family in KINDS}
    return PlanRows(
        {family: json.loads((folder / name).read_text()) for family, name in names.items()},
        "packaged plans" if not file else f"packaged plans {file}",
    )


def read_rows(path: str) -> PlanRows:
    """A user's file, its families and kinds checked. Raises ConfigError."""
    where = f"kernel_plans={path!r}"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("about", {}), dict):
        raise ConfigError(f"{where}: must be an object of plan families, as bench tune writes it")
    about = {str(key): str(value) for key, value in data.pop("about", {}).items()}
    for family, kinds in data.items():
        _check_names(f"{where}, {family!r}", family, KINDS)
        if not isinstance(kinds, dict):
            raise ConfigError(f"{where}, {family!r}: must be an object of kinds")
        for kind, rows in kinds.items():
            _check_names(f"{where}, {family!r}, {kind!r}", kind, KINDS[family])
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise ConfigError(f"{where}, {family!r}, {kind!r}: must be a list of rows")
    return PlanRows(data, path, about)


def _check_names(where: str, name: str, known: Any) -> None:
    if name not in known:
        raise ConfigError(f"{where}: unknown; known: {', '.join(known)}")
