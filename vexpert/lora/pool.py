"""Adapter slots on the device: what lies where, and the tables that say so.

Between two steps the engine's thread reserves a block, fills it and publishes the slot. Who may
leave is decided elsewhere (`vexpert.lora.eviction`): a slot that a step reads must not be removed.
"""

import heapq
from dataclasses import dataclass

import torch

from vexpert.lora.arena import Arena
from vexpert.lora.cells import Cells
from vexpert.lora.pack import PackedAdapter, SiteEntry, start_alignment
from vexpert.lora.site_extras import ExtraEntry, SiteExtras, view_extras
from vexpert.lora.tables import Tables, extent
from vexpert.lora.types import LoraSignature, TargetMap
from vexpert.ops.types import SiteTable


@dataclass
class Resident:
    """An adapter in a slot."""

    entries: tuple[SiteEntry, ...]
    cells: Cells
    extras: tuple[ExtraEntry, ...]
    size: int  # elements
    start: int  # element of the arena
    is_published: bool = False  # until then its weights are not whole, and tables show rank 0


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
        self._empty = list(range(num_slots))  # a heap
        self._payload = 0  # elements of all residents
        self.extras: dict[int, SiteExtras] = {}  # by slot; views of the arena, updated in place

    @property
    def tables(self) -> tuple[SiteTable, ...]:
        """One table per site, updated in place."""
        return self._tables.site_tables

    @property
    def num_slots(self) -> int:
        return len(self._residents)

    def signature(self, active_slots: tuple[int, ...]) -> LoraSignature:
        """Of a step with these slots, one or more."""
        return self._tables.signature(active_slots)

    def block_bytes(self, nbytes: int) -> int:
        """Bytes of the arena that an adapter of `nbytes` takes."""
        return self.arena.allocator.rounded(nbytes // self.arena.itemsize) * self.arena.itemsize

    @property
    def free_bytes(self) -> int:
        """Bytes in no block, in one hole or many."""
        return self.arena.allocator.free_total * self.arena.itemsize

    @property
    def empty_slots(self) -> int:
        return len(self._empty)

    def _resident(self, slot: int) -> Resident:
        resident = self._residents[slot]
        assert resident is not None, f"slot {slot} is empty"
        return resident

    def resident_bytes(self, slot: int) -> int:
        """Bytes that the adapter of `slot` takes in the arena."""
        return self.arena.allocator.blocks[self._resident(slot).start] * self.arena.itemsize

    def is_taken(self, slot: int) -> bool:
        return self._residents[slot] is not None

    def reserve(self, packed: PackedAdapter) -> int | None:
        """A slot and a block for `packed`; None: `move` first. There must be an empty slot, and
        `block_bytes` must be free.
        """
        assert packed.buffer.dtype == self.arena.buffer.dtype, packed.buffer.dtype
        count = packed.buffer.numel()
        start = self.arena.allocator.allocate(count)
        if start is None:
            return None
        slot = heapq.heappop(self._empty)
        self._residents[slot] = Resident(packed.entries, packed.cells, packed.extras, count, start)
        self._payload += count
        return slot

    def move(self, nbytes: int) -> int:
        """Slide one adapter towards making one hole of `nbytes`; its bytes. Not during a step."""
        move = self.arena.allocator.next_move(nbytes // self.arena.itemsize)
        assert move is not None, "there is no room"
        self.arena.move(move)
        for slot, resident in enumerate(self._residents):
            if resident is not None and resident.start == move.source:
                assert resident.is_published, f"slot {slot} moves while it is filled"
                resident.start = move.target
                self._write(slot, resident)
        return move.size * self.arena.itemsize

    def place_of(self, slot: int) -> torch.Tensor:
        """The elements of the arena that the adapter of a reserved slot is copied to."""
        resident = self._resident(slot)
        return self.arena.span(resident.start, resident.size)

    def publish(self, slot: int) -> None:
        """The weights of a reserved slot are whole: show them in the tables."""
        resident = self._resident(slot)
        resident.is_published = True
        self._write(slot, resident)

    def install(self, packed: PackedAdapter) -> int:
        """Reserve, copy and publish at once; returns the slot. There must be room."""
        while (slot := self.reserve(packed)) is None:
            self.move(packed.nbytes)
        self.place_of(slot).copy_(packed.buffer, non_blocking=True)
        self.publish(slot)
        return slot

    def _write(self, slot: int, resident: Resident) -> None:
        """Make the tables and the extras of `slot` say where its adapter lies now."""
        self._tables.write(slot, resident.cells, resident.start)
        if resident.extras:
            self.extras[slot] = view_extras(self.arena.buffer, resident.extras, resident.start)

    def remove(self, slot: int) -> None:
        """Empty a slot: rank 0 at every site, so that its weights cannot be reached."""
        resident = self._resident(slot)
        if resident.is_published:
            self._tables.clear(slot)
        self.extras.pop(slot, None)
        self.arena.allocator.free(resident.start)
        self._residents[slot] = None
        self._payload -= resident.size
        heapq.heappush(self._empty, slot)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all adapters themselves; `arena.used_bytes` adds the padding between them."""
        return self._payload * self.arena.itemsize

    def check_integrity(self) -> None:
        """Assert that slots and blocks match one to one, and that every table is exact."""
        allocator = self.arena.allocator
        allocator.check_integrity()
        blocks = dict(allocator.blocks)
        empty: list[int] = []
        for slot, resident in enumerate(self._residents):
            if resident is not None:
                taken = blocks.pop(resident.start, None)
                assert taken == allocator.rounded(resident.size), f"slot {slot} has block {taken}"
            if resident is None or not resident.is_published:
                empty.append(slot)
                assert slot not in self.extras, f"extras of the empty slot {slot}"
                continue
            for entry in resident.entries:
                end = extent(entry, self._sites[entry.site])
                assert end <= resident.size, f"slot {slot} reads past its block: {entry}"
            self._tables.check_slot(slot, resident.entries, resident.start)
            self._check_extras(slot, resident)
        assert not blocks, f"blocks of no slot: {blocks}"
        free = {slot for slot, resident in enumerate(self._residents) if resident is None}
        assert free == set(self._empty), f"empty slots: {free}, booked: {self._empty}"
        assert self._payload == sum(r.size for r in self._residents if r)
        self._tables.check_empty(empty)

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
