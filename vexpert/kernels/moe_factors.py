"""Where factors lie: site tables looked up once, for all kernels of a layer.

Looked up by position, or by run and piece of a run (`moe_runs`); P is their number.

| row of `address` [5, P] int64 | element of the arena |
|---|---|
| 0, 1 | A of gate_up, of down |
| 2, 3, 4 | B^T of gate, of up, of down |

| row of `rank` [8, P] int32 | |
|---|---|
| 0, 1 | rows of A of gate_up, of down |
| 2, 3, 4 | rows of B^T of gate, of up, of down; 0: nothing to add |
| 5, 6, 7 | first shrunk column of gate, of up, of down |

All ranks of base rows and sentinels are 0.
"""

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import power_of_two


@dataclass(frozen=True)
class SiteFactors:
    """One site's factors: the arena and the table of ops.types.SiteTable."""

    arena: torch.Tensor  # [N], in the dtype of the layer's input
    packed: torch.Tensor  # [3 + 4 * n, S] int64, n output slices
    max_rank: int  # columns of the shrunk rows
    slice_max_rank: int  # of any slice's B; slices that share an A have as many as A has rows
    alignment: int = 1  # every factor starts at a multiple of so many elements
    arrivals: torch.Tensor | None = None  # [1] int32, zero between launches

    @property
    def num_slots(self) -> int:
        return self.packed.shape[1]

    @property
    def num_slices(self) -> int:
        return (self.packed.shape[0] - 3) // 4

    @property
    def block_r(self) -> int:
        """Ranks of one step of a dot with B."""
        return power_of_two(self.slice_max_rank, 16, 64)

    @property
    def slice_width(self) -> int:
        """Columns of a slice in the shrunk rows of runs: whole steps."""
        return -(-self.slice_max_rank // self.block_r) * self.block_r

    def alignment_of(self, row: int) -> int:
        """What every row of `row` elements of a factor is aligned to, as loads may assume."""
        return gcd(self.alignment, row, 16)


@dataclass(frozen=True)
class PairFactors:
    """Adapters of one step on one layer; a product that no adapter has is None.

    `address` and `rank`: the arrays above by position, filled by the kernel that orders the pairs;
    or of no position, where runs are looked up instead.
    """

    slots: torch.Tensor  # [T] int64, < 0: base
    gate_up: SiteFactors | None
    down: SiteFactors | None
    address: torch.Tensor  # [5, P] int64, in elements of the arena
    rank: torch.Tensor  # [8, P] int32

    @classmethod
    def empty(
        cls, slots: torch.Tensor, gate_up: SiteFactors | None, down: SiteFactors | None, pairs: int
    ) -> "PairFactors":
        """Room for `pairs` positions."""
        assert gate_up is not None or down is not None
        address = torch.empty(5, pairs, dtype=torch.int64, device=slots.device)
        rank = torch.empty(8, pairs, dtype=torch.int32, device=slots.device)
        return cls(slots, gate_up, down, address, rank)

    @property
    def num_slots(self) -> int:
        site = self.gate_up or self.down
        assert site is not None
        return site.num_slots


@triton.jit
def store_site(
    position,
    slot,
    expert,
    active,
    inside,
    address,
    rank_at,
    num_pairs,
    num_slots,
    table,
    A_ROW: tl.constexpr,
    B_ROW: tl.constexpr,
    SLICES: tl.constexpr,
    EXISTS: tl.constexpr,
):
    """One site's rows of `address` and `rank`, at positions (or runs, or pieces)."""
    expert = expert.to(tl.int64)
    at = table + slot
    if EXISTS:
        a_rank = tl.load(at, mask=active, other=0).to(tl.int32)
        a_at = tl.load(at + num_slots, mask=active, other=0)
        a_at += expert * tl.load(at + 2 * num_slots, mask=active, other=0)
        tl.store(address + A_ROW * num_pairs + position, a_at, mask=inside)
    else:
        a_rank = tl.zeros_like(position)
    tl.store(rank_at + A_ROW * num_pairs + position, a_rank, mask=inside)
    for i in tl.static_range(SLICES):
        row = (B_ROW + i) * num_pairs + position
        if EXISTS:
            part = at + (3 + i) * num_slots
            step = SLICES * num_slots
            b_rank = tl.load(part, mask=active, other=0).to(tl.int32)
            column = tl.load(part + step, mask=active, other=0).to(tl.int32)
            b_at = tl.load(part + 2 * step, mask=active, other=0)
            b_at += expert * tl.load(part + 3 * step, mask=active, other=0)
            tl.store(address + row, b_at, mask=inside)
            tl.store(rank_at + row + 3 * num_pairs, column, mask=inside)
        else:
            b_rank = tl.zeros_like(position)
        tl.store(rank_at + row, b_rank, mask=inside)


@triton.jit
def store_sites(
    position, slot, expert, active, inside, address, rank_at, num_pairs, num_slots,
    up_table, down_table, GATE_SLICES: tl.constexpr, HAS_UP: tl.constexpr, HAS_DOWN: tl.constexpr,
):  # fmt: skip
    """Both sites' rows, see the table above."""
    store_site(
        position, slot, expert, active, inside, address, rank_at, num_pairs, num_slots,
        up_table, 0, 2, GATE_SLICES, HAS_UP,
    )  # fmt: skip
    store_site(
        position, slot, expert, active, inside, address, rank_at, num_pairs, num_slots,
        down_table, 1, 4, 1, HAS_DOWN,
    )  # fmt: skip


def factor_arguments(factors: PairFactors | None, none: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """address, rank and the table of either site, as the kernels that fill them take them."""
    if factors is None:
        return (none,) * 4
    up, down = factors.gate_up, factors.down
    tables = (none if site is None else site.packed for site in (up, down))
    return factors.address, factors.rank, *tables


def factor_options(factors: PairFactors | None) -> dict[str, int | bool]:
    """Their constants."""
    if factors is None:
        return {"GATE_SLICES": 1, "HAS_UP": False, "HAS_DOWN": False}
    up = factors.gate_up
    return {
        "GATE_SLICES": 2 if up is None else up.num_slices,
        "HAS_UP": up is not None,
        "HAS_DOWN": factors.down is not None,
    }
