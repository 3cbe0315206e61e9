"""What the kernels of dense layers are given of adapters, and what they leave to the next one."""

from dataclasses import dataclass
from math import gcd

import torch


@dataclass(frozen=True)
class DenseFactors:
    """Factors of one packed layer's sites: the arena and where their tables lie in it."""

    arena: torch.Tensor  # [N], in the dtype of the layer's input
    table: torch.Tensor  # [7, S] int64, of the first site
    site_step: int  # elements from one site's table to the next one's
    sizes: tuple[int, ...]  # columns of each site
    width: int  # of a site's shrunk rows: a multiple of 16, no less than any active rank
    arrivals: torch.Tensor  # [1] int32, zero between launches; see `kernels/arrivals.py`
    alignment: int = 1  # every factor starts at a multiple of so many elements

    @property
    def num_slots(self) -> int:
        return self.table.shape[1]

    def alignment_of(self, row: int) -> int:
        """What every row of `row` elements of a factor is aligned to, as loads may assume."""
        return gcd(self.alignment, row, 16)


@dataclass(frozen=True)
class HeadColumns:
    """Output columns of a Linear that expands latents: of each head, those of keys, then values."""

    heads: int
    key: int
    value: int

    @property
    def width(self) -> int:
        """Columns of one head."""
        return self.key + self.value


@dataclass(frozen=True)
class ReaderTile:
    """How a kernel that reads the output of many rows ends its LoRA: rows of a program together."""

    rows: int  # of a program: a factor is read once for all of them that have it
    heads: int = 1  # a program does so many, one after another
    num_warps: int = 4
    most_rank: int = 128  # of an active adapter


@dataclass(frozen=True)
class DenseDelta:
    """What adapters still add to a packed layer's output: y[r] += B[site, slot] h[r] at each site.

    The kernel that reads y does it; `tile` None: each row reads its factors anew.
    """

    h: torch.Tensor  # [PLANES, R, sites * WIDTH] float32, see `dense_shrink`
    slots: torch.Tensor  # [R] int64, < 0: base
    factors: DenseFactors
    tile: ReaderTile | None = None
