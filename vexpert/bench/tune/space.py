"""What is tried: tiles, shrinks and ways to expand, as lists to be read and changed.

A search goes through the coordinates below one after another and keeps the best of each, so the
numbers of candidates add up; they do not multiply.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vexpert.kernels.moe_product import TileShape
from vexpert.kernels.moe_shrink import ShrinkShape
from vexpert.ops.moe_plan import LoraPlan, MoePlan

SHARED_MEMORY = 227 << 10  # bytes of a program on an H200
Variants = Callable[[MoePlan], Iterator[MoePlan]]


@dataclass(frozen=True)
class Tiles:
    """Tiles of the base products for one number of rows."""

    columns: tuple[int, ...]
    depths: tuple[int, ...]
    warps: tuple[int, ...]
    stages: tuple[int, ...]
    tail: int = 0

    def shapes(self, rows: int, weights: int, itemsize: int) -> Iterator[TileShape]:
        """Those that fit; `weights`: tiles of weights a step loads, 2 of gate and up."""
        for n, k, warps, stages, tma in itertools.product(
            self.columns, self.depths, self.warps, self.stages, (False, True)
        ):
            if stages * k * (rows + weights * n) * itemsize <= SHARED_MEMORY:
                yield TileShape(n, k, warps, stages, self.tail, tma)


@dataclass(frozen=True)
class Space:
    """All candidates. `rows`: of a tile, with what is tried for them."""

    rows: Mapping[int, Tiles] = field(
        default_factory=lambda: {
            16: Tiles((32, 64, 128), (64, 128, 256), (4,), (3, 4, 5)),
            64: Tiles((64, 128, 256), (64, 128), (4, 8), (3, 4)),
            128: Tiles((64, 128, 256), (64,), (8,), (3, 4), tail=64),
        }
    )
    pieces: tuple[int, ...] = (16, 32, 64)  # positions of a shrink's program, by run
    planes: tuple[int, ...] = (1, 2, 4)
    depths: tuple[int, ...] = (64, 128, 256)
    warps: tuple[int, ...] = (2, 4)
    stages: tuple[int, ...] = (3, 4)
    groups: tuple[int, ...] = (1, 2, 4, 8)
    item_stages: tuple[int, ...] = (1, 3)

    def rows_for(self, rows_per_expert: float) -> list[int]:
        """Rows of tiles worth a try: neither mostly empty nor a small part of an expert's."""
        sensible = [m for m in self.rows if m <= 8 * rows_per_expert and rows_per_expert <= 8 * m]
        return sensible or [min(self.rows, key=lambda m: abs(m - rows_per_expert))]

    def base(self, rows_per_expert: float, itemsize: int) -> dict[str, Variants]:
        """Coordinates of the base path: rows of a tile with gate_up's tile, then down's."""

        def gate_up(plan: MoePlan) -> Iterator[MoePlan]:
            for m in self.rows_for(rows_per_expert):
                for tile in self.rows[m].shapes(m, 2, itemsize):
                    yield _with_base(plan, block_m=m, gate_up=tile)

        def down(plan: MoePlan) -> Iterator[MoePlan]:
            m = plan.base.block_m
            for tile in self.rows[m].shapes(m, 1, itemsize):
                yield _with_base(plan, down=tile)

        return {"gate_up": gate_up, "down": down}

    def lora(self, must_run: bool) -> dict[str, Variants]:
        """Coordinates of what LoRA adds; `must_run`: so many pairs are expanded by run only."""

        def expand(plan: MoePlan) -> Iterator[MoePlan]:
            own = plan.lora.shrink, plan.lora.down_shrink
            if not must_run:
                for group, early in itertools.product(self.groups, (False, True)):
                    yield replace(plan, lora=LoraPlan(*own, False, group, prefetch=early))
            if plan.base.is_identity:
                return  # one pair is no run
            pieces = own[0], replace(own[1], block_m=own[0].block_m)  # runs are cut once
            for group, stages, early in itertools.product(
                self.groups[:3], self.item_stages, (False, True)
            ):
                yield replace(plan, lora=LoraPlan(*pieces, True, group, stages, early))

        def shrink(plan: MoePlan) -> Iterator[MoePlan]:
            for piece in self.pieces if plan.lora.by_run else (plan.lora.shrink.block_m,):
                own = replace(plan.lora.down_shrink, block_m=piece)
                for shape in self._shrinks(piece):
                    yield _with_lora(plan, shrink=shape, down_shrink=own)

        def down_shrink(plan: MoePlan) -> Iterator[MoePlan]:
            for shape in self._shrinks(plan.lora.shrink.block_m):
                yield _with_lora(plan, down_shrink=shape)

        return {"expand": expand, "shrink": shrink, "down_shrink": down_shrink}

    def _shrinks(self, piece: int) -> Iterator[ShrinkShape]:
        for planes, k, warps, stages in itertools.product(
            self.planes, self.depths, self.warps, self.stages
        ):
            yield ShrinkShape(piece, planes, k, warps, stages)


def _with_base(plan: MoePlan, **changes: Any) -> MoePlan:
    return replace(plan, base=replace(plan.base, **changes))


def _with_lora(plan: MoePlan, **changes: Any) -> MoePlan:
    return replace(plan, lora=replace(plan.lora, **changes))
