"""One version of PEFT reading rank_pattern and alpha_pattern.

| PEFT | a pattern covers | looked up |
|---|---|---|
| up to 0.13 | what stands behind a dot | one key for both tables, the ranks' patterns first |
| 0.14 | the same | each table alone |
| from 0.15 | the whole name, or what stands behind a dot | each table alone |

In the first two a pattern stands in the expression without brackets, so "a|b" means less there, and
a whole name is found as it is, where no pattern matches. All take the first that matches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from vexpert.config import shown
from vexpert.errors import AdapterError
from vexpert.lora.matchers import Clock, Matcher
from vexpert.lora.versions import PATTERNS_013, PATTERNS_NOW

V = TypeVar("V")

ORDER = "pattern_order"  # a field of ours in adapter_config.json; "trainer": the order is not lost
FUSED = r".*\.gate_up_proj"  # what PEFT adds when it converts gate and up of transformers 4


@dataclass(frozen=True)
class PatternFields:
    """What the config says of ranks and alphas."""

    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    r: int | None
    alpha: float
    is_ordered: bool  # the tables have the trainer's order


class Reading(Protocol):
    """The tables as some versions of PEFT read them."""

    @property
    def unused(self) -> dict[str, dict[str, None]]:
        """By field, the patterns that have matched no name so far, PEFT's own aside."""

    def ranks(self, name: str) -> frozenset[int | None]:
        """The ranks that the config may mean for `name`; None: it states none."""

    def alpha(self, name: str, rank: int) -> tuple[float, str]:
        """lora_alpha of `name`, whose rank in the file is `rank`; and what was assumed, or "".

        AdapterError where patterns of different values match and nothing tells which came first.
        """


def make_reading(rule: str, fields: PatternFields, clock: Clock) -> Reading:
    """`rule`: one of vexpert.lora.versions.PATTERN_RULES. AdapterError for a bad pattern."""
    if rule == PATTERNS_013:
        return _Shared(fields, clock)
    return _Separate(fields, clock, is_bare=rule != PATTERNS_NOW)


class PatternTable(Generic[V]):
    """rank_pattern or alpha_pattern, with what is known of the trainer's order."""

    def __init__(
        self,
        field: str,
        table: Mapping[str, V],
        clock: Clock,
        *,
        is_ordered: bool,
        is_bare: bool,
        last: str | None = None,
    ) -> None:
        """`is_ordered`: the file's order is the trainer's. `is_bare`: without brackets. `last`: a
        pattern that PEFT itself put behind the trainer's.
        """
        self.values = table
        self.unused = dict.fromkeys(pattern for pattern in table if pattern != last)
        self._is_ordered = is_ordered or list(table) != sorted(table)
        self._last = last
        form = r".*\.{}$" if is_bare else r"(.*\.)?({})$"
        self._rows = [
            (pattern, Matcher(field, pattern, form.replace("{}", pattern), clock), value)
            for pattern, value in table.items()
        ]

    def matching(self, name: str) -> dict[str, V]:
        """Value by pattern of those that match `name` and may be the trainer's first.

        `unused` loses every pattern that matches, and `name`.
        """
        self.unused.pop(name, None)
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

    def named(self, name: str) -> dict[str, V]:
        """The value of `name` itself, which no pattern matches."""
        return {name: self.values[name]} if name in self.values else {}

    def without_last(self, found: dict[str, V]) -> dict[str, V]:
        """`found` without PEFT's own pattern, where others match too."""
        others = {pattern: value for pattern, value in found.items() if pattern != self._last}
        return others or found


class _Separate:
    """Each table alone."""

    def __init__(self, fields: PatternFields, clock: Clock, *, is_bare: bool) -> None:
        last = FUSED if is_converted(fields) else None
        self._fields = fields
        self._ranks = PatternTable(
            "rank_pattern",
            fields.ranks,
            clock,
            is_ordered=fields.is_ordered,
            is_bare=is_bare,
            last=last,
        )
        self._alphas = PatternTable(
            "alpha_pattern",
            fields.alphas,
            clock,
            is_ordered=fields.is_ordered,
            is_bare=is_bare,
            last=last,
        )

    @property
    def unused(self) -> dict[str, dict[str, None]]:
        return {"rank_pattern": self._ranks.unused, "alpha_pattern": self._alphas.unused}

    def ranks(self, name: str) -> frozenset[int | None]:
        found = self._ranks.matching(name) or self._ranks.named(name)
        return frozenset(found.values() or (self._fields.r,))

    def alpha(self, name: str, rank: int) -> tuple[float, str]:
        found = self._alphas.matching(name) or self._alphas.named(name)
        if not found:
            return self._fields.alpha, ""
        if len(set(found.values())) == 1:
            return next(iter(found.values())), ""
        others = self._alphas.without_last(found)
        if len(set(others.values())) == 1:
            first = next(iter(others))
            return others[first], _assumed(found, name, first, f"PEFT itself put {FUSED} last")
        by_rank = self._by_rank(found, name, rank)
        if by_rank is None:
            raise AdapterError(_ambiguous("alpha_pattern has", found, name))
        why = f"rank_pattern has the same patterns, and rank {rank} is its"
        return found[by_rank], _assumed(found, name, by_rank, why)

    def _by_rank(self, found: dict[str, float], name: str, rank: int) -> str | None:
        """The one pattern of `found` that can have given this rank, if rank_pattern has all."""
        ranks = self._ranks.matching(name)
        fitting = [pattern for pattern in found if ranks.get(pattern) == rank]
        return fitting[0] if found.keys() == ranks.keys() and len(fitting) == 1 else None


class _Shared:
    """One key for both tables: the first that matches of the ranks', then of the alphas'."""

    def __init__(self, fields: PatternFields, clock: Clock) -> None:
        is_ordered = fields.is_ordered
        self._fields = fields
        self._ranks = PatternTable(
            "rank_pattern", fields.ranks, clock, is_ordered=is_ordered, is_bare=True
        )
        self._alphas = PatternTable(
            "alpha_pattern", fields.alphas, clock, is_ordered=is_ordered, is_bare=True
        )

    @property
    def unused(self) -> dict[str, dict[str, None]]:
        return {"rank_pattern": self._ranks.unused, "alpha_pattern": self._alphas.unused}

    def ranks(self, name: str) -> frozenset[int | None]:
        return frozenset(self._fields.ranks.get(key, self._fields.r) for key in self._keys(name))

    def alpha(self, name: str, rank: int) -> tuple[float, str]:
        fields = self._fields
        found = {key: fields.alphas.get(key, fields.alpha) for key in self._keys(name)}
        if len(set(found.values())) == 1:
            return next(iter(found.values())), ""
        fitting = [key for key in found if fields.ranks.get(key, fields.r) in (None, rank)]
        if len({found[key] for key in fitting}) != 1:
            raise AdapterError(_ambiguous("rank_pattern and alpha_pattern give", found, name))
        return found[fitting[0]], _assumed(found, name, fitting[0], f"rank {rank} is its")

    def _keys(self, name: str) -> tuple[str, ...]:
        """What may be the key of `name`."""
        ranks, alphas = self._ranks.matching(name), self._alphas.matching(name)
        return tuple(ranks) or tuple(alphas) or (name,)


def is_converted(fields: PatternFields) -> bool:
    """Whether PEFT added FUSED: converting gate and up to one parameter, it doubles r and alpha."""
    r, alpha = fields.r, fields.alpha
    return (
        r is not None and fields.ranks.get(FUSED) == 2 * r and fields.alphas.get(FUSED) == 2 * alpha
    )


def _listed(found: Mapping[str, float]) -> str:
    return " and ".join(f"{shown(pattern)}: {value:g}" for pattern, value in found.items())


def _assumed(found: Mapping[str, float], name: str, first: str, why: str) -> str:
    return (
        f"alpha_pattern has {_listed(found)} for {name}; {shown(first)} counts, as {why}; "
        f'if not, say {ORDER}="trainer" in adapter_config.json and write them in the right order'
    )


def _ambiguous(what: str, found: Mapping[str, float], name: str) -> str:
    return (
        f"{what} {_listed(found)} for {name}: PEFT took the trainer's first, but sorted "
        "them when it saved. In adapter_config.json, write them in the order of the trainer's "
        f'LoraConfig and add "{ORDER}": "trainer"'
    )
