"""What is measured: cases, the grid that makes them, and named presets."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vexpert.bench.peers import load_peers
from vexpert.errors import ConfigError

POPULARITIES = ("uniform", "zipf", "identical", "distinct")
EXPERT_POPULARITIES = ("uniform", "zipf", "identical")


@dataclass(frozen=True)
class Case:
    """One row: a layer, its adapters, and a step's rows. Order of fields: dear to cheap to change.

    Raises ConfigError for a case that cannot be.
    """

    shape: str  # name of a LayerShape
    ranks: tuple[int, ...]  # adapter in slot s has ranks[s % len(ranks)]
    slots: int  # allocated, an adapter in each
    tokens: int
    adapters: int  # of which the tokens draw
    base_share: float = 0.0  # of the tokens, that have no adapter
    popularity: str = "uniform"  # of adapters among the other tokens
    expert_popularity: str = "uniform"
    shared_a: bool = False  # gate and up multiply one A, as fused checkpoints have it
    adapter_rows_only: bool = False  # the tokens that have no adapter are drawn, then left out
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "adapters"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        if not self.ranks or min(self.ranks) < 1:
            raise ConfigError(f"ranks={self.ranks}: must all be at least 1")
        if self.slots < self.adapters:
            raise ConfigError(f"slots={self.slots}: fewer than adapters={self.adapters}")
        if not 0 <= self.base_share < 1:
            raise ConfigError(f"base_share={self.base_share}: must be at least 0 and below 1")
        for value, known in (
            (self.popularity, POPULARITIES),
            (self.expert_popularity, EXPERT_POPULARITIES),
        ):
            if value not in known:
                raise ConfigError(f"popularity={value!r}: unknown; use one of {', '.join(known)}")

    @property
    def base_rows(self) -> int:
        """Tokens without an adapter; at least one token has one."""
        return min(round(self.base_share * self.tokens), self.tokens - 1)


@dataclass(frozen=True)
class Grid:
    """Every combination; a single token has an adapter. Fewer tokens than adapters draw of all."""

    shapes: tuple[str, ...] = ("qwen3-30b-a3b",)
    ranks: tuple[tuple[int, ...], ...] = ((16,), (64,))
    adapters: tuple[int, ...] = (1, 8, 32, 64)
    tokens: tuple[int, ...] = (1, 8, 32, 128, 512, 4096)
    base_shares: tuple[float, ...] = (0.0, 0.5)
    popularities: tuple[str, ...] = ("uniform",)
    slots: int | None = None  # None: as many as adapters

    def cases(self) -> list[Case]:
        rows = itertools.product(
            self.shapes,
            self.ranks,
            self.adapters,
            self.tokens,
            self.base_shares,
            self.popularities,
        )
        return [
            Case(shape, ranks, self._slots(adapters), tokens, adapters, share, popularity)
            for shape, ranks, adapters, tokens, share, popularity in rows
            if share == 0 or tokens > 1
        ]

    def _slots(self, adapters: int) -> int:
        return adapters if self.slots is None else self.slots


GRIDS = {
    "full": Grid(),
    "shapes": Grid(
        shapes=("mixtral-8x7b", "gpt-oss-20b", "deepseek-v2-lite", "qwen3.5-35b-a3b"),
        ranks=((16,),),
        adapters=(1, 8, 32),
        base_shares=(0.0,),
    ),
    "small": Grid(("tiny", "tiny-gpt-oss"), ((8,), (4, 8)), (1, 4), (1, 8, 32)),
}


def goal_cases() -> list[Case]:
    """The rows that have a goal for what LoRA may add."""
    return [
        Case(peer.shape, (peer.rank,), peer.adapters, peer.tokens, peer.adapters, peer.base_share)
        for peer in load_peers()
        if peer.goal_added_us is not None
    ]


def with_draws(cases: Sequence[Case], seed: int, draws: int) -> list[Case]:
    """Each case with `draws` routings, from `seed` on."""
    if draws < 1:
        raise ConfigError(f"draws={draws}: must be at least 1")
    return [replace(case, seed=seed + i) for case in cases for i in range(draws)]
