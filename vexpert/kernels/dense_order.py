"""The rows of a step by adapter slot, once for all dense layers; base rows come last.

  position of row i = rows of lower slots + rows of its slot before it
A *run* is the positions of
one slot; runs are numbered from 0 in the order of their slots.

| array | shape | holds |
|---|---|---|
| slots | [R] int64 | slot of each row; < 0: base |
| row, slot | [R] int32 | row and slot (base: -1) at each position |
| run | [R] int32 | number of the run that this position is in; base: the number of runs |
| run_start, run_end | [R] int32 | its positions |
| row_run | [R] int32 | number of the run of each row; base: -1 |
| run_slot | [runs + 64] int32 | slot of each run; -1 behind the last |
| counts | [2] int32 | positions that are not base; runs |
"""

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import ceil_div, power_of_two
from vexpert.kernels.launch import direct_launch

MAX_SLOTS = 4094  # bins of the histogram, less two
BEHIND = 64  # a tile reads so many runs at most beyond its last


@dataclass(frozen=True)
class RowOrder:
    """The arrays above. `is_identity`: a single row, for which nothing was launched."""

    slots: torch.Tensor
    row: torch.Tensor
    slot: torch.Tensor
    run: torch.Tensor
    run_start: torch.Tensor
    run_end: torch.Tensor
    row_run: torch.Tensor
    run_slot: torch.Tensor
    counts: torch.Tensor
    is_identity: bool
    _readers: list[None] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return self.slots.shape[0]

    @property
    def arrays(self) -> tuple[torch.Tensor, ...]:
        """All of them, without `slots`."""
        first = self.row, self.slot, self.run, self.run_start, self.run_end
        return *first, self.row_run, self.run_slot, self.counts

    def is_settled(self) -> bool:
        """Whether this is not the first kernel that reads it, which must be an ordinary launch.

        All behind that one may then read the order before they wait for the kernel before them.
        So it is with an identity too: the slots are written by a kernel of the same step.
        """
        settled = bool(self._readers)
        self._readers.append(None)
        return settled

    def settle(self) -> None:
        """An ordinary launch behind the order, which reads nothing: all may read it early."""
        if not self.is_settled():
            torch.zeros(1, dtype=torch.int32, device=self.slots.device)


@triton.jit
def _slot_of(slots, row, num_rows, num_slots):
    """Slots of rows; base rows have `num_slots`, what is no row the number behind it."""
    slot = tl.load(slots + row, mask=row < num_rows, other=-1).to(tl.int32)
    slot = tl.where(slot < 0, num_slots, slot)
    return tl.where(row < num_rows, slot, num_slots + 1)


@direct_launch
@triton.jit(do_not_specialize=["num_rows"])
def _order_kernel(
    slots, row_at, slot_at, run_at, run_start, run_end, row_run, run_slot, counts, num_rows,
    num_slots,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr, BINS: tl.constexpr,
    BEHIND: tl.constexpr,
):  # fmt: skip
    bins = tl.arange(0, BINS)
    count = tl.zeros((BINS,), dtype=tl.int32)
    for first in range(0, num_rows, WIDE):
        count += tl.histogram(
            _slot_of(slots, first + tl.arange(0, WIDE), num_rows, num_slots), BINS
        )
    count = tl.where(bins <= num_slots, count, 0)
    start = tl.cumsum(count, 0) - count
    is_run = ((count > 0) & (bins < num_slots)).to(tl.int32)
    number = tl.cumsum(is_run, 0) - is_run
    mine = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = mine < num_rows
    slot = _slot_of(slots, mine, num_rows, num_slots)
    earlier = tl.zeros((ROWS,), dtype=tl.int32)
    for first in range(0, tl.program_id(0) * ROWS + ROWS, CHUNK):
        other = first + tl.arange(0, CHUNK)
        same = _slot_of(slots, other, num_rows, num_slots)[None, :] == slot[:, None]
        earlier += tl.sum((same & (other[None, :] < mine[:, None])).to(tl.int32), 1)
    left = tl.gather(start, slot, 0)
    position = left + earlier
    tl.store(row_at + position, mine, mask=inside)
    tl.store(slot_at + position, tl.where(slot < num_slots, slot, -1), mask=inside)
    run = tl.gather(number, slot, 0)
    tl.store(run_at + position, run, mask=inside)
    tl.store(row_run + mine, tl.where(slot < num_slots, run, -1), mask=inside)
    tl.store(run_start + position, left, mask=inside)
    tl.store(run_end + position, left + tl.gather(count, slot, 0), mask=inside)
    if tl.program_id(0) == 0:
        runs = tl.sum(is_run, 0)
        tl.store(run_slot + number, bins, mask=is_run > 0)
        tl.store(run_slot + bins, -1, mask=bins >= runs)
        tl.store(run_slot + BINS + tl.arange(0, BEHIND), tl.full((BEHIND,), -1, tl.int32))
        tl.store(counts, tl.sum(tl.where(bins < num_slots, count, 0), 0))
        tl.store(counts + 1, runs)


def order_rows(slots: torch.Tensor, num_slots: int) -> RowOrder:
    """The arrays of the table above for slots [R] int64, contiguous, each < num_slots.

    At most MAX_SLOTS slots. One row launches nothing. Reference: `reference_order`.
    """
    assert num_slots <= MAX_SLOTS, num_slots
    assert slots.is_contiguous(), slots.stride()
    rows, device = slots.shape[0], slots.device
    if rows <= 1:
        same = slots
        return RowOrder(slots, same, same, same, same, same, same, same, same, is_identity=True)
    bins = power_of_two(num_slots + 2, 16, 4096)
    at = torch.empty(6, rows, dtype=torch.int32, device=device)
    run_slot = torch.empty(bins + BEHIND, dtype=torch.int32, device=device)
    counts = torch.empty(2, dtype=torch.int32, device=device)
    block = power_of_two(rows, 16, 32)
    _order_kernel[(ceil_div(rows, block),)](
        slots, *at, run_slot, counts, rows, num_slots,
        ROWS=block, CHUNK=power_of_two(rows, 16, 128), WIDE=power_of_two(rows, 16, 1024),
        BINS=bins, BEHIND=BEHIND,
    )  # fmt: skip
    row, slot, run, start, end, its_run = at
    return RowOrder(slots, row, slot, run, start, end, its_run, run_slot, counts, is_identity=False)


def reference_order(slots: list[int]) -> tuple[list[int], list[int]]:
    """Rows by position, and the runs' slots, to be read."""
    rows = sorted(range(len(slots)), key=lambda row: (slots[row] < 0, max(slots[row], -1), row))
    return rows, sorted({slot for slot in slots if slot >= 0})
