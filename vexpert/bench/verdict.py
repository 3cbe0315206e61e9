"""What a run says in the end: rows beside goals, other systems and the bound, the missed named."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vexpert.bench.bound import SLACK
from vexpert.bench.contenders import BASE
from vexpert.bench.measure import Row
from vexpert.bench.peers import SHAPE

Bound = Callable[[Row], float | None]


@dataclass(frozen=True)
class Yardstick:
    """A limit that rows of a run must stay at or below; None where a row has none."""

    key: str  # in JSON: rows that have the limit, and as `{key}_held` those that hold it
    text: str
    value: Bound
    limit: Bound

    def compare(self, rows: Sequence[Row]) -> list[tuple[Row, float, float]]:
        """Rows that were measured and have the limit, with both figures."""
        found = [(row, self.value(row), self.limit(row)) for row in rows]
        return [(r, v, most) for r, v, most in found if v is not None and most is not None]


def _added(row: Row) -> float | None:
    return row.added()


def _base(row: Row) -> float | None:
    return row.median(BASE.name)


def _peers_added(row: Row) -> float | None:
    return min(row.peer.vllm_added_us, row.peer.sglang_added_us) if row.peer else None


def _bound(row: Row) -> float | None:
    """Of shapes that have no goals of their own."""
    most = row.bound()
    return None if most is None or row.case.shape == SHAPE else SLACK * most


YARDSTICKS = (
    Yardstick(
        "goals",
        "added at most the goal",
        _added,
        lambda r: r.peer.goal_added_us if r.peer else None,
    ),
    Yardstick("peers", "added less than vLLM and SGLang", _added, _peers_added),
    Yardstick(
        "bases", "base at most vLLM's", _base, lambda r: r.peer.vllm_base_us if r.peer else None
    ),
    Yardstick("bounds", f"added at most {SLACK} times the bound", _added, _bound),
)


def verdict(rows: Sequence[Row]) -> dict[str, int]:
    """How many rows there are, failed, have each limit, and hold it."""
    counts = {"rows": len(rows), "failed": sum(row.failure is not None for row in rows)}
    for stick in YARDSTICKS:
        compared = stick.compare(rows)
        counts[stick.key] = len(compared)
        counts[f"{stick.key}_held"] = sum(value <= most for _, value, most in compared)
    return counts


def verdict_lines(rows: Sequence[Row]) -> list[str]:
    """A line for each limit that rows of this run have, which names those above it."""
    failed = sum(row.failure is not None for row in rows)
    return [
        f"{len(rows)} rows, {failed} failed",
        *filter(None, (_line(s, rows) for s in YARDSTICKS)),
    ]


def _line(stick: Yardstick, rows: Sequence[Row]) -> str:
    compared = stick.compare(rows)
    above = [(row, value, most) for row, value, most in compared if value > most]
    if not compared:
        return ""
    head = f"{stick.text}: {len(compared) - len(above)} of {len(compared)} rows"
    named = (f"{_name(row)} {value:.1f} > {most:.1f}" for row, value, most in above)
    return head if not above else f"{head}; above: {', '.join(named)}"


def _name(row: Row) -> str:
    """rank/adapters/tokens, and what differs from the usual."""
    case = row.case
    ranks = "+".join(map(str, case.ranks))
    shape = "" if case.shape == SHAPE else f"{case.shape} "
    half = f" base {case.base_share:.0%}" if case.base_share else ""
    return f"{shape}{ranks}/{case.adapters}/{case.tokens}{half}"
