"""One version of a named adapter: where its weights are and who uses it."""

import threading
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

from vexpert.config import shown
from vexpert.errors import AdapterError
from vexpert.lora.source import Fingerprint, HostCopy
from vexpert.lora.types import AdapterInfo, AdapterRef

MAX_NAME = 256  # characters


@dataclass
class Version:
    """Changed only under the manager's lock; `reading` alone serialises reads of its files."""

    ref: AdapterRef
    path: Path
    lora_b_layout: str | None
    files: Fingerprint
    rank: int
    warnings: tuple[str, ...]
    host: HostCopy | None
    slot: int | None = None
    holds: int = 0  # living requests
    retired: bool = False  # unloaded or replaced: gone once nobody uses it
    error: str | None = None
    last_use: int = 0
    reading: threading.Lock = field(default_factory=threading.Lock)

    @property
    def state(self) -> str:
        if self.retired:
            return "draining"
        if self.error is not None:
            return "errored"
        if self.slot is not None:
            return "device"
        return "registered" if self.host is None else "host"

    def info(self, device_bytes: int) -> AdapterInfo:
        return AdapterInfo(
            name=self.ref.name,
            version=self.ref.version,
            path=str(self.path),
            state=self.state,
            rank=self.rank,
            host_bytes=self.host.packed.nbytes if self.host is not None else 0,
            device_bytes=device_bytes,
            slot=-1 if self.slot is None else self.slot,
            error=self.error,
            warnings=self.warnings,
        )


def check_name(name: str, reserved: frozenset[str]) -> None:
    """Raise AdapterError unless `name` may name an adapter."""
    if not isinstance(name, str):
        raise AdapterError(f"adapter name {shown(name)}: must be a string")
    if len(name) > MAX_NAME:
        raise AdapterError(f"adapter name {shown(name)}: use at most {MAX_NAME} characters")
    if not name or name != name.strip():
        raise AdapterError(f"adapter name {name!r}: must be non-empty, with no space at its ends")
    if any(unicodedata.category(char).startswith("C") for char in name):
        raise AdapterError(f"adapter name {name!r}: must have no control characters")
    if name in reserved:
        raise AdapterError(f"adapter name {name!r} is the base model's: choose another name")
