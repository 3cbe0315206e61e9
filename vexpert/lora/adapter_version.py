"""One version of a named adapter: what it is, and what has become of it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from vexpert.errors import AdapterReplacedError
from vexpert.lora.adapter_state import ON_DEVICE, ON_HOST, Life
from vexpert.lora.info import SHOWN_NAMES, ListedNames
from vexpert.lora.source import Source
from vexpert.lora.types import AdapterInfo, AdapterRef


@dataclass(frozen=True, eq=False)
class Version:
    """A name's weights at one time: always the same ones. What changes is in `life`."""

    ref: AdapterRef
    source: Source
    is_pinned: bool = False  # never evicted from the device
    life: Life = field(default_factory=Life)

    @property
    def shown_state(self) -> str:
        """What users are told: one word, the most telling."""
        state = self.life.state
        if self.life.is_retired:
            return "draining"
        if state in ON_DEVICE:
            return "device"
        return "host" if state in ON_HOST else state.value

    @property
    def tier(self) -> str:
        """The fastest place that has its weights."""
        state = self.life.state
        if state in ON_DEVICE:
            return "device"
        return "host" if state in ON_HOST else "disk"

    def info(self) -> AdapterInfo:
        """What users may see. Without the lock it may be a moment old, no more."""
        life = self.life
        slot, contents, history = life.slot, life.contents, life.history
        return AdapterInfo(
            name=self.ref.name,
            version=self.ref.version,
            path=str(self.source),
            state=self.shown_state,
            rank=0 if contents is None else contents.rank,
            host_bytes=life.host_bytes,
            device_bytes=life.device_bytes,
            slot=-1 if slot is None else slot,
            error=life.error,
            warnings=() if contents is None else contents.warnings,
            tier=self.tier,
            pinned=self.is_pinned,
            requests=life.holds,
            last_use=history.last_use,
            loads=history.loads,
            load_seconds=history.load_seconds,
            evictions=history.evictions,
        )


def check_newest(newest: AdapterRef, wanted: int | None) -> None:
    """Raise AdapterReplacedError if `newest` is not the version `wanted`; None: any will do."""
    if wanted not in (None, newest.version):
        raise AdapterReplacedError(
            f"adapter {newest.name!r} was loaded anew while this request's prompt was made; "
            "send it again"
        )


def some_names(names: Iterable[str]) -> str:
    """Names for a message: sorted, and of thousands the first few."""
    known = sorted(names)
    return str(ListedNames(known[:SHOWN_NAMES], len(known) - SHOWN_NAMES))
