"""The fast tier: adapters in slots of the device's arena. The engine's thread, between two steps.

One adapter at a time is installed: evict until its bytes are free, slide others until they lie
together, copy, publish. Every step does a bounded part of that, so that no step is held up.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from vexpert.config import first_line
from vexpert.log import get_logger
from vexpert.lora.adapter_version import Version, some_names
from vexpert.lora.eviction import DevicePolicy, Room
from vexpert.lora.pool import SlotPool
from vexpert.lora.transfer import Copier, Transfer, make_transfer
from vexpert.lora.types import Wait

logger = get_logger(__name__)


@dataclass(frozen=True)
class Pace:
    """Bytes that one step may copy: a rate times the time since the step before, or `least`.

    On a GPU, bytes that may be under way at once: what a step's own small copy may wait for.
    """

    rate: float  # bytes a second
    least: int
    move: int  # bytes that one step may slide within the arena; one adapter at least

    def copy_bytes(self, seconds: float) -> int:
        return max(self.least, int(self.rate * min(seconds, 1.0)))


# On a GPU 20 us at 50 GB/s, beside the steps. A CPU copies between two steps: a tenth of its time.
GPU_PACE = Pace(rate=0, least=1 << 20, move=64 << 20)
CPU_PACE = Pace(rate=0.5e9, least=4 << 20, move=16 << 20)
UNLIMITED = 1 << 62


@dataclass
class _Install:
    """The adapter that is on its way to the device."""

    version: Version
    slot: int | None = None  # once it has a block
    transfer: Transfer | None = None


class DeviceTier:
    """Brings versions to the slots of `pool`, as `policy` allows. `settled(version)` is called when
    an install has ended, and `fetch(version)` where a pinned one is not on the host.
    """

    def __init__(
        self,
        pool: SlotPool,
        device: torch.device,
        settled: Callable[[Version], None],
        fetch: Callable[[Version], None],
    ) -> None:
        self.pool = pool
        self.policy = DevicePolicy(pool.arena.nbytes, pool.num_slots)
        self._pace = GPU_PACE if device.type == "cuda" else CPU_PACE
        self._copier = Copier(device) if device.type == "cuda" else None
        self._settled, self._fetch = settled, fetch
        self._install: _Install | None = None
        self._pinned: deque[Version] = deque()  # to be installed without being asked for
        self._waiting_pinned: list[Version] = []  # of them, those that found no room in this step
        self._last_step = time.monotonic()
        self._copy_left = self._move_left = UNLIMITED

    def too_large(self, nbytes: int) -> str | None:
        """Why an adapter of `nbytes` never fits, whoever leaves; None: it does."""
        total, need = self.pool.arena.nbytes, self.pool.block_bytes(nbytes)
        if need <= total:
            return None
        return (
            f"it needs {need} bytes on the device; all adapters together have {total}; "
            "raise lora_memory (--lora-memory)"
        )

    def shut_out(self, version: Version, nbytes: int, read_only: bool = False) -> str | None:
        """Why `version`, of `nbytes`, has no room while pinned ones have theirs; None: it has.

        They have it before they are there, with `read_only` once they were read.
        """
        room, taken = self.policy.beside_pinned(version, read_only)
        lacks, options = [], []
        if room.slots < 1:
            lacks.append(f"have all {self.pool.num_slots} slots")
            options.append("max_loras (--max-loras)")
        if (need := self.pool.block_bytes(nbytes)) > room.nbytes:
            total = self.pool.arena.nbytes
            lacks.append(f"leave {room.nbytes} of {total} bytes, and it needs {need}")
            options.append("lora_memory (--lora-memory)")
        if not lacks:
            return None
        names = some_names(f"{name}: {size or 'unknown'} bytes" for name, size in taken.items())
        return (
            f"there is no room for it on the device: the pinned adapters ({names}) "
            f"{' and '.join(lacks)}; unload one of them, load one anew in place and not pinned, "
            f"or raise {' and '.join(options)}"
        )

    def begin_step(self, is_idle: bool) -> None:
        """A new step: new budgets, none if nobody runs, and the install under way goes on."""
        now = time.monotonic()
        self._copy_left = UNLIMITED if is_idle else self._pace.copy_bytes(now - self._last_step)
        self._move_left = UNLIMITED if is_idle else self._pace.move
        self._last_step = now
        self.policy.begin_step()
        self._work()
        self._pinned.extend(self._waiting_pinned)
        self._waiting_pinned.clear()
        while self._pinned and self._install is None:
            self._install_pinned(self._pinned.popleft())

    def _install_pinned(self, version: Version) -> None:
        if version.life.slot is not None or version.life.is_retired:
            return
        if version.life.host is None:
            self._fetch(version)  # it is pinned again when it has come
        elif not self._begin(version):
            self._waiting_pinned.append(version)

    def pin(self, version: Version, nbytes: int) -> bool:
        """Keep room for a pinned version of `nbytes`, 0: not known; False: there is none."""
        return self.policy.pin(version, self.pool.block_bytes(nbytes) if nbytes else 0)

    def bring(self, version: Version) -> None:
        """Install a pinned version, as soon as it is on the host and has room."""
        self._pinned.append(version)

    def acquire(self, version: Version) -> int | Wait:
        """Use the slot of `version` for one sequence; installs it if it is on the host."""
        life = version.life
        if life.slot is None:
            if life.host is None or self._install is not None:
                return Wait.COMING
            if not self._begin(version):
                return Wait.NO_ROOM
            if life.slot is None:
                return Wait.COMING
        self.policy.use(life.slot)
        return life.slot

    def release(self, version: Version) -> None:
        """Undo one `acquire`."""
        assert version.life.slot is not None, f"{version.ref} has no slot"
        self.policy.unuse(version.life.slot)

    def prefetch(self, versions: Iterable[Version]) -> None:
        """Install the first of `versions` that needs it, if nothing wanted has to leave for it."""
        if self._install is None:
            for version in versions:
                if version.life.slot is None and version.life.host is not None:
                    self._begin(version, spare_held=True)
                    return

    def remove(self, version: Version) -> None:
        """Free the slot of `version`, if it has one; no sequence uses it."""
        slot = version.life.slot
        if slot is not None:
            self.policy.leave(slot)
            self.pool.remove(slot)

    def check_integrity(self) -> None:
        """Assert that policy and pool agree, and each with itself."""
        self.pool.check_integrity()
        self.policy.check_integrity()
        filling = None if self._install is None else self._install.slot
        in_slot = self.policy.in_slot
        for slot in range(self.pool.num_slots):
            taken = slot in in_slot or slot == filling
            assert taken == self.pool.is_taken(slot), f"slot {slot} has no owner"
        for slot, version in in_slot.items():
            assert version.life.device_bytes == self.pool.resident_bytes(slot)

    def _begin(self, version: Version, spare_held: bool = False) -> bool:
        """Make room for `version` and begin its install; False: there is no room now."""
        host = version.life.host
        assert host is not None
        need = self.pool.block_bytes(host.packed.nbytes)
        is_to_stay = version.is_pinned and not version.life.is_retired
        if is_to_stay and not self.policy.pin(version, need):
            return False
        room = Room(self.pool.free_bytes, self.pool.empty_slots)
        evicted = self.policy.victims(need, room, spare_held)
        if evicted is None:
            return False
        for slot in evicted:
            self.policy.evict(slot)
            self.pool.remove(slot)
        version.life.begin_copy()
        self._install = _Install(version)
        self._work()
        return True

    def _work(self) -> None:
        """Go on with the install as far as this step's budgets allow."""
        if self._install is None:
            return
        try:
            if self._advance(self._install):
                self._finish(self._install)
        except RuntimeError as error:  # the device's own: out of memory, a failed copy
            self._give_up(self._install, error)

    def _advance(self, install: _Install) -> bool:
        """Whether the weights are whole on the device."""
        host = install.version.life.host
        assert host is not None
        packed = host.packed
        while install.slot is None:
            install.slot = self.pool.reserve(packed)
            if install.slot is None:
                if self._move_left <= 0:
                    return False
                self._move_left -= self.pool.move(packed.nbytes)
        if install.transfer is None:
            place = self.pool.place_of(install.slot)
            install.transfer = make_transfer(packed.buffer, place, self._copier)
        if self._copy_left > 0:
            self._copy_left -= install.transfer.advance(self._copy_left)
        return install.transfer.is_done()

    def _finish(self, install: _Install) -> None:
        version, slot = install.version, install.slot
        assert slot is not None
        self.pool.publish(slot)
        version.life.end_copy(slot, self.pool.resident_bytes(slot))
        self.policy.enter(version)
        self._install = None
        self._settled(version)

    def _give_up(self, install: _Install, error: RuntimeError) -> None:
        version = install.version
        if install.transfer is not None:
            install.transfer.cancel()  # nothing may write to the block once it is free
        if install.slot is not None:
            self.pool.remove(install.slot)
        cause = first_line(error)
        reason = f"adapter {version.ref.name!r}: the device could not take it: {cause}"
        version.life.fail(reason)
        logger.error("%s", reason)
        self._install = None
        self._settled(version)
