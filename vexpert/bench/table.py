"""Rows as lines of a table, printed as they come."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vexpert.bench.contenders import BASE, CLASSIC, LORA, ROUTING
from vexpert.bench.measure import Row


@dataclass(frozen=True)
class Column:
    """A heading, its width, and the cell of a row."""

    title: str
    width: int
    cell: Callable[[Row], str]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def _spread(row: Row, contender: str) -> str:
    """10th and 90th percentile."""
    timing = row.times.get(contender)
    return "" if timing is None else f"{_number(timing.p10)}-{_number(timing.p90)}"


def _worst_error(row: Row) -> str:
    return f"{max(row.errors.values()):.0e}" if row.errors else ""


def _floor(row: Row, is_base: bool) -> str:
    if row.floor is None:
        return ""
    of = row.floor.base_us if is_base else row.floor.lora_us
    return _number(of(row.bandwidth))


def _peer(name: str) -> Callable[[Row], str]:
    return lambda row: _number(getattr(row.peer, name)) if row.peer else ""


def _base_share(row: Row) -> str:
    share = f"{row.case.base_share:.0%}"
    return f"-{share}" if row.case.adapter_rows_only else share


def _draw(row: Row) -> str:
    case = row.case
    experts = "" if case.expert_popularity == "uniform" else f"/{case.expert_popularity}"
    return f"{case.popularity}{experts}#{case.seed}"


WHAT = (
    Column("shape", 16, lambda row: row.case.shape),
    Column("rank", 6, lambda row: "+".join(map(str, row.case.ranks))),
    Column("slots", 5, lambda row: str(row.case.slots)),
    Column("adapters", 8, lambda row: str(row.case.adapters)),
    Column("tokens", 6, lambda row: str(row.case.tokens)),
    Column("base", 4, _base_share),
    Column("draw", 10, _draw),
)
TIMES = (
    Column("base us", 8, lambda row: _number(row.median(BASE.name))),
    Column("p10-p90", 15, lambda row: _spread(row, BASE.name)),
    Column("floor", 7, lambda row: _floor(row, True)),
    Column("with LoRA", 9, lambda row: _number(row.median(LORA.name))),
    Column("p10-p90", 15, lambda row: _spread(row, LORA.name)),
    Column("routing", 7, lambda row: _number(row.median(ROUTING.name))),
    Column("added", 7, lambda row: _number(row.added())),
    Column("floor", 7, lambda row: _floor(row, False)),
    Column("x floor", 7, lambda row: _number(row.added_to_floor())),
    Column("bound", 6, lambda row: _number(row.bound())),
)
PEERS = (
    Column("goal", 5, _peer("goal_added_us")),
    Column("vLLM", 6, _peer("vllm_added_us")),
    Column("SGLang", 6, _peer("sglang_added_us")),
    Column("vLLM base", 9, _peer("vllm_base_us")),
)
CLASSIC_ADDED = Column("classic", 8, lambda row: _number(row.added(CLASSIC.name)))
ERROR = Column("error", 5, _worst_error)


def columns(with_classic: bool, with_peers: bool) -> tuple[Column, ...]:
    """Those that say something in this run."""
    classic = (CLASSIC_ADDED,) if with_classic else ()
    return (*WHAT, *TIMES, *classic, *(PEERS if with_peers else ()), ERROR)


def heading(shown: Sequence[Column]) -> str:
    return "  ".join(f"{column.title:>{column.width}}" for column in shown)


def line(row: Row, shown: Sequence[Column]) -> str:
    """One line; a row that failed ends with the reason."""
    cells = "  ".join(f"{column.cell(row):>{column.width}}" for column in shown)
    return f"{cells}  FAILED: {row.failure}" if row.failure else cells
