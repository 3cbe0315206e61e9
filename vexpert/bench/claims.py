"""What the cost of LoRA should depend on, as rows to compare within one run."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vexpert.bench.cases import Case
from vexpert.bench.measure import Row
from vexpert.bench.peers import SHAPE

TOKENS = (32, 128, 512)
MIXED = (8, 16, 32, 64)


@dataclass(frozen=True)
class Claim:
    """What LoRA adds in `case` is at most `bound` times the mean of what it adds in `others`."""

    text: str
    case: Case
    others: tuple[Case, ...]
    bound: float

    def ratio(self, added: Mapping[Case, float]) -> float | None:
        """None unless all of its rows were measured, and cost something."""
        if any(case not in added for case in (self.case, *self.others)):
            return None
        mean = statistics.fmean(added[case] for case in self.others)
        return added[self.case] / mean if mean > 0 else None


def make_claims(shape: str = SHAPE) -> list[Claim]:
    """Of each number of tokens: slots, base rows, mixed ranks."""
    claims = []
    for tokens in TOKENS:
        few = Case(shape, (16,), 8, tokens, 8)
        half = Case(shape, (16,), 32, tokens, 32, 0.5)
        mixed = Case(shape, MIXED, 32, tokens, 32)
        where = f"{tokens} tokens"
        claims += [
            Claim(f"64 slots as 8, {where}", replace(few, slots=64), (few,), 1.03),
            Claim(f"base rows free, {where}", half, (replace(half, adapter_rows_only=True),), 1.05),
            Claim(
                f"ranks {MIXED} as their mean, {where}",
                mixed,
                tuple(replace(mixed, ranks=(rank,)) for rank in MIXED),
                1.15,
            ),
        ]
    return claims


def claim_cases() -> list[Case]:
    """The rows of all claims, once each."""
    cases = [case for claim in make_claims() for case in (claim.case, *claim.others)]
    return sorted(set(cases), key=lambda case: (case.ranks, case.slots, case.tokens))


def median_added(rows: Sequence[Row]) -> dict[Case, float]:
    """What LoRA adds in microseconds, over the draws of each case; cases with seed 0."""
    values: dict[Case, list[float]] = {}
    for row in rows:
        added = row.added()
        if added is not None:
            values.setdefault(replace(row.case, seed=0), []).append(added)
    return {case: statistics.median(those) for case, those in values.items()}


def check_claims(claims: Sequence[Claim], rows: Sequence[Row]) -> list[dict[str, object]]:
    """Those whose rows were measured: text, ratio, bound, and whether it holds."""
    added = median_added(rows)
    ratios = [(claim, claim.ratio(added)) for claim in claims]
    return [
        {"claim": c.text, "ratio": round(r, 3), "bound": c.bound, "holds": r <= c.bound}
        for c, r in ratios
        if r is not None
    ]


def claim_line(claim: dict[str, object]) -> str:
    """One outcome of `check_claims`."""
    word = "holds" if claim["holds"] else "MISSED"
    return f"{claim['claim']}: {claim['ratio']} times, at most {claim['bound']}: {word}"
