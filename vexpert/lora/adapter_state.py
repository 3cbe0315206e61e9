"""Where the weights of one version are, and what may happen to them next."""

import enum
from dataclasses import dataclass, field

import torch

from vexpert.errors import AdapterGoneError
from vexpert.lora.chat_template import ChatTemplate, shared
from vexpert.lora.info import with_remedy
from vexpert.lora.source import Fingerprint, HostCopy


class State(enum.Enum):
    """Of a version's weights. Whether it was unloaded is another question: `Life.is_retired`."""

    REGISTERED = "registered"  # in its files alone
    LOADING = "loading"  # read now, or waiting for a thread
    HOST = "host"  # packed in host memory
    COPYING = "copying"  # there, and on the way to a slot
    BOTH = "both"  # there, and whole in a slot
    DEVICE = "device"  # in a slot alone
    ERRORED = "errored"  # for good: a new version has to be loaded


class Event(enum.Enum):
    """What changes a state."""

    READ_BEGINS = "read begins"
    READ_ENDS = "read ends"
    READ_IS_GIVEN_UP = "read is given up"
    COPY_BEGINS = "copy begins"
    COPY_ENDS = "copy ends"
    LEAVES_DEVICE = "leaves the device"
    LEAVES_HOST = "leaves the host"
    FAILS = "fails"


# All that may happen: an event in any other state is a fault of ours.
AFTER: dict[Event, dict[State, State]] = {
    Event.READ_BEGINS: {State.REGISTERED: State.LOADING},
    Event.READ_ENDS: {State.LOADING: State.HOST},
    Event.READ_IS_GIVEN_UP: {State.LOADING: State.REGISTERED},
    Event.COPY_BEGINS: {State.HOST: State.COPYING},
    Event.COPY_ENDS: {State.COPYING: State.BOTH},
    Event.LEAVES_DEVICE: {State.BOTH: State.HOST, State.DEVICE: State.REGISTERED},
    Event.LEAVES_HOST: {
        State.HOST: State.REGISTERED,
        State.BOTH: State.DEVICE,
        State.ERRORED: State.ERRORED,  # a read or a copy that failed had its memory already
    },
    # In HOST: adapters that were pinned since it was read leave it too little of the device.
    Event.FAILS: dict.fromkeys((State.LOADING, State.HOST, State.COPYING), State.ERRORED),
}

ON_HOST = frozenset({State.HOST, State.COPYING, State.BOTH})
ON_DEVICE = frozenset({State.BOTH, State.DEVICE})


@dataclass(frozen=True)
class Contents:
    """What is known of a version once it was read, or its template alone."""

    files: Fingerprint
    template: ChatTemplate
    rank: int = 0  # largest of its factors; 0: they were not read yet
    warnings: tuple[str, ...] = ()


@dataclass
class History:
    """Figures that only users read."""

    last_use: float | None = None  # time.time()
    loads: int = 0
    load_seconds: float = 0.0  # of the last one
    evictions: int = 0  # from the device


@dataclass(eq=False)
class Life:
    """All of a version that changes, under the manager's lock. `state` changes by the methods."""

    state: State = State.REGISTERED
    error: str | None = None  # why it is ERRORED
    contents: Contents | None = None  # None: not read yet
    buffer: torch.Tensor | None = None  # [N], the adapters' dtype: host memory; while LOADING too
    host: HostCopy | None = None  # in `buffer`, once it is whole
    slot: int | None = None  # while ON_DEVICE
    device_bytes: int = 0  # of its block there
    holds: int = 0  # living requests
    is_served: bool = False  # its name means it, or did; until then its load may be refused
    is_retired: bool = False  # unloaded or replaced: gone once nobody uses it
    history: History = field(default_factory=History)

    @property
    def host_bytes(self) -> int:
        buffer = self.buffer  # read once: without the lock it may leave meanwhile
        return 0 if buffer is None else buffer.numel() * buffer.element_size()

    @property
    def files(self) -> Fingerprint | None:
        """As first read; None: not read yet. Later reads must find the same."""
        return None if self.contents is None else self.contents.files

    @property
    def is_busy(self) -> bool:
        """Whether something writes to its memory, or is about to."""
        return self.state in (State.LOADING, State.COPYING)

    def read_template(self, template: ChatTemplate, files: Fingerprint) -> None:
        """`template` is known of `files`, unless more is known already."""
        if self.contents is None:
            self.contents = Contents(files, shared(template))

    def begin_read(self) -> None:
        self._apply(Event.READ_BEGINS)

    def end_read(self, host: HostCopy, seconds: float) -> None:
        """`host`, which lies in `buffer`, is whole after `seconds`."""
        self.host = host
        known = self.contents
        template = shared(host.template) if known is None else known.template
        self.contents = Contents(host.files, template, host.packed.rank, host.warnings)
        self.history.loads += 1
        self.history.load_seconds = seconds
        self._apply(Event.READ_ENDS)

    def give_up_read(self) -> None:
        """Before it had host memory: it is in its files alone again."""
        assert self.buffer is None, f"{self.state}: host memory is given back first"
        self._apply(Event.READ_IS_GIVEN_UP)

    def begin_copy(self) -> None:
        self._apply(Event.COPY_BEGINS)

    def end_copy(self, slot: int, nbytes: int) -> None:
        """All of it lies in `slot`, in a block of `nbytes`."""
        self.slot, self.device_bytes = slot, nbytes
        self._apply(Event.COPY_ENDS)

    def leave_device(self) -> None:
        self._apply(Event.LEAVES_DEVICE)
        self.slot, self.device_bytes = None, 0

    def leave_host(self) -> torch.Tensor:
        """Its host memory, which is to be freed."""
        assert self.buffer is not None, f"{self.state}: no host memory"
        self._apply(Event.LEAVES_HOST)
        buffer, self.buffer, self.host = self.buffer, None, None
        return buffer

    def fail(self, reason: str) -> None:
        """Its requests end with `reason`. Host memory, if any, is its own until `leave_host`."""
        self.error = reason
        self._apply(Event.FAILS)

    def gone(self) -> AdapterGoneError:
        """What its requests are told once it is ERRORED: the first as the last."""
        assert self.error is not None, f"{self.state}: no error"
        return AdapterGoneError(with_remedy(self.error))

    def _apply(self, event: Event) -> None:
        after = AFTER[event].get(self.state)
        assert after is not None, f"{event} while {self.state}"
        self.state = after

    def check_integrity(self) -> None:
        """Assert that the fields say what the state says."""
        assert (self.slot is not None) == (self.state in ON_DEVICE), (self.state, self.slot)
        assert not self.device_bytes or self.slot is not None, f"{self.device_bytes} bytes nowhere"
        assert (self.error is not None) == (self.state is State.ERRORED), (self.state, self.error)
        assert (self.host is not None) == (self.state in ON_HOST), (self.state, self.host)
        holds_memory = self.state in ON_HOST or self.state is State.LOADING
        assert self.buffer is None or holds_memory, f"{self.state} holds host memory"
        assert self.holds >= 0, f"{self.holds} holds"
