"""Adapter slots on the device: who is where, who may leave, and the tables that say so.

Between two steps the engine's thread installs adapters; a slot is *pinned* while a running request
uses it. Removing a slot is safe at any time: it must be unpinned, so no step reads it.
"""

from dataclasses import dataclass

import torch

from vexpert.lora.arena import Arena
from vexpert.lora.pack import PackedAdapter, SiteEntry, start_alignment
from vexpert.lora.site_extras import ExtraEntry, SiteExtras, view_extras
from vexpert.lora.tables import Tables, extent
from vexpert.lora.types import TargetMap
from vexpert.ops.types import SiteTable


@dataclass
class Resident:
    """An adapter in a slot."""

    entries: tuple[SiteEntry, ...]
    extras: tuple[ExtraEntry, ...]
    size: int  # elements
    start: int  # element of the arena
    pins: int
    last_use: int


class SlotPool:
    """`num_slots` slots over one arena of `arena_bytes` in `dtype` on `device`."""

    def __init__(
        self,
        targets: TargetMap,
        num_slots: int,
        arena_bytes: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._sites = targets.sites
        # Inference tensors could not be written by a thread outside inference mode.
        with torch.inference_mode(False):
            alignment = start_alignment(targets, device, dtype)
            self.arena = Arena(arena_bytes, device, dtype, alignment)
            self._tables = Tables(targets.sites, num_slots, self.arena.buffer)
        self._residents: list[Resident | None] = [None] * num_slots
        self.extras: dict[int, SiteExtras] = {}  # by slot; views of the arena, updated in place
        self._clock = 0

    @property
    def tables(self) -> tuple[SiteTable, ...]:
        """One table per site, updated in place."""
        return self._tables.site_tables

    @property
    def num_slots(self) -> int:
        return len(self._residents)

    def fits(self, nbytes: int) -> bool:
        """Whether an adapter of `nbytes` fits an empty arena."""
        allocator = self.arena.allocator
        return allocator.rounded(nbytes // self.arena.itemsize) <= allocator.capacity

    def _resident(self, slot: int) -> Resident:
        resident = self._residents[slot]
        assert resident is not None, f"slot {slot} is empty"
        return resident

    def _touch(self, resident: Resident) -> None:
        self._clock += 1
        resident.last_use = self._clock

    def resident_bytes(self, slot: int) -> int:
        """Bytes that the adapter of `slot` takes in the arena."""
        return self.arena.allocator.blocks[self._resident(slot).start] * self.arena.itemsize

    def pin(self, slot: int) -> None:
        """A running request uses the slot: it cannot be evicted. Counted."""
        resident = self._resident(slot)
        resident.pins += 1
        self._touch(resident)

    def is_taken(self, slot: int) -> bool:
        return self._residents[slot] is not None

    def is_pinned(self, slot: int) -> bool:
        return self._resident(slot).pins > 0

    def unpin(self, slot: int) -> None:
        """Undo one `pin`."""
        resident = self._resident(slot)
        assert resident.pins > 0, f"slot {slot} is not pinned"
        resident.pins -= 1
        self._touch(resident)

    def make_room(self, nbytes: int) -> tuple[int, ...] | None:
        """Evict least recently used, unpinned slots until `install` of `nbytes` must succeed.

        Returns the slots evicted. None: pinned slots hold what is needed, and nothing was evicted.
        """
        allocator = self.arena.allocator
        need = allocator.rounded(nbytes // self.arena.itemsize)
        room, slots = allocator.free_total, self._residents.count(None)
        idle = [(r.last_use, slot) for slot, r in enumerate(self._residents) if r and not r.pins]
        evicted: list[int] = []
        for _, slot in sorted(idle):
            if room >= need and slots:
                break
            room += allocator.blocks[self._resident(slot).start]
            slots += 1
            evicted.append(slot)
        if room < need or not slots:
            return None
        for slot in evicted:
            self.remove(slot)
        return tuple(evicted)

    def install(self, packed: PackedAdapter) -> int:
        """Copy an adapter to a free slot; returns the slot. `make_room` must have succeeded.

        Compacts the arena when no single hole is large enough, so never during a step.
        """
        assert packed.buffer.dtype == self.arena.buffer.dtype, packed.buffer.dtype
        slot = self._residents.index(None)
        count = packed.buffer.numel()
        start = self.arena.allocator.allocate(count)
        if start is None:
            self._compact()
            start = self.arena.allocator.allocate(count)
        assert start is not None, "make_room was not asked, or refused"
        self.arena.write(start, packed.buffer)
        resident = Resident(packed.entries, packed.extras, count, start, pins=0, last_use=0)
        self._residents[slot] = resident
        self._touch(resident)
        self._write(slot, resident)
        return slot

    def _write(self, slot: int, resident: Resident) -> None:
        """Make the tables and the extras of `slot` say where its adapter lies now."""
        self._tables.write(slot, resident.entries, resident.start)
        if resident.extras:
            self.extras[slot] = view_extras(self.arena.buffer, resident.extras, resident.start)

    def remove(self, slot: int) -> None:
        """Empty a slot: rank 0 at every site, so that its weights cannot be reached."""
        resident = self._resident(slot)
        assert resident.pins == 0, f"slot {slot} is in use by {resident.pins} requests"
        self._tables.write(slot, ())
        self.extras.pop(slot, None)
        self.arena.allocator.free(resident.start)
        self._residents[slot] = None

    def _compact(self) -> None:
        target = {move.source: move.target for move in self.arena.compact()}
        for slot, resident in enumerate(self._residents):
            if resident is not None and resident.start in target:
                resident.start = target[resident.start]
                self._write(slot, resident)

    def check_integrity(self) -> None:
        """Assert that slots and blocks match one to one, and that every table is exact."""
        allocator = self.arena.allocator
        allocator.check_integrity()
        blocks = dict(allocator.blocks)
        for slot, resident in enumerate(self._residents):
            if resident is None:
                self._tables.check_slot(slot, (), 0)
                assert slot not in self.extras, f"extras of the empty slot {slot}"
                continue
            taken = blocks.pop(resident.start, None)
            assert taken == allocator.rounded(resident.size), f"slot {slot} has block {taken}"
            for entry in resident.entries:
                end = extent(entry, self._sites[entry.site])
                assert end <= resident.size, f"slot {slot} reads past its block: {entry}"
            assert resident.pins >= 0, f"slot {slot} has {resident.pins} pins"
            self._tables.check_slot(slot, resident.entries, resident.start)
            self._check_extras(slot, resident)
        assert not blocks, f"blocks of no slot: {blocks}"

    def _check_extras(self, slot: int, resident: Resident) -> None:
        """Assert that the extras of `slot` are exactly the tensors inside its block."""
        found = self.extras.get(slot, {})
        assert set(found) == {entry.site for entry in resident.extras}, f"extras of slot {slot}"
        for entry in resident.extras:
            view = entry.view(self.arena.buffer, resident.start)
            have = getattr(found[entry.site], entry.name)
            assert have.data_ptr() == view.data_ptr(), f"extras of slot {slot} lie elsewhere"
            end = entry.start + view.nbytes // self.arena.itemsize
            assert end <= resident.size, f"slot {slot} reads past its block: {entry}"
