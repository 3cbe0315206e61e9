"""Coordinate descent: the best of each coordinate, the others held."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Plan = TypeVar("Plan")
# Of plans, the first of which is the one to beat: time in multiples of its own; None: unusable.
Measure = Callable[[Sequence[Plan]], Sequence[float | None]]
LEAST_GAIN = 0.005  # less is noise


def descend(
    start: Plan,
    coordinates: Mapping[str, Callable[[Plan], Iterable[Plan]]],
    measure: Measure[Plan],
    has_time: Callable[[], bool],
    report: Callable[[str], None],
) -> Plan:
    """The best plan found; `start` where nothing is better by LEAST_GAIN.

    Plans must be hashable; equal ones are measured once. Stops before a coordinate without time.
    """
    best = start
    for name, variants in coordinates.items():
        if not has_time():
            report(f"{name}: no time left")
            break
        plans = list(dict.fromkeys([best, *variants(best)]))
        ratios = measure(plans)
        usable = {plan: r for plan, r in zip(plans, ratios, strict=True) if r is not None}
        if not usable:
            report(f"{name}: none of {len(plans)} is usable")
            continue
        winner = min(usable, key=lambda plan: usable[plan])
        ratio = usable[winner] / usable.get(best, 1.0)
        kept = winner != best and ratio > 1 - LEAST_GAIN
        report(
            f"{name}: {len(usable)} of {len(plans)} usable, best {100 * ratio:.1f}%"
            f"{', not worth it' if kept else ''}"
        )
        best = best if kept else winner
    return best
