"""The adapters of one engine: names and versions, host copies, and who holds a device slot.

Any thread may load, unload, list, resolve, hold and drop; `acquire` and `release` belong to the
engine's thread, between two steps. Files are read and packed outside the lock.
"""

import itertools
import threading
from pathlib import Path

import torch

from vexpert.config import EngineConfig, allocating, shown
from vexpert.errors import AdapterError, AdapterNotFoundError
from vexpert.log import get_logger
from vexpert.lora.adapter_version import Version, check_name
from vexpert.lora.budget import arena_bytes
from vexpert.lora.formats.full import BaseWeight
from vexpert.lora.pool import SlotPool
from vexpert.lora.source import AdapterLoader, AdapterReader, HostCopy, check_path
from vexpert.lora.types import AdapterInfo, AdapterRef, BatchView, LoraState, TargetMap

logger = get_logger(__name__)


class AdapterManager:
    """Sets `state.tables` and `state.installed`.

    `reserved`: names that no adapter may take, the base model's own. `base_weight`: parameters of
    the model by name, where `reader` lets extras pass.
    """

    def __init__(
        self,
        targets: TargetMap,
        state: LoraState,
        config: EngineConfig,
        device: torch.device,
        dtype: torch.dtype,
        reader: AdapterReader,
        reserved: frozenset[str] = frozenset(),
        base_weight: BaseWeight | None = None,
    ) -> None:
        size = arena_bytes(targets, config, device, dtype)
        with allocating(
            f"an arena of {size} bytes with max_loras={config.max_loras} slots",
            "lower lora_memory or max_loras",
        ):
            self.pool = SlotPool(targets, config.max_loras, size, device, dtype)
        state.tables = self.pool.tables
        state.installed = self.pool.extras
        self._loader = AdapterLoader(
            reader, targets, config.max_lora_rank, dtype, device.type == "cuda", base_weight
        )
        self._max_host = config.max_cpu_loras
        self._virtual_experts = config.lora_use_virtual_experts
        self._reserved = reserved
        self._lock = threading.RLock()
        self._current: dict[str, Version] = {}
        self._versions: dict[AdapterRef, Version] = {}  # current ones, and retired ones in use
        self._in_slot: dict[int, Version] = {}
        self._loading: set[str] = set()
        self._next_version = itertools.count(1)
        self._clock = itertools.count(1)

    # ---- names: any thread

    def load(
        self,
        name: str,
        path: str | Path,
        *,
        lora_B_layout: str | None = None,
        load_inplace: bool = False,
    ) -> AdapterInfo:
        """Read an adapter to host memory and serve it as `name`.

        With `load_inplace`, a loaded `name` gets a new version: running requests finish on the old
        one. Raises AdapterError and changes nothing when it is refused.
        """
        check_name(name, self._reserved)
        folder = check_path(path)
        self._reserve(name, load_inplace)
        try:
            host = self._loader.load(folder, lora_B_layout)
            self._check_size(name, host)
        finally:
            with self._lock:
                self._loading.discard(name)
        with self._lock:
            return self._commit(name, folder, lora_B_layout, host)

    def unload(self, name: str) -> None:
        """Forget `name` at once; its memory is free when the last request drops it."""
        with self._lock:
            self._retire(self._find(name))

    def list(self) -> list[AdapterInfo]:
        """Every adapter by name, then version; replaced and unloaded ones drain."""
        with self._lock:
            versions = sorted(self._versions.values(), key=lambda v: (v.ref.name, v.ref.version))
            return [self._info(version) for version in versions]

    def resolve(self, name: str) -> AdapterRef:
        """The newest version of `name`; AdapterNotFoundError if there is none."""
        with self._lock:
            return self._find(name).ref

    # ---- requests: any thread

    def hold(self, ref: AdapterRef) -> None:
        """A living request uses `ref`: its host copy stays until `drop`.

        Reads the files again if `max_cpu_loras` had dropped the copy. Raises AdapterError if they
        changed, AdapterNotFoundError if the version is gone; nothing is held then.
        """
        with self._lock:
            version = self._versions.get(ref)
            if version is None:
                raise AdapterNotFoundError(f"adapter {ref.name!r} was unloaded; load it again")
            version.holds += 1
        try:
            self._ensure_host(version)
        except BaseException:
            self.drop(ref)
            raise

    def drop(self, ref: AdapterRef) -> None:
        """The request that held `ref` has ended."""
        with self._lock:
            version = self._versions[ref]
            assert version.holds > 0, f"{ref} is not held"
            version.holds -= 1
            version.last_use = next(self._clock)
            self._free_if_retired(version)
            self._trim_host()

    # ---- slots: the engine's thread

    def acquire(self, ref: AdapterRef) -> int | None:
        """Pin `ref`, which the caller holds, in a slot; loads it to the device if needed.

        None: running requests pin all slots, or too many bytes; ask again after a `release`.
        """
        with self._lock:
            version = self._versions[ref]
            slot = version.slot if version.slot is not None else self._install(version)
            if slot is not None:
                self.pool.pin(slot)
            return slot

    def release(self, ref: AdapterRef) -> None:
        """Undo one `acquire` that returned a slot. The adapter stays there until evicted."""
        with self._lock:
            version = self._versions[ref]
            assert version.slot is not None, f"{ref} has no slot"
            self.pool.unpin(version.slot)
            self._free_if_retired(version)

    def slot_of(self, ref: AdapterRef) -> int | None:
        """The slot of `ref`, or None if it is not on the device."""
        with self._lock:
            version = self._versions.get(ref)
            return version.slot if version is not None else None

    def batch_view(
        self, slots: torch.Tensor, logit_slots: torch.Tensor, active: tuple[int, ...]
    ) -> BatchView | None:
        """View of a step: slots [T] and logit_slots [n] int64 on the device, `active` on the host.

        None when no row has an adapter.
        """
        chosen = tuple(sorted({slot for slot in active if slot >= 0}))
        return BatchView(slots, logit_slots, chosen, self._virtual_experts) if chosen else None

    def check_integrity(self) -> None:
        """Assert that versions and slots agree, and that the pool's tables and blocks do."""
        with self._lock:
            self.pool.check_integrity()
            placed = {v.slot: v for v in self._versions.values() if v.slot is not None}
            assert placed == self._in_slot, "slots and versions disagree"
            for slot in range(self.pool.num_slots):
                assert (slot in placed) == self.pool.is_taken(slot), f"slot {slot} has no owner"
            for version in self._versions.values():
                assert version.holds >= 0
                assert not version.retired or self._in_use(version), f"{version.ref} leaked"
            assert all(self._versions[v.ref] is v for v in self._current.values())

    # ---- under the lock, except _ensure_host

    def _reserve(self, name: str, load_inplace: bool) -> None:
        with self._lock:
            if name in self._loading:
                raise AdapterError(f"adapter {name!r} is being loaded now; wait for it")
            if name in self._current and not load_inplace:
                path = self._current[name].path
                raise AdapterError(
                    f"adapter {name!r} is already loaded from {str(path)!r}; "
                    "unload it first, or pass load_inplace to replace it"
                )
            self._loading.add(name)

    def _check_size(self, name: str, host: HostCopy) -> None:
        if not self.pool.fits(host.packed.nbytes):
            raise AdapterError(
                f"adapter {name!r} needs {host.packed.nbytes} bytes on the device; all adapters "
                f"together have {self.pool.arena.nbytes}; raise lora_memory (--lora-memory)"
            )

    def _commit(self, name: str, path: Path, layout: str | None, host: HostCopy) -> AdapterInfo:
        if name in self._current:
            self._retire(self._current[name])
        ref = AdapterRef(name, next(self._next_version))
        version = Version(ref, path, layout, host.files, host.packed.rank, host.warnings, host=host)
        version.last_use = next(self._clock)
        self._current[name] = self._versions[ref] = version
        self._trim_host()
        megabytes = host.packed.nbytes / 2**20
        logger.info("adapter %s: version %d, %.1f MiB from %s", name, ref.version, megabytes, path)
        return self._info(version)

    def _find(self, name: str) -> Version:
        version = self._current.get(name) if isinstance(name, str) else None
        if version is None:
            known = ", ".join(sorted(self._current)) or "none"
            raise AdapterNotFoundError(f"no adapter {shown(name, 300)}; loaded adapters: {known}")
        return version

    def _info(self, version: Version) -> AdapterInfo:
        slot = version.slot
        return version.info(0 if slot is None else self.pool.resident_bytes(slot))

    def _retire(self, version: Version) -> None:
        version.retired = True
        if self._current.get(version.ref.name) is version:
            del self._current[version.ref.name]
        self._free_if_retired(version)

    def _in_use(self, version: Version) -> bool:
        pinned = version.slot is not None and self.pool.is_pinned(version.slot)
        return version.holds > 0 or pinned

    def _free_if_retired(self, version: Version) -> None:
        if version.retired and not self._in_use(version):
            if version.slot is not None:
                self.pool.remove(version.slot)
                self._leave_slot(version.slot)
            del self._versions[version.ref]

    def _leave_slot(self, slot: int) -> None:
        self._in_slot.pop(slot).slot = None

    def _install(self, version: Version) -> int | None:
        assert version.host is not None, f"{version.ref} is acquired but not held"
        evicted = self.pool.make_room(version.host.packed.nbytes)
        if evicted is None:
            return None
        for slot in evicted:
            self._leave_slot(slot)
        version.slot = self.pool.install(version.host.packed)
        self._in_slot[version.slot] = version
        return version.slot

    def _trim_host(self) -> None:
        """Drop host copies that nobody holds, least recently used first, down to the limit."""
        if self._max_host is None:
            return
        copies = [v for v in self._versions.values() if v.host is not None]
        idle = sorted((v for v in copies if not v.holds), key=lambda v: v.last_use)
        for version in idle[: max(0, len(copies) - self._max_host)]:
            version.host = None

    def _ensure_host(self, version: Version) -> None:
        """Read a held version's files again if it has no host copy. Not under the lock."""
        with version.reading:
            if version.error is not None:
                raise AdapterError(version.error)
            if version.host is not None:
                return
            try:
                host = self._loader.load(version.path, version.lora_b_layout, version.files)
            except AdapterError as error:
                version.error = f"adapter {version.ref.name!r}: {error}"
                raise AdapterError(version.error) from error
            with self._lock:
                version.host = host
