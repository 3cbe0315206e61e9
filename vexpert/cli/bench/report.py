"""Numbers of a benchmark as people and programs read them."""

import json
import statistics
from collections.abc import Sequence
from typing import Any

WIDTH = 50


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lies, interpolated; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summary(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median and 99th percentile in ms, keyed as serving benchmarks commonly are."""
    values = [1000 * value for value in seconds]
    return {
        f"mean_{name}_ms": statistics.fmean(values) if values else 0.0,
        f"median_{name}_ms": percentile(values, 0.5),
        f"p99_{name}_ms": percentile(values, 0.99),
    }


def row(label: str, value: float) -> str:
    """One line of the block."""
    shown = f"{value:<10}" if isinstance(value, int) else f"{value:<10.2f}"
    return f"{label + ':':<40}{shown}".rstrip()


def heading(title: str, fill: str) -> str:
    return f"{title:{fill}^{WIDTH}}"


def json_line(result: dict[str, Any]) -> str:
    """The last line of a benchmark."""
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}
    return json.dumps(rounded)
