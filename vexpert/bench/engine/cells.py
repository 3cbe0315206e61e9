"""Cells of the table: so many rows over so many adapters, and how one is timed."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vexpert.errors import ConfigError

if TYPE_CHECKING:
    from vexpert import LLM

ZIPF = 1.5  # the i-th most popular adapter has a share in proportion to i ** -ZIPF
POPULARITIES = ("uniform", "zipf", "identical", "distinct")


@dataclass(frozen=True)
class Cell:
    """`batch` requests of `input_len` prompt tokens. steps 0: the prompts alone are timed."""

    batch: int
    input_len: int
    steps: int
    adapters: int = 0  # 0: base requests

    @property
    def kind(self) -> str:
        return "decode" if self.steps else "prefill"


@dataclass(frozen=True)
class Mix:
    """How the adapted requests are spread over adapters."""

    popularity: str = "distinct"
    base_share: float = 0.0

    def __post_init__(self) -> None:
        if self.popularity not in POPULARITIES:
            raise ConfigError(f"popularity={self.popularity!r}: use {', '.join(POPULARITIES)}")
        if not 0.0 <= self.base_share < 1.0:
            raise ConfigError(f"base_share={self.base_share}: from 0 to less than 1")

    def names(self, cell: Cell, names: Sequence[str], seed: int) -> list[str | None]:
        """The adapter of each request of `cell`, None: base."""
        draw = random.Random(seed)
        chosen: list[str | None] = [None] * cell.batch
        if not cell.adapters:
            return chosen
        adapted = cell.batch - round(self.base_share * cell.batch)
        pool = names[: cell.adapters]
        for place, row in enumerate(draw.sample(range(cell.batch), adapted)):
            chosen[row] = self._pick(pool, place, draw)
        return chosen

    def _pick(self, pool: Sequence[str], place: int, draw: random.Random) -> str:
        if self.popularity == "identical":
            return pool[0]
        if self.popularity == "distinct":
            return pool[place % len(pool)]
        zipf = [(i + 1) ** -ZIPF for i in range(len(pool))]
        return draw.choices(pool, zipf if self.popularity == "zipf" else None)[0]


@dataclass
class Timing:
    """Seconds of a decode step, or of a whole prefill, one for each round."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def tokens_per_second(self, cell: Cell) -> float:
        return cell.batch * (1 if cell.steps else cell.input_len) / self.median


class CellTimer:
    """Runs cells on an engine. Prompts are random and never repeat, so no prefix is found."""

    def __init__(self, llm: "LLM", names: Sequence[str], mix: Mix, seed: int = 0) -> None:
        self.llm, self.names, self.mix = llm, names, mix
        self._draw = random.Random(seed)

    def round(self, cell: Cell, seed: int = 0) -> float:
        """Seconds of one decode step of `cell`, or of its prefill.

        A step is the difference of a run of steps + 1 output tokens and one of a single token, over
        `steps`: what the prompts take drops out.
        """
        adapters = self.mix.names(cell, self.names, seed)
        first = self._run(cell, adapters, 1)
        if not cell.steps:
            return first
        return (self._run(cell, adapters, cell.steps + 1) - first) / cell.steps

    def _run(self, cell: Cell, adapters: list[str | None], output_len: int) -> float:
        from vexpert import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        vocab = self.llm.engine.model_info.vocab_size
        prompts = [
            {"prompt_token_ids": self._draw.choices(range(2, vocab), k=cell.input_len)}
            for _ in range(cell.batch)
        ]
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, adapter=adapters)
        seconds = time.perf_counter() - began
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert made == output_len * cell.batch, (made, cell)
        return seconds


def time_cells(
    timer: CellTimer, cells: Sequence[Cell], rounds: int, done: Callable[[], None]
) -> dict[Cell, Timing]:
    """Timings of all cells; rounds take turns over the cells after one that only warms up.

    Ctrl-C ends it: those of the cells that were timed by then.
    """
    found = {cell: Timing() for cell in cells}
    with suppress(KeyboardInterrupt):
        for seed in range(rounds + 1):
            for cell in cells:
                seconds = timer.round(cell, seed)
                if seed:
                    found[cell].seconds.append(seconds)
                done()
    return {cell: timing for cell, timing in found.items() if timing.seconds}
