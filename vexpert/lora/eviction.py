"""Who stays in memory and who leaves it, and in which order: every such rule. Tiers move the bytes.

An adapter is *pinned* by its owner: it never leaves the device, and its room is its own from the
moment its size is known, though it may come there later. A slot is *used* by the running
sequences that have it: it never leaves under them. A version is *held* by its living requests,
which run or wait.

- The device: least recently used slots leave first, those of held versions last. Used slots stay,
  pinned adapters too, and what has just come until the next step.
- The host: least recently used copies leave first. What is read or copied stays, so does a held
  version without a slot, and what no file could give back.
- Both: an unloaded version leaves at once, unless it is held, used, read or copied.

Plain Python: bytes are numbers here. Called under the manager's lock.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from vexpert.lora.adapter_state import State
from vexpert.lora.adapter_version import Version


@dataclass(frozen=True)
class Room:
    """What the device has free."""

    nbytes: int
    slots: int


class DevicePolicy:
    """Who is in which of `num_slots` slots over an arena of `nbytes`, and who uses them."""

    def __init__(self, nbytes: int, num_slots: int) -> None:
        self._nbytes, self._num_slots = nbytes, num_slots
        self.in_slot: dict[int, Version] = {}
        self._pinned: dict[Version, int] = {}  # bytes that are their own, there or coming
        self._users: dict[int, int] = {}  # running sequences, by slot
        self._idle: OrderedDict[int, None] = OrderedDict()  # slots without; oldest use first
        self._claims: set[int] = set()  # come since the last step began: whoever asked is first
        self.evictions = 0

    def begin_step(self) -> None:
        """Who asked for what came in the step before has had its turn."""
        self._claims.clear()

    def enter(self, version: Version) -> None:
        """`version` is whole in its slot from now on."""
        slot = version.life.slot
        assert slot is not None, f"{version.ref} has no slot"
        assert slot not in self.in_slot, f"slot {slot} is taken"
        self.in_slot[slot] = version
        self._users[slot] = 0
        self._idle[slot] = None
        self._claims.add(slot)

    def use(self, slot: int) -> None:
        """A running sequence uses the slot. Counted."""
        self._users[slot] += 1
        self._idle.pop(slot, None)
        self._claims.discard(slot)

    def unuse(self, slot: int) -> None:
        """Undo one `use`."""
        assert self._users[slot] > 0, f"slot {slot} is not in use"
        self._users[slot] -= 1
        if not self._users[slot]:
            self._idle[slot] = None

    def is_used(self, version: Version) -> bool:
        """Whether a running sequence uses the slot of `version`."""
        slot = version.life.slot
        return slot is not None and self._users[slot] > 0

    def leave(self, slot: int) -> Version:
        """The slot is emptied; the version that was there."""
        users = self._users.pop(slot)
        assert users == 0, f"slot {slot} is in use by {users} sequences"
        del self._idle[slot]
        self._claims.discard(slot)
        version = self.in_slot.pop(slot)
        version.life.leave_device()
        return version

    def evict(self, slot: int) -> None:
        """The slot is emptied for another adapter."""
        self.leave(slot).life.history.evictions += 1
        self.evictions += 1

    def victims(self, need: int, room: Room, spare_held: bool = False) -> tuple[int, ...] | None:
        """Slots to empty until there are `need` bytes and a slot; None: what stays holds too much.

        `spare_held`: nothing that living requests want leaves.
        """
        nbytes, slots = room.nbytes, room.slots
        chosen: list[int] = []
        for slot in self._candidates(spare_held):
            if nbytes >= need and slots:
                break
            nbytes += self.in_slot[slot].life.device_bytes
            slots += 1
            chosen.append(slot)
        return tuple(chosen) if nbytes >= need and slots else None

    def _candidates(self, spare_held: bool) -> list[int]:
        """Slots that may be emptied, those that nobody wants first, least recently used first."""
        free = [s for s in self._idle if not self.in_slot[s].is_pinned and s not in self._claims]
        held = [slot for slot in free if self.in_slot[slot].life.holds]
        unwanted = [slot for slot in free if not self.in_slot[slot].life.holds]
        return unwanted if spare_held else unwanted + held

    def pin(self, version: Version, nbytes: int) -> bool:
        """From now on `nbytes` and a slot are for `version` alone; False: they are others'.

        0 bytes: how many it needs is not known yet.
        """
        room, _ = self.beside_pinned(version)
        if room.slots < 1 or nbytes > room.nbytes:
            return False
        self._pinned[version] = nbytes
        return True

    def unpin(self, version: Version) -> None:
        """`version` has failed, or was unloaded: it leaves with its last request."""
        self._pinned.pop(version, None)

    def beside_pinned(
        self, version: Version, read_only: bool = False
    ) -> tuple[Room, dict[str, int]]:
        """The room that pinned adapters leave to `version`, and the bytes of each of them by name.

        That of its own name does not count, unless it is newer; of two others of one name the
        larger does, as either may stay. `read_only`: nor those that are being read, and may fail.
        """
        others = [
            other
            for other in self._pinned
            if other.ref.name != version.ref.name or other.ref.version > version.ref.version
            if other.life.history.loads or not read_only
        ]
        taken = self._taken(others)
        return Room(self._nbytes - sum(taken.values()), self._num_slots - len(taken)), taken

    def _taken(self, versions: Iterable[Version]) -> dict[str, int]:
        """By name, the bytes that are kept for the larger of its pinned versions."""
        taken: dict[str, int] = {}
        for version in versions:
            name = version.ref.name
            taken[name] = max(self._pinned[version], taken.get(name, 0))
        return taken

    def check_integrity(self) -> None:
        """Assert that slots and versions agree, and that no idle slot is lost to eviction."""
        assert self.in_slot.keys() == self._users.keys()
        for slot, version in self.in_slot.items():
            assert version.life.slot == slot, f"{version.ref} in {slot} says {version.life.slot}"
            is_idle = self._users[slot] == 0
            assert (slot in self._idle) == is_idle, f"slot {slot}: {self._users[slot]} users"
        assert self._idle.keys() <= self.in_slot.keys(), f"idle slots hold nothing: {self._idle}"
        assert self._claims <= self.in_slot.keys(), f"claimed slots hold nothing: {self._claims}"
        self._check_pinned()

    def _check_pinned(self) -> None:
        """Assert that those that may be there, and no others, have room, and all fit at once."""
        taken = self._taken(self._pinned)
        assert sum(taken.values()) <= self._nbytes, f"pinned: {taken} of {self._nbytes} bytes"
        assert len(taken) <= self._num_slots, f"pinned: {taken} of {self._num_slots} slots"
        for version in self.in_slot.values():
            has_room = not version.is_pinned or version.life.is_retired or version in self._pinned
            assert has_room, f"{version.ref} is pinned without room of its own"
        for version in self._pinned:
            life = version.life
            assert version.is_pinned, f"{version.ref} is not pinned, and has room of its own"
            assert not life.is_retired, f"{version.ref} leaves, and has room of its own"
            assert life.error is None, f"{version.ref} failed, and has room of its own"


class HostPolicy:
    """Which versions have host memory, of `budget` bytes in at most `most` copies (None: any)."""

    def __init__(self, budget: int, most: int | None) -> None:
        self.budget, self._most = budget, most
        self._copies: OrderedDict[Version, None] = OrderedDict()  # oldest use first
        self.used = 0  # bytes
        self._booked = 0  # of them, those that are about to be allocated
        self.files = 0  # bytes beside `used`: files that are being read

    def __len__(self) -> int:
        return len(self._copies)

    def __contains__(self, version: Version) -> bool:
        return version in self._copies

    def touch(self, version: Version) -> None:
        """`version` is used now."""
        if version in self._copies:
            self._copies.move_to_end(version)

    def book(self, nbytes: int) -> None:
        """Count bytes before they exist: two threads must not both find the same room."""
        self.used += nbytes
        self._booked += nbytes

    def unbook(self, nbytes: int) -> None:
        """Undo `book`: they could not be allocated."""
        self.used -= nbytes
        self._booked -= nbytes

    def enter(self, version: Version) -> None:
        """The bytes booked for `version` are its own now."""
        self._booked -= version.life.host_bytes
        self._copies[version] = None

    def leave(self, version: Version) -> None:
        """Its bytes are about to be freed."""
        self.used -= version.life.host_bytes
        del self._copies[version]

    def fits(self, nbytes: int) -> bool:
        """Whether there is room now."""
        return self.used + nbytes <= self.budget

    def may_read(self, nbytes: int) -> bool:
        """Whether a file may be read to memory: there is room beside all else, or it is alone.

        One at a time is always read, or nothing could be loaded while copies in use fill the host.
        """
        return not self.files or self.fits(self.files + nbytes)

    def could_fit(self, nbytes: int) -> bool:
        """Whether there is room now, or once the `victims` have left."""
        return self.fits(nbytes - self._freed_for(nbytes))

    def could_read(self, nbytes: int) -> bool:
        """`may_read`, now or once the `victims` have left."""
        return self.may_read(nbytes - self._freed_for(nbytes))

    def _freed_for(self, nbytes: int) -> int:
        return sum(version.life.host_bytes for version in self.victims(nbytes))

    def is_settled(self) -> bool:
        """Whether no copy is just read by a load, whose thread lets go of it in a moment."""
        return not any(
            version.life.state is State.HOST and not version.life.is_served
            for version in self._copies
        )

    def lasting_bytes(self, but_leaving: bool) -> int:
        """Bytes of what no file could give back; `but_leaving`: nor leaves with its requests."""
        return sum(
            version.life.host_bytes
            for version in self._copies
            if version.source.folder is None and not (but_leaving and version.life.is_retired)
        )

    def victims(self, nbytes: int) -> list[Version]:
        """Copies to drop so that `nbytes` fit beside files that are being read.

        All that may go where even that is too little.
        """
        chosen, used = [], self.used + self.files
        for version in self._copies:
            if used + nbytes <= self.budget:
                break
            if may_leave_host(version):
                used -= version.life.host_bytes
                chosen.append(version)
        return chosen

    def surplus(self) -> list[Version]:
        """Copies to drop because there are too many."""
        if self._most is None or len(self._copies) <= self._most:
            return []
        free = [version for version in self._copies if may_leave_host(version)]
        return free[: len(self._copies) - self._most]

    def check_integrity(self) -> None:
        """Assert that the bytes booked are those of the copies, within the budget."""
        held = sum(version.life.host_bytes for version in self._copies)
        assert self.used == self._booked + held, (self.used, self._booked, held)
        assert self.used <= self.budget, f"{self.used} of {self.budget} bytes"
        assert self.files >= 0, f"{self.files} bytes of files"
        for version in self._copies:
            assert version.life.buffer is not None, f"{version.ref} is empty"


def may_leave_host(version: Version) -> bool:
    """Whether its copy may be dropped for another."""
    life = version.life
    if life.is_busy or version.source.folder is None:
        return False
    return life.slot is not None or not life.holds


def may_wait_for_host(version: Version) -> bool:
    """Whether a read may wait until others leave: somebody wants it."""
    return version.life.holds > 0 or (version.is_pinned and not version.life.is_retired)


def is_in_use(version: Version, device: DevicePolicy) -> bool:
    """Whether an unloaded version has to live on."""
    return version.life.holds > 0 or version.life.is_busy or device.is_used(version)


def check_owners(versions: Iterable[Version], device: DevicePolicy) -> None:
    """Assert that every version is where it says, and that none outlives its last user."""
    for version in versions:
        version.life.check_integrity()
        slot = version.life.slot
        assert slot is None or device.in_slot.get(slot) is version, f"{version.ref} lost its slot"
        is_due = version.life.is_retired and not is_in_use(version, device)
        assert not is_due, f"{version.ref} leaked"
