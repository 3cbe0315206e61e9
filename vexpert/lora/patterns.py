"""PEFT's rank_pattern and alpha_pattern: which value a module gets, in bounded time.

PEFT takes the first pattern that matches, in the trainer's order. Its `save_pretrained` sorts the
keys, so a sorted table has lost that order; any other one still has it.
"""

import re
import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import regex

from vexpert.config import shown
from vexpert.errors import AdapterError

V = TypeVar("V")

ORDER = "pattern_order"  # a field of ours in adapter_config.json; "trainer": the order is not lost
FUSED = r".*\.gate_up_proj"  # what PEFT adds when it converts gate and up of transformers 4

SECONDS = 5.0  # for all matches of one adapter
MOST_CHARACTERS = 5000  # of one pattern
# Without any of these a pattern has one way to match, and time is linear.
_BRANCHING = frozenset("*+?{|(")
# Read otherwise by `regex`: "{" that is no repeat count (fuzzy matching), and POSIX classes.
_OTHERWISE = re.compile(r"(?<!\\)\{(?!\d+(,\d*)?\}|,\d+\})|\[[\[:]")


class Clock:
    """Time left for patterns that can take very long."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._left = seconds

    def run(self, match: Callable[[float], bool]) -> bool:
        """`match(timeout)`, which raises TimeoutError; its time is taken from what is left."""
        if self._left <= 0:
            raise TimeoutError
        start = time.monotonic()
        try:
            return match(self._left)
        finally:
            self._left -= time.monotonic() - start


class Matcher:
    """One regular expression. AdapterError for a bad one, and for one that takes too long."""

    def __init__(self, field: str, pattern: str, expression: str, clock: Clock) -> None:
        """`expression`: what is matched from a name's start on; `pattern`: what the user wrote."""
        self.field, self.pattern, self._clock = field, pattern, clock
        if len(pattern) > MOST_CHARACTERS:
            raise self._bad(f"at most {MOST_CHARACTERS} characters")
        if _OTHERWISE.search(pattern):
            raise self._bad("without { that is no repeat count, without [: and without [[")
        try:
            self._plain = re.compile(expression)
        except (re.error, OverflowError, RecursionError) as error:
            raise self._bad(f"a regular expression ({error})") from None
        # Thousands of whole names for thousands of modules are fast by their last letters.
        is_name = re.fullmatch(r"[\w.]*?(\w+)", pattern)
        self._tail = is_name[1] if is_name else ""
        self._timed: regex.Pattern[str] | None = None
        if not _BRANCHING.isdisjoint(pattern):
            self._timed = self._compile(expression)

    def matches(self, name: str) -> bool:
        """What `re.match` says of `name`."""
        timed = self._timed
        if not name.endswith(self._tail):
            return False
        if timed is None:
            return self._plain.match(name) is not None

        def match(timeout: float) -> bool:
            return timed.match(name, timeout=timeout, concurrent=True) is not None

        try:
            return self._clock.run(match)
        except TimeoutError:
            raise self._bad(
                f"a pattern that is matched in bounded time: on {name} it takes too long; write it "
                "without repeats inside repeats"
            ) from None

    def _compile(self, expression: str) -> "regex.Pattern[str]":
        """The same with a time limit, which `re` has not."""
        try:
            return regex.compile(expression, regex.V0)
        except (regex.error, OverflowError, RecursionError, MemoryError) as error:
            raise self._bad(f"a regular expression ({error})") from None

    def _bad(self, wanted: str) -> AdapterError:
        return AdapterError(
            f"adapter_config.json: {self.field}={shown(self.pattern)}: must be {wanted}"
        )


class PatternTable(Generic[V]):
    """rank_pattern or alpha_pattern, with what is known of the trainer's order."""

    def __init__(
        self, field: str, table: Mapping[str, V], clock: Clock, is_ordered: bool, last: str | None
    ) -> None:
        """`is_ordered`: the file's order is the trainer's. `last`: a pattern that PEFT itself put
        behind the trainer's.
        """
        self.unused = dict.fromkeys(pattern for pattern in table if pattern != last)
        self._is_ordered = is_ordered or list(table) != sorted(table)
        self._last = last
        self._rows = [  # PEFT's rule: a pattern covers the whole name, or the part after a dot
            (pattern, Matcher(field, pattern, rf"(.*\.)?({pattern})$", clock), value)
            for pattern, value in table.items()
        ]

    def matching(self, name: str) -> dict[str, V]:
        """Value by pattern of those that match `name` and may be the trainer's first.

        `unused` loses every pattern that matches.
        """
        found: dict[str, V] = {}
        for pattern, matcher, value in self._rows:
            is_second = self._is_ordered and bool(found)
            if (not is_second or pattern in self.unused) and matcher.matches(name):
                self.unused.pop(pattern, None)
                if not is_second:
                    found[pattern] = value
            elif is_second and not self.unused:
                break
        return found

    def without_last(self, found: dict[str, V]) -> dict[str, V]:
        """`found` without PEFT's own pattern, where others match too."""
        others = {pattern: value for pattern, value in found.items() if pattern != self._last}
        return others or found


class Patterns:
    """Both tables of a config and the values of modules that no pattern matches."""

    def __init__(
        self,
        ranks: Mapping[str, int],
        alphas: Mapping[str, float],
        r: int | None,
        alpha: float,
        is_ordered: bool,
    ) -> None:
        clock = Clock()
        last = FUSED if _is_pefts(ranks, alphas, r, alpha) else None
        self._r, self._alpha = r, alpha
        self._ranks = PatternTable("rank_pattern", ranks, clock, is_ordered, last)
        self._alphas = PatternTable("alpha_pattern", alphas, clock, is_ordered, last)

    def unused(self) -> dict[str, list[str]]:
        """By field, the patterns that have matched no name so far, PEFT's own aside."""
        tables = {"rank_pattern": self._ranks.unused, "alpha_pattern": self._alphas.unused}
        return {field: list(patterns) for field, patterns in tables.items() if patterns}

    def ranks(self, name: str) -> frozenset[int | None]:
        """The ranks that the config may mean for `name`; None: it states none."""
        return frozenset(self._ranks.matching(name).values() or (self._r,))

    def alpha(self, name: str, rank: int) -> tuple[float, str]:
        """lora_alpha of `name`, whose rank in the file is `rank`; and what was assumed, or "".

        AdapterError where patterns of different values match and nothing tells which came first.
        """
        found = self._alphas.matching(name)
        if not found:
            return self._alpha, ""
        if len(set(found.values())) == 1:
            return next(iter(found.values())), ""
        others = self._alphas.without_last(found)
        if len(set(others.values())) == 1:
            first = next(iter(others))
            return others[first], _assumed(found, name, first, f"PEFT itself put {FUSED} last")
        by_rank = self._by_rank(found, name, rank)
        if by_rank is None:
            raise AdapterError(_ambiguous(found, name))
        why = f"rank_pattern has the same patterns, and rank {rank} is its"
        return found[by_rank], _assumed(found, name, by_rank, why)

    def _by_rank(self, found: dict[str, float], name: str, rank: int) -> str | None:
        """The one pattern of `found` that can have given this rank, if rank_pattern has all."""
        ranks = self._ranks.matching(name)
        fitting = [pattern for pattern in found if ranks.get(pattern) == rank]
        return fitting[0] if found.keys() == ranks.keys() and len(fitting) == 1 else None


def _is_pefts(
    ranks: Mapping[str, int], alphas: Mapping[str, float], r: int | None, alpha: float
) -> bool:
    """Whether PEFT added FUSED: converting gate and up to one parameter, it doubles r and alpha."""
    return r is not None and ranks.get(FUSED) == 2 * r and alphas.get(FUSED) == 2 * alpha


def _listed(found: Mapping[str, float]) -> str:
    return " and ".join(f"{shown(pattern)}: {value:g}" for pattern, value in found.items())


def _assumed(found: Mapping[str, float], name: str, first: str, why: str) -> str:
    return (
        f"alpha_pattern has {_listed(found)} for {name}; {shown(first)} counts, as {why}; "
        f'if not, say {ORDER}="trainer" in adapter_config.json and write them in the right order'
    )


def _ambiguous(found: Mapping[str, float], name: str) -> str:
    return (
        f"alpha_pattern has {_listed(found)} for {name}: PEFT took the trainer's first, but sorted "
        "them when it saved. In adapter_config.json, write them in the order of the trainer's "
        f'LoraConfig and add "{ORDER}": "trainer"'
    )
