"""The adapters of one engine: names and versions, and who uses them. Tiers hold the weights.

Any thread may load, register, unload, list, resolve, hold and drop. `advance`, `acquire`,
`release` and `prefetch` belong to the engine's thread, between two steps; they read no file and
wait for none.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vexpert.config import EngineConfig
from vexpert.errors import AdapterError, AdapterGoneError, AdapterNotFoundError
from vexpert.log import get_logger
from vexpert.lora.adapter_name import check_name
from vexpert.lora.adapter_state import State
from vexpert.lora.adapter_version import Version, check_newest
from vexpert.lora.adapter_versions import Versions
from vexpert.lora.chat_template import ChatTemplate
from vexpert.lora.endings import Endings, check_seconds
from vexpert.lora.eviction import check_owners, is_in_use
from vexpert.lora.formats.full import BaseWeight
from vexpert.lora.info import with_remedy
from vexpert.lora.source import (
    AdapterLoader,
    AdapterReader,
    check_switches,
    folder_source,
    make_source,
)
from vexpert.lora.tiers import make_tiers
from vexpert.lora.types import (
    AdapterInfo,
    AdapterRef,
    BatchView,
    LoraState,
    TargetMap,
    TierUsage,
    Wait,
)
from vexpert.lora.watcher import Watcher, watch

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
        self._lock = threading.RLock()
        loader = AdapterLoader(
            *(reader, targets, config.max_lora_rank, dtype, base_weight),
            roots=config.allowed_adapter_roots,
        )
        self._tiers = make_tiers(loader, config, device, self._lock, self._check_size, self._settle)
        self._host, self._device = self._tiers.host, self._tiers.device
        self.pool = self._device.pool
        state.tables = self.pool.tables
        state.installed = self.pool.extras
        self._virtual_experts = config.lora_use_virtual_experts
        self._reserved = reserved
        self._versions = Versions(self._lock)
        self.listing = self._versions.listing
        self._endings = Endings(self._shut_out)
        self._watcher: Watcher | None = None
        # Told of each version that is replaced (True) or unloaded, under the lock.
        self.on_loss: Callable[[AdapterRef, bool], None] | None = None

    @property
    def num_slots(self) -> int:
        """Most adapters on the device at once."""
        return self.pool.num_slots

    # ---- names: any thread

    def load(
        self,
        name: str,
        path: str | Path | None = None,
        *,
        tensors: Any = None,
        config: Any = None,
        lora_B_layout: str | None = None,
        load_inplace: bool = False,
        pinned: bool = False,
        steps_go_on: Callable[[], bool] = lambda: True,
    ) -> AdapterInfo:
        """Read an adapter to host memory and serve it as `name`; waits for the read.

        From the folder `path`, or from `tensors` with the `config` of their adapter. With
        `load_inplace`, a loaded `name` gets a new version: running requests finish on the old one.
        AdapterError, and no change, if it is refused: unless `steps_go_on`, also for want of room.
        """
        check_name(name, self._reserved)
        check_switches(load_inplace=load_inplace, pinned=pinned)
        source = make_source(path, tensors, config, lora_B_layout)
        version = None
        try:
            with self._lock:
                version = self._versions.begin_load(name, source, load_inplace, pinned)
                version.life.holds += 1  # nobody may drop what is read
                self._host.ensure(version)
            self._host.wait(version, steps_go_on)
        finally:
            with self._lock:
                self._versions.end_load(name, source)
                if version is not None:
                    self._end_load(version)
        if version.life.error is not None:
            raise AdapterError(version.life.error)
        return version.info()

    def register(
        self,
        name: str,
        path: str | Path,
        *,
        lora_B_layout: str | None = None,
        load_inplace: bool = False,
        pinned: bool = False,
    ) -> AdapterInfo:
        """Serve the folder `path` as `name`, and read nothing before a request needs it.

        What is wrong with the files is told then: the adapter is errored, and its requests fail.
        A pinned one is read at once, but not waited for: it has a slot of its own or is refused,
        and its bytes if they are free when they are known; else it waits for them.
        """
        check_name(name, self._reserved)
        check_switches(load_inplace=load_inplace, pinned=pinned)
        source = folder_source(path, lora_B_layout)
        self._host.warm()
        with self._lock:
            try:
                version = self._versions.begin_load(name, source, load_inplace, pinned)
            finally:  # Ctrl-C may come within
                self._versions.end_load(name, source)
            if pinned:
                self._check_size(version, 0)
            self._commit(version)
            if pinned:
                self._host.ensure(version)
        return version.info()

    def unload(self, name: str, *, drain_seconds: float | None = None) -> None:
        """Forget `name` at once; its memory is free when the last request drops it.

        Requests that still run after `drain_seconds` are ended with an error; None: they finish.
        """
        check_seconds(drain_seconds)
        with self._lock:
            version = self._versions.newest(name)
            self._endings.begin_unload(version, drain_seconds)
            self._retire(version, is_replaced=False)

    def unload_version(self, ref: AdapterRef) -> bool:
        """`unload` for `ref` alone: False, and nothing, if its name means another one by now."""
        with self._lock:
            version = self._versions.find(ref.name)
            if version is None or version.ref != ref:
                return False
            self._retire(version, is_replaced=False)
            return True

    def is_loading(self, name: str) -> bool:
        """Whether somebody loads or registers `name` just now."""
        with self._lock:
            return self._versions.is_loading(name)

    def list(self) -> list[AdapterInfo]:
        """Every adapter by name, then version; replaced and unloaded ones drain."""
        return self.listing.all()

    def resolve(self, name: str) -> AdapterRef:
        """The newest version of `name`; AdapterNotFoundError if there is none."""
        with self._lock:
            return self._versions.newest(name).ref

    def chat_template(self, name: str, may_read: bool) -> ChatTemplate | None:
        """What the newest version of `name` was loaded with; None: it is to be read, with may_read.

        Its weights are then held to the same state of the files. Raises AdapterNotFoundError,
        AdapterGoneError.
        """
        with self._lock:
            version = self._versions.newest(name)
            life = version.life
            if life.error is not None:
                raise life.gone()
        if life.contents is None and may_read:
            self._read_template(version)
        if life.contents is None:
            return None
        return replace(life.contents.template, version=version.ref.version)

    def usage(self) -> TierUsage:
        """What the tiers hold now."""
        with self._lock:
            return self._tiers.usage(known=self._versions.num_names)

    def watch(self, folder: str, interval: float) -> None:
        """Serve every adapter in `folder`, looked at each `interval` seconds. ConfigError."""
        self._watcher = watch(self, folder, interval)

    # ---- requests: any thread

    def hold_newest(self, name: str, version: int | None = None) -> AdapterRef:
        """Hold the newest version of `name` for a living request: no reload comes between.

        Raises as `resolve` and `hold` do, AdapterReplacedError if it is not `version`, where that
        is given; nothing is held then.
        """
        with self._lock:
            ref = self._versions.newest(name).ref
            check_newest(ref, version)
            self.hold(ref)
            return ref

    def hold(self, ref: AdapterRef) -> None:
        """A living request uses `ref`; begins to read it if it is not on the host.

        Raises AdapterNotFoundError if the version is gone, AdapterGoneError if it is errored;
        nothing is held then.
        """
        with self._lock:
            version = self._versions.get(ref)
            if version is None:
                raise AdapterNotFoundError(f"adapter {ref.name!r} was unloaded; load it again")
            if version.life.error is not None:
                raise version.life.gone()
            version.life.holds += 1
            self._use(version)
            if version.life.slot is None:
                self._host.ensure(version)

    def drop(self, ref: AdapterRef) -> None:
        """The request that held `ref` has ended."""
        with self._lock:
            version = self._versions[ref]
            assert version.life.holds > 0, f"{ref} is not held"
            version.life.holds -= 1
            self._use(version)
            self._free_if_retired(version)
            self._host.trim()

    # ---- slots: the engine's thread

    def advance(self, is_idle: bool = False) -> dict[AdapterRef, str]:
        """Between two steps: go on with copies to the device; not `is_idle`: others run meanwhile.

        Returns the versions whose requests cannot go on, with the reason.
        """
        self._host.tend()
        with self._lock:
            self._device.begin_step(is_idle)
            return self._endings.take()

    def acquire(self, ref: AdapterRef) -> int | Wait:
        """Use the slot of `ref`, which the caller holds; begins to bring it there if needed.

        Where that is not done at once, ask again in a later step: `Wait` says what it waits for.
        """
        with self._lock:
            version = self._versions[ref]
            life = version.life
            assert life.holds > 0, f"{ref} is acquired but not held"
            if life.error is not None:
                return Wait.COMING  # its requests end with the next `advance`
            if life.slot is None:
                self._host.ensure(version)
            slot = self._device.acquire(version)
            if slot is Wait.NO_ROOM:
                self._endings.end_if_shut_out(version)
            return slot

    def release(self, ref: AdapterRef) -> None:
        """Undo one `acquire` that returned a slot. The adapter stays there until evicted."""
        with self._lock:
            version = self._versions[ref]
            self._device.release(version)
            self._free_if_retired(version)

    def prefetch(self, refs: Iterable[AdapterRef]) -> None:
        """`refs` will be acquired soon: bring them nearer where that costs nobody else anything."""
        with self._lock:
            versions = [self._versions[ref] for ref in refs]
            for version in versions:
                if version.life.slot is None:
                    self._host.ensure(version)
            self._device.prefetch(versions)

    def batch_view(
        self, slots: torch.Tensor, logit_slots: torch.Tensor, active: tuple[int, ...]
    ) -> BatchView | None:
        """View of a step: slots [T] and logit_slots [n] int64 on the device, `active` on the host.

        None when no row has an adapter.
        """
        chosen = tuple(sorted({slot for slot in active if slot >= 0}))
        if not chosen:
            return None
        signature = self.pool.signature(chosen)
        return BatchView(slots, logit_slots, chosen, self._virtual_experts, signature)

    def check_integrity(self) -> None:
        """Assert that versions, tiers, tables and blocks agree."""
        with self._lock:
            self._device.check_integrity()
            self._host.policy.check_integrity()
            check_owners(self._versions.values(), self._device.policy)
            for version in self._device.policy.in_slot.values():
                assert self._versions.get(version.ref) is version, f"{version.ref} leaked a slot"
            self._versions.check_integrity()

    def _read_template(self, version: Version) -> None:
        """Raises AdapterGoneError; the read of its weights then finds the same, for good."""
        try:
            template, files = self._host.read_template(version)
        except AdapterError as error:
            with self._lock:
                if self._versions.get(version.ref) is version:
                    self._host.ensure(version)
            raise AdapterGoneError(with_remedy(f"adapter {version.ref.name!r}: {error}")) from error
        with self._lock:
            version.life.read_template(template, files)

    # ---- under the lock

    def _check_size(self, version: Version, nbytes: int) -> None:
        """Raise AdapterError for one that never fits, or is new and does not beside pinned ones.

        The room of a pinned one is its own from now on. nbytes: 0 if it is not known.
        """
        is_new = version.ref not in self._versions
        why = self._device.too_large(nbytes) or (is_new and self._device.shut_out(version, nbytes))
        if why:
            raise AdapterError(why)
        if version.is_pinned and not version.life.is_retired:
            self._device.pin(version, nbytes)

    def _end_load(self, version: Version) -> None:
        """Nobody waits for its read any more."""
        version.life.holds -= 1
        if version.life.state is State.HOST:
            self._commit(version)
        else:  # it was refused, or Ctrl-C came while it was read
            version.life.is_retired = True
            self._device.policy.unpin(version)
            self._free_if_retired(version)

    def _commit(self, version: Version) -> None:
        name = version.ref.name
        former = self._versions.find(name)
        if former is not None:
            self._retire(former, is_replaced=True)
        version.life.is_served = True
        self._versions.add(version)
        self._use(version)
        if version.is_pinned:
            self._device.bring(version)
        self._host.trim()
        nbytes = version.life.host_bytes
        size = f", {nbytes / 2**20:.1f} MiB" if nbytes else ""
        logger.info("adapter %s: version %d%s, %s", name, version.ref.version, size, version.source)

    def _use(self, version: Version) -> None:
        version.life.history.last_use = time.time()
        self._host.policy.touch(version)

    def _retire(self, version: Version, is_replaced: bool) -> None:
        version.life.is_retired = True
        self._device.policy.unpin(version)
        if self.on_loss is not None:
            self.on_loss(version.ref, is_replaced)
        self._versions.retire(version)
        self._free_if_retired(version)

    def _free_if_retired(self, version: Version) -> None:
        if version.life.is_retired and not is_in_use(version, self._device.policy):
            self._device.remove(version)
            self._host.drop(version)
            self._endings.forget(version)
            self._versions.remove(version)

    def _settle(self, version: Version) -> None:
        """A read or a copy of `version` has ended, maybe with an error."""
        life = version.life
        if life.error is not None:
            self._host.drop(version)
            self._device.policy.unpin(version)
            if life.holds and version.ref in self._versions:
                self._endings.end(version, str(life.gone()))
        if version.is_pinned and life.state is State.HOST and version.ref in self._versions:
            self._device.bring(version)
        self._free_if_retired(version)
        self._host.trim()  # what is on the device may leave the host

    def _shut_out(self, version: Version) -> str | None:
        """Why pinned adapters leave no room to `version`, which lies on the host; None: they do."""
        return self._device.shut_out(version, version.life.host_bytes, read_only=True)
