"""A pool's slots filled, used and emptied as the device tier does it, without a manager."""

import itertools
from pathlib import Path

from vexpert.lora.adapter_version import Version
from vexpert.lora.chat_template import ChatTemplate
from vexpert.lora.eviction import DevicePolicy, Room
from vexpert.lora.pack import PackedAdapter
from vexpert.lora.pool import SlotPool
from vexpert.lora.source import HostCopy, Source
from vexpert.lora.types import AdapterRef

_numbers = itertools.count()


def version_on_host(packed: PackedAdapter, is_pinned: bool = False) -> Version:
    """A version whose read has ended."""
    number = next(_numbers)
    version = Version(AdapterRef(f"a{number}", number), Source(Path(f"a{number}")), is_pinned)
    version.life.begin_read()
    version.life.buffer = packed.buffer
    version.life.end_read(HostCopy(packed, (), (), ChatTemplate()), 0.0)
    return version


class Slots:
    """A pool, and who is in it."""

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self.policy = DevicePolicy(pool.arena.nbytes, pool.num_slots)

    def victims(self, nbytes: int) -> tuple[int, ...] | None:
        """Slots that leave for an adapter of `nbytes` that comes in a later step."""
        self.policy.begin_step()
        room = Room(self.pool.free_bytes, self.pool.empty_slots)
        return self.policy.victims(self.pool.block_bytes(nbytes), room)

    def remove(self, slot: int) -> None:
        self.policy.leave(slot)
        self.pool.remove(slot)

    def put(self, packed: PackedAdapter) -> int:
        """Make room and install; the slot. There must be room."""
        evicted = self.victims(packed.nbytes)
        assert evicted is not None, f"no room for {packed.nbytes} bytes"
        for slot in evicted:
            self.remove(slot)
        version = version_on_host(packed)
        version.life.begin_copy()
        slot = self.pool.install(packed)
        version.life.end_copy(slot, self.pool.resident_bytes(slot))
        self.policy.enter(version)
        return slot

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        self.policy.check_integrity()
