"""What the engine asks of an adapter manager, and the manager of an engine without adapters."""

from typing import Protocol

import torch

from vexpert.errors import AdapterError, AdapterNotFoundError
from vexpert.lora.types import AdapterInfo, AdapterRef, BatchView


class AdapterSource(Protocol):
    """Adapters by name and version, and the slots that running sequences pin.

    A (name, version) means the same weights for the life of the process: KV blocks are keyed by it.
    """

    def load(
        self,
        name: str,
        path: str,
        *,
        lora_B_layout: str | None = None,
        load_inplace: bool = False,
    ) -> AdapterInfo: ...

    def unload(self, name: str) -> None: ...

    def list(self) -> list[AdapterInfo]: ...

    def resolve(self, name: str) -> AdapterRef:
        """The newest version of `name`; AdapterNotFoundError if there is none."""

    def hold(self, ref: AdapterRef) -> None:
        """A living request uses `ref`: keep its weights."""

    def drop(self, ref: AdapterRef) -> None:
        """The request that held `ref` has ended."""

    def acquire(self, ref: AdapterRef) -> int | None:
        """Pin `ref` in a slot for one sequence and return the slot; None: none is free now."""

    def release(self, ref: AdapterRef) -> None:
        """Undo one `acquire` that returned a slot."""

    def batch_view(
        self, slots: torch.Tensor, logit_slots: torch.Tensor, active: tuple[int, ...]
    ) -> BatchView | None:
        """View of a step: slots [T] and logit_slots [n] int64 on the device, active on the host."""


class NoAdapters:
    """The manager of an engine with `enable_lora=False`: it knows no adapter and loads none."""

    def load(
        self,
        name: str,
        path: str,
        *,
        lora_B_layout: str | None = None,
        load_inplace: bool = False,
    ) -> AdapterInfo:
        raise AdapterError(f"cannot load adapter {name!r}: this engine has enable_lora=False")

    def unload(self, name: str) -> None:
        raise self._unknown(name)

    def list(self) -> list[AdapterInfo]:
        return []

    def resolve(self, name: str) -> AdapterRef:
        raise self._unknown(name)

    def hold(self, ref: AdapterRef) -> None:
        raise self._unknown(ref.name)

    def drop(self, ref: AdapterRef) -> None:
        raise self._unknown(ref.name)

    def acquire(self, ref: AdapterRef) -> int | None:
        raise self._unknown(ref.name)

    def release(self, ref: AdapterRef) -> None:
        raise self._unknown(ref.name)

    def batch_view(
        self, slots: torch.Tensor, logit_slots: torch.Tensor, active: tuple[int, ...]
    ) -> BatchView | None:
        return None

    def _unknown(self, name: str) -> AdapterNotFoundError:
        return AdapterNotFoundError(f"no adapter {name!r}: this engine has enable_lora=False")
