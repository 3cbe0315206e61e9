"""What the engine asks of an adapter manager, and the manager of an engine without adapters."""

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from vexpert.config import shown
from vexpert.errors import AdapterError, AdapterNotFoundError
from vexpert.lora.chat_template import ChatTemplate
from vexpert.lora.listing import Listing
from vexpert.lora.types import AdapterInfo, AdapterRef, BatchView, TierUsage, Wait


class AdapterSource(Protocol):
    """Adapters by name and version, and the slots that running sequences use.

    A (name, version) means the same weights for the life of the process: KV blocks are keyed by it.
    """

    listing: Listing  # all versions by name

    @property
    def num_slots(self) -> int:
        """Most adapters on the device at once."""

    def load(
        self,
        name: str,
        path: str | None = None,
        *,
        tensors: Any = None,
        config: Any = None,
        lora_B_layout: str | None = None,
        load_inplace: bool = False,
        pinned: bool = False,
        steps_go_on: Callable[[], bool] = lambda: True,
    ) -> AdapterInfo:
        """Read an adapter, from a folder or from tensors with their config, and serve it.

        `steps_go_on`: another thread steps meanwhile; else it waits for no room that needs steps.
        """

    def register(
        self,
        name: str,
        path: str,
        *,
        lora_B_layout: str | None = None,
        load_inplace: bool = False,
        pinned: bool = False,
    ) -> AdapterInfo:
        """Serve a folder that is read when it is first needed."""

    def unload(self, name: str, *, drain_seconds: float | None = None) -> None: ...

    def list(self) -> list[AdapterInfo]: ...

    def usage(self) -> TierUsage:
        """What each tier holds."""

    def resolve(self, name: str) -> AdapterRef:
        """The newest version of `name`; AdapterNotFoundError if there is none."""

    def chat_template(self, name: str, may_read: bool) -> ChatTemplate | None:
        """Of the newest version of `name`; None: it is to be read first, as `may_read` has it."""

    def hold_newest(self, name: str, version: int | None = None) -> AdapterRef:
        """A living request uses the newest version of `name`: keep its weights, begin to read them.

        Raises AdapterNotFoundError if there is none, AdapterGoneError if it is errored,
        AdapterReplacedError if it is another than `version`, where that is given.
        """

    def drop(self, ref: AdapterRef) -> None:
        """The request that held `ref` has ended."""

    def advance(self, is_idle: bool = False) -> dict[AdapterRef, str]:
        """Called before each step. The versions whose requests cannot go on, with the reason."""

    def acquire(self, ref: AdapterRef) -> int | Wait:
        """Use the slot of `ref` for one sequence: the slot, or why there is none now."""

    def prefetch(self, refs: Iterable[AdapterRef]) -> None:
        """These will be acquired soon."""

    def release(self, ref: AdapterRef) -> None:
        """Undo one `acquire` that returned a slot."""

    def batch_view(
        self, slots: torch.Tensor, logit_slots: torch.Tensor, active: tuple[int, ...]
    ) -> BatchView | None:
        """View of a step: slots [T] and logit_slots [n] int64 on the device, active on the host."""

    def check_integrity(self) -> None:
        """Assert that versions, slots and tables agree."""


class NoAdapters:
    """The manager of an engine with `enable_lora=False`: it knows no adapter and loads none."""

    num_slots = 0

    def __init__(self) -> None:
        self.listing = Listing(threading.RLock(), {})

    def load(self, name: str, path: str | None = None, **options: Any) -> AdapterInfo:
        raise AdapterError(f"cannot load adapter {shown(name)}: this engine has enable_lora=False")

    def register(self, name: str, path: str, **options: Any) -> AdapterInfo:
        return self.load(name, path)

    def unload(self, name: str, *, drain_seconds: float | None = None) -> None:
        raise self._unknown(name)

    def list(self) -> list[AdapterInfo]:
        return []

    def usage(self) -> TierUsage:
        return TierUsage()

    def resolve(self, name: str) -> AdapterRef:
        raise self._unknown(name)

    def chat_template(self, name: str, may_read: bool) -> ChatTemplate | None:
        raise self._unknown(name)

    def hold_newest(self, name: str, version: int | None = None) -> AdapterRef:
        raise self._unknown(name)

    def drop(self, ref: AdapterRef) -> None:
        raise self._unknown(ref.name)

    def advance(self, is_idle: bool = False) -> dict[AdapterRef, str]:
        return {}

    def acquire(self, ref: AdapterRef) -> int | Wait:
        raise self._unknown(ref.name)

    def prefetch(self, refs: Iterable[AdapterRef]) -> None:
        return

    def release(self, ref: AdapterRef) -> None:
        raise self._unknown(ref.name)

    def check_integrity(self) -> None:
        return

    def batch_view(
        self, slots: torch.Tensor, logit_slots: torch.Tensor, active: tuple[int, ...]
    ) -> BatchView | None:
        return None

    def _unknown(self, name: str) -> AdapterNotFoundError:
        return AdapterNotFoundError(f"no adapter {shown(name)}: this engine has enable_lora=False")
