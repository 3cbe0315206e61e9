"""Random adapters in an arena, as the LoRA operations see them, and the check all tests share."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from vexpert.ops.reference import lora_delta
from vexpert.ops.types import LoraSite, OutputSlice, SiteTable

# ||out - reference|| / ||reference|| of the delta part, the reference in float64. float32: a sum of
# n terms, in whatever order, is off by about sqrt(n) roundings of 2^-24, which is 2e-6 of its size
# for 1,000 terms, and two sums follow one another: 1e-5 is twice that and some room. One wrong row
# of 1,000 is off by 4e-2. Half dtypes round h and the result once each, to 2^-12 (float16) or 2^-9
# (bfloat16) of each value.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class SlotSpec:
    """One slot of a random table: rank per slice (0: not adapted) and how factors are shared."""

    ranks: tuple[int, ...]
    one_shrink: bool = False  # all slices use the same A
    shared_a: bool = False  # over experts
    shared_b: bool = False


def make_site(
    num_experts: int,
    in_features: int,
    slices: tuple[OutputSlice, ...] | int,
    max_lora_rank: int = 16,
    out_features: int | None = None,
    index: int = 0,
) -> LoraSite:
    """A site; `slices` may be the width of a single one."""
    parts = (OutputSlice(0, slices),) if isinstance(slices, int) else slices
    ends = [part.start + (part.size - 1) * part.stride + 1 for part in parts]
    return LoraSite(
        index=index,
        name=f"site{index}",
        num_experts=num_experts,
        in_features=in_features,
        out_features=out_features or max(ends),
        slices=parts,
        max_rank=len(parts) * max_lora_rank,
    )


class _ArenaBuilder:
    """Places factors one after another, with gaps of NaN that no operation may read."""

    def __init__(self, generator: torch.Generator, align: int) -> None:
        self.generator = generator
        self.align = align
        self.size = 0
        self.pieces: list[torch.Tensor] = []

    def place(self, experts: int, rows: int, width: int, scale: float) -> tuple[int, int]:
        """Offset and stride of a random [experts, rows, width]."""
        gap = torch.full((-(self.size + 1) % self.align + 1,), float("nan"))
        values = torch.randn(experts * rows * width, generator=self.generator) * scale
        offset = self.size + len(gap)
        self.pieces += [gap, values]
        self.size = offset + len(values)
        return offset, rows * width if experts > 1 else 0


def make_table(
    site: LoraSite,
    specs: Sequence[SlotSpec | None],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    align: int = 1,
) -> SiteTable:
    """A table with one slot per spec (None: an empty slot) over an arena of its own."""
    builder = _ArenaBuilder(torch.Generator().manual_seed(seed), align)
    n, count = len(site.slices), len(specs)
    packed = torch.zeros(3 + 4 * n, count, dtype=torch.int64)
    rank, a_offset, a_stride = packed[:3]
    slice_rank, slice_column, b_offset, b_stride = packed[3:].view(4, n, count)
    for slot, spec in enumerate(specs):
        if spec is None or not any(spec.ranks):
            continue
        assert len(spec.ranks) == n
        total = max(spec.ranks) if spec.one_shrink else sum(spec.ranks)
        rank[slot] = total
        experts = 1 if spec.shared_a else site.num_experts
        a_offset[slot], a_stride[slot] = builder.place(
            experts, total, site.in_features, site.in_features**-0.5
        )
        column = 0
        for i, part_rank in enumerate(spec.ranks):
            if part_rank == 0:
                continue
            slice_rank[i, slot], slice_column[i, slot] = part_rank, column
            column += 0 if spec.one_shrink else part_rank
            experts = 1 if spec.shared_b else site.num_experts
            b_offset[i, slot], b_stride[i, slot] = builder.place(
                experts, part_rank, site.slices[i].size, 0.5
            )
    arena = torch.cat([*builder.pieces, torch.full((7,), float("nan"))])
    return SiteTable(arena.to(device, dtype), packed.to(device), host_rank=rank.tolist())


@dataclass(frozen=True)
class Case:
    """Inputs of one LoRA call. The reference reads nothing else."""

    site: LoraSite
    table: SiteTable
    x: torch.Tensor  # [P or R, in]
    slots: torch.Tensor  # [P] int64
    experts: torch.Tensor | None  # [P] int64
    x_rows: torch.Tensor | None  # [P] int64

    @property
    def num_slots(self) -> int:
        return len(self.table.host_rank)

    @cached_property
    def active_slots(self) -> tuple[int, ...]:
        """Known on the host before a step, so also before a graph is captured."""
        return tuple(sorted({slot for slot in self.slots.tolist() if slot >= 0}))

    def reference(self) -> torch.Tensor:
        """Delta [P, out] float64, from the very values the operation gets."""
        return lora_delta(self.x, self.site, self.table, self.slots, self.experts, self.x_rows)

    def unchanged_rows(self) -> torch.Tensor:
        """Mask [P] of rows that must stay as they are, bit for bit."""
        idle = self.slots < 0
        if self.experts is not None:
            idle = idle | (self.experts < 0) | (self.experts >= self.site.num_experts)
        return idle


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference||; of two zeros, 0; anything against zero, infinity."""
    out, reference = out.double().cpu(), reference.double().cpu()
    error = (out - reference).norm().item()
    scale = reference.norm().item()
    if scale == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / scale if error == error else float("inf")


def assert_delta(out: torch.Tensor, case: Case) -> None:
    """Fail unless `out` [P, out], the operation's result on zeros, is the delta of `case`."""
    error = relative_error(out, case.reference())
    bound = TOLERANCE[out.dtype]
    assert error < bound, f"relative error of the delta {error:.2e}, bound {bound:.0e}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, so that -0.0, 0.0 and NaN are told apart."""
    return tensor.contiguous().view(torch.uint8)
