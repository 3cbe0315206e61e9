"""One version of a named adapter: where its weights are and who uses it."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vexpert.lora.chat_template import ChatTemplate
from vexpert.lora.source import Fingerprint, HostCopy, Source
from vexpert.lora.types import AdapterInfo, AdapterRef

SHOWN_NAMES = 20


@dataclass(eq=False)
class Version:
    """Changed only under the manager's lock."""

    ref: AdapterRef
    source: Source
    is_pinned: bool = False  # never evicted from the device
    files: Fingerprint | None = None  # as first read; None: not read yet
    rank: int = 0
    warnings: tuple[str, ...] = ()
    template: ChatTemplate | None = None  # as first read; None: not read yet
    # host tier
    buffer: torch.Tensor | None = None  # its host memory, from before it is filled
    host: HostCopy | None = None
    is_loading: bool = False  # read now, or waiting for a loader thread
    # device tier
    slot: int | None = None  # set once its weights are whole there
    is_copying: bool = False
    device_bytes: int = 0  # of its block, while it has a slot
    # users
    holds: int = 0  # living requests
    retired: bool = False  # unloaded or replaced: gone once nobody uses it
    drain_until: float | None = None  # time.monotonic() at which its requests are ended
    error: str | None = None
    last_use: float | None = None  # time.time()
    loads: int = 0
    load_seconds: float = 0.0
    evictions: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its host memory."""
        return 0 if self.buffer is None else self.buffer.numel() * self.buffer.element_size()

    @property
    def state(self) -> str:
        if self.retired:
            return "draining"
        if self.error is not None:
            return "errored"
        if self.slot is not None:
            return "device"
        if self.is_loading:
            return "loading"
        return "registered" if self.host is None else "host"

    @property
    def tier(self) -> str:
        if self.slot is not None:
            return "device"
        return "disk" if self.host is None else "host"

    def info(self) -> AdapterInfo:
        """What users may see. Without the lock it may be a moment old, no more."""
        slot = self.slot
        return AdapterInfo(
            name=self.ref.name,
            version=self.ref.version,
            path=str(self.source),
            state=self.state,
            rank=self.rank,
            host_bytes=self.nbytes,
            device_bytes=self.device_bytes,
            slot=-1 if slot is None else slot,
            error=self.error,
            warnings=self.warnings,
            tier=self.tier,
            pinned=self.is_pinned,
            requests=self.holds,
            last_use=self.last_use,
            loads=self.loads,
            load_seconds=self.load_seconds,
            evictions=self.evictions,
        )


def some_names(names: Iterable[str]) -> str:
    """Names for a message: sorted, and of thousands the first few."""
    known = sorted(names)
    more = f" and {len(known) - SHOWN_NAMES} more" if len(known) > SHOWN_NAMES else ""
    return (", ".join(known[:SHOWN_NAMES]) or "none") + more
