"""All site tables of one pool: one device tensor, one host mirror, views of both.

A site's rows are those of `SiteTable.packed`; columns are slots. A slot's change is one column, so
it is one small copy whatever the model's size.
"""

import numpy as np
import torch

from vexpert.lora.cells import Cells
from vexpert.lora.pack import SiteEntry, factor_alignment
from vexpert.lora.types import LoraSignature
from vexpert.ops.types import LoraSite, SiteTable

RANK_STEP = 16  # shrunk rows are so many columns wide, or a multiple: as Triton's dots need it
COUNTS = (1, 2, 4, 8, 32, 128, 512)  # of active adapters, told apart by signatures
MOST_SIGNATURES = 4096  # remembered


def site_values(entry: SiteEntry, base: int) -> list[int]:
    """The rows of one site for an adapter that lies at element `base` of the arena."""
    offsets = [
        base + offset if rank else 0
        for offset, rank in zip(entry.b_offset, entry.slice_rank, strict=True)
    ]
    head = [entry.rank, base + entry.a_offset, entry.a_stride]
    return [*head, *entry.slice_rank, *entry.slice_column, *offsets, *entry.b_stride]


def extent(entry: SiteEntry, site: LoraSite) -> int:
    """First element past every factor of `entry`, from the adapter's start."""
    last = site.num_experts - 1
    ends = [entry.a_offset + last * entry.a_stride + entry.rank * site.in_features]
    for i, output in enumerate(site.slices):
        start = entry.b_offset[i] + last * entry.b_stride[i]
        ends.append(start + entry.slice_rank[i] * output.size)
    return max(ends)


def count_class(adapters: int) -> int:
    """The least of COUNTS that is not below `adapters`; above them, `adapters` itself."""
    return next((count for count in COUNTS if count >= adapters), adapters)


class Tables:
    """SiteTables of every site over `num_slots` slots, all zero at first: no slot adapts anything.

    `site_tables[i]` belongs to `sites[i]`; they are views, so writing a slot updates them in place.
    """

    def __init__(self, sites: tuple[LoraSite, ...], num_slots: int, arena: torch.Tensor) -> None:
        self.first_row: list[int] = []
        rows = 0
        for site in sites:
            self.first_row.append(rows)
            rows += 3 + 4 * len(site.slices)
        self.host = torch.zeros(rows, num_slots, dtype=torch.int64)
        self._ranks = np.zeros((len(sites), num_slots), dtype=np.int64)  # `host_rank` of all sites
        self._signatures: dict[
            tuple[int, ...], LoraSignature
        ] = {}  # of active slots, until a write
        self.device = torch.zeros(rows, num_slots, dtype=torch.int64, device=arena.device)
        self._first = np.array(self.first_row, dtype=np.int64)
        ends = [*self.first_row[1:], rows]
        alignment = factor_alignment(arena.dtype)
        self.site_tables = tuple(
            SiteTable(arena, self.device[first:end], [0] * num_slots, alignment)
            for first, end in zip(self.first_row, ends, strict=False)
        )

    def column(self, entries: tuple[SiteEntry, ...], base: int) -> torch.Tensor:
        """What column a slot must have, [rows] on the host; no entries: all zero. For checks."""
        values = [0] * self.host.shape[0]
        for entry in entries:
            row = self.first_row[entry.site]
            site = site_values(entry, base)
            values[row : row + len(site)] = site
        return torch.tensor(values, dtype=torch.int64)

    def write(self, slot: int, cells: Cells, base: int) -> None:
        """Set one slot in the mirror, the device tables and the host ranks, without a sync."""
        values = np.zeros(self.host.shape[0], dtype=np.int64)
        values[self._first[cells.site] + cells.row] = cells.value + base * cells.moves
        column = torch.from_numpy(values)
        self.host[:, slot] = column
        if self.device.is_cuda:
            column = column.pin_memory().to(self.device.device, non_blocking=True)
        self.device[:, slot] = column
        ranks = values[self._first]
        for table, rank in zip(self.site_tables, ranks.tolist(), strict=True):
            table.host_rank[slot] = rank
        self._ranks[:, slot] = ranks
        self._signatures.clear()

    def clear(self, slot: int) -> None:
        """The slot adapts nothing."""
        self.host[:, slot] = 0
        self.device[:, slot].zero_()
        for table in self.site_tables:
            table.host_rank[slot] = 0
        self._ranks[:, slot] = 0
        self._signatures.clear()

    def signature(self, active_slots: tuple[int, ...]) -> LoraSignature:
        """Of a step with these slots, one or more: ranks and count rounded up."""
        found = self._signatures.get(active_slots)
        if found is None:
            most = self._ranks[:, list(active_slots)].max(axis=1)
            widths = -(-most // RANK_STEP) * RANK_STEP
            found = LoraSignature(tuple(widths.tolist()), count_class(len(active_slots)))
            if len(self._signatures) >= MOST_SIGNATURES:
                self._signatures.clear()
            self._signatures[active_slots] = found
        return found

    def check_empty(self, slots: list[int]) -> None:
        """Assert that `slots` adapt nothing."""
        assert not self.host[:, slots].any(), "the host table of an empty slot is not"
        assert not self.device[:, slots].any(), "the device table of an empty slot is not"
        for table in self.site_tables:
            assert not any(table.host_rank[slot] for slot in slots), "host rank of an empty slot"
        assert not self._ranks[:, slots].any(), "rank matrix of an empty slot"

    def check_slot(self, slot: int, entries: tuple[SiteEntry, ...], base: int) -> None:
        """Assert that mirror, device and host ranks say exactly what `entries` at `base` are."""
        expected = self.column(entries, base)
        assert torch.equal(self.host[:, slot], expected), f"host table of slot {slot} is wrong"
        assert torch.equal(self.device[:, slot].cpu(), expected), f"device table of slot {slot}"
        ranks = self._ranks[:, slot].tolist()
        for first, table, rank in zip(self.first_row, self.site_tables, ranks, strict=True):
            assert table.host_rank[slot] == int(expected[first]), f"host rank of slot {slot}"
            assert table.host_rank[slot] == rank, f"rank matrix of slot {slot}"
