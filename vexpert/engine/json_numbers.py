"""The numbers that a JSON schema allows, as the grammar compiler enforces them."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MAX_INTEGER = 2**63 - 1  # what the compiler counts with
MAX_MULTIPLES = 1024  # that are listed one by one, and the largest `multipleOf` without bounds
MILLIONTH = Fraction(1, 10**6)  # the compiler writes bounds of numbers with six decimals
MAX_WITH_DECIMALS, MAX_WHOLE = 10**9, 2**53  # that a double holds together with six decimals, alone


class NumberFault(ValueError):
    """What is wrong with the numbers of a schema, or cannot be enforced."""


@dataclass(frozen=True)
class _Range:
    """Where numbers may be; None: without a bound."""

    low: Fraction | None
    high: Fraction | None
    above: bool  # `low` itself is outside
    below: bool  # `high` itself is outside


def _numbers(part: dict[str, Any]) -> dict[str, Fraction]:
    numbers = {}
    for name in KEYWORDS:
        if name in part:
            value = part[name]
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise NumberFault(f"{name}: use a number")
            numbers[name] = Fraction(value) if isinstance(value, int) else Fraction(str(value))
    return numbers


def _range(numbers: dict[str, Fraction]) -> _Range:
    """The narrower one where a bound is given in both ways."""
    low, above = _narrower(numbers.get("minimum"), numbers.get("exclusiveMinimum"), 1)
    high, below = _narrower(numbers.get("maximum"), numbers.get("exclusiveMaximum"), -1)
    return _Range(low, high, above, below)


def _narrower(
    inside: Fraction | None, outside: Fraction | None, sign: int
) -> tuple[Fraction | None, bool]:
    if outside is None or (inside is not None and inside * sign > outside * sign):
        return inside, False
    return outside, True


def enforced(part: dict[str, Any], kinds: list[str]) -> tuple[list[str], dict[str, Any], int]:
    """(types, keywords, size in states) that say the same of the numbers of `part`.

    The keywords are `enum` alone, or some of KEYWORDS. Raises NumberFault.
    """
    numbers = _numbers(part)
    step = numbers.get("multipleOf")
    if step is not None and step <= 0:
        raise NumberFault("multipleOf: use a number above 0")
    is_integer = "number" not in kinds or (step is not None and step.denominator == 1)
    rest = [kind for kind in kinds if kind not in ("integer", "number")]
    bounds = _range(numbers)
    if is_integer:
        return [*rest, "integer"], *_of_integers(
            _whole(bounds), 1 if step is None else step.numerator
        )
    if step is not None:
        return [*rest, "number"], *_listed(bounds, step)
    return [*rest, "number"], *_of_numbers(bounds)


def _whole(bounds: _Range) -> tuple[int | None, int | None]:
    low, high = bounds.low, bounds.high
    least = None if low is None else math.floor(low) + 1 if bounds.above else math.ceil(low)
    most = None if high is None else math.ceil(high) - 1 if bounds.below else math.floor(high)
    for bound in (least, most):
        if bound is not None and abs(bound) > MAX_INTEGER:
            raise NumberFault(f"a bound of an integer is beyond {MAX_INTEGER}; leave it out")
    return least, most


def _of_integers(bounds: tuple[int | None, int | None], step: int) -> tuple[dict[str, Any], int]:
    least, most = bounds
    if least is not None and most is not None and least > most:
        raise NumberFault("no integer is within the bounds")
    if step == 1:
        given = {"minimum": least, "maximum": most}
        size = 4 * sum(len(str(bound)) for bound in bounds if bound is not None)
        return {name: bound for name, bound in given.items() if bound is not None}, 1 + size
    if least is None and most is None:
        if step > MAX_MULTIPLES:
            raise NumberFault(f"multipleOf={step} without bounds: use at most {MAX_MULTIPLES}")
        return {"multipleOf": step}, 1 + step + step * step // 32
    both = [None if bound is None else Fraction(bound) for bound in bounds]
    return _listed(_Range(both[0], both[1], False, False), Fraction(step))


def _listed(bounds: _Range, step: Fraction) -> tuple[dict[str, Any], int]:
    """All multiples of `step`, by name."""
    if bounds.low is None or bounds.high is None:
        raise NumberFault(
            "multipleOf beside one bound, or of a number that is no integer, cannot be enforced; "
            "give both minimum and maximum"
        )
    first = math.ceil(bounds.low / step)
    first += bounds.above and first * step == bounds.low
    last = math.floor(bounds.high / step)
    last -= bounds.below and last * step == bounds.high
    if last < first:
        raise NumberFault("no multiple of multipleOf is within the bounds")
    if last - first >= MAX_MULTIPLES:
        raise NumberFault(
            f"multipleOf: {last - first + 1} multiples are within the bounds; use at most "
            f"{MAX_MULTIPLES}, or leave the bounds out"
        )
    return {"enum": [_plain(i * step) for i in range(first, last + 1)]}, 1 + (last - first) // 8


def _plain(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)


def _of_numbers(bounds: _Range) -> tuple[dict[str, Any], int]:
    given: dict[str, Any] = {}
    size = 1
    for bound, name, outside in (
        (bounds.low, "inimum", bounds.above),
        (bounds.high, "aximum", bounds.below),
    ):
        if bound is not None:
            _check_bound(bound)
            key = f"exclusiveM{name}" if outside else f"m{name}"
            given[key] = _plain(bound)
            size += 16
    low, high = bounds.low, bounds.high
    if low is not None and high is not None:
        least = low + MILLIONTH * bounds.above
        most = high - MILLIONTH * bounds.below
        if least > most:
            raise NumberFault("no number with six decimals is within the bounds")
    return given, size


def _check_bound(bound: Fraction) -> None:
    is_exact = (bound / MILLIONTH).denominator == 1
    limit = MAX_WHOLE if bound.denominator == 1 else MAX_WITH_DECIMALS
    if not is_exact or abs(bound) > limit:
        told = str(bound.numerator)[:40] if bound.denominator == 1 else str(float(bound))
        raise NumberFault(
            f"a bound of {told} cannot be enforced; use at most six decimals and "
            f"{MAX_WITH_DECIMALS}, or a whole number up to {MAX_WHOLE}"
        )
