"""What is told of adapters: plain figures, which need no torch."""

from dataclasses import dataclass
from typing import NamedTuple

USABLE = ("registered", "loading", "host", "device")
UNUSABLE = ("errored", "draining")  # states of adapters that no new request may use
SHOWN_NAMES = 20  # in a message; more are counted
EXAMINED_FOR_NAMES = 200  # names that are examined for it, of thousands


def with_remedy(error: str) -> str:
    """Why a version cannot serve, and what to do; `error` may say that itself."""
    if "load it again" in error:
        return error
    return (
        f"{error}; once that is mended, load it again with load_inplace (a folder of lora_dir is "
        "taken anew by itself)"
    )


@dataclass(frozen=True)
class AdapterInfo:
    """What users may see of an adapter."""

    name: str
    version: int
    path: str  # "from memory" where there are no files
    state: str  # registered, loading, host, device, errored, draining
    rank: int  # largest rank of its factors; 0 before its first read
    host_bytes: int  # what its host copy takes; 0: there is none
    device_bytes: int  # what it takes in the arena, extras included; 0: it is not there
    slot: int  # -1: not on the device
    error: str | None = None
    warnings: tuple[str, ...] = ()
    tier: str = "disk"  # device, host or disk: the fastest place that has its weights
    pinned: bool = False  # stays on the device once there
    requests: int = 0  # that wait or run
    last_use: float | None = None  # seconds since the epoch, when a request last began or ended
    loads: int = 0  # reads from disk, or from memory
    load_seconds: float = 0.0  # of the last of them: read, checked and packed
    evictions: int = 0  # from the device


class AdapterPage(NamedTuple):
    """Some of all adapters, by name and version; all versions of a name are on one page."""

    infos: list[AdapterInfo]
    last: str | None  # the name to go on after; None: no more follow


class ListedNames(NamedTuple):
    """Some of all names, for a message."""

    names: list[str]
    more: int  # that are not told; 0 or less: none

    def __str__(self) -> str:
        more = f" and {self.more} more" if self.more > 0 else ""
        return (", ".join(self.names) or "none") + more


@dataclass(frozen=True)
class TierUsage:
    """Bytes and adapters in each tier."""

    known: int = 0  # adapters by name
    device_bytes: int = 0  # budget
    device_used: int = 0  # blocks in use
    device_payload: int = 0  # of them, weights; the rest is padding
    device_adapters: int = 0
    host_bytes: int = 0  # budget
    host_used: int = 0
    host_adapters: int = 0
    loading: int = 0  # adapters that are read, or wait for a loader thread
    loads: int = 0  # counters, which only grow
    load_seconds: float = 0.0
    errors: int = 0
    evictions: int = 0  # from the device

    @property
    def waste(self) -> float:
        """Share of the blocks in use that is padding."""
        return 1 - self.device_payload / self.device_used if self.device_used else 0.0
