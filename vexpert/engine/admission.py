"""Who starts next: a policy in plain Python, which needs no engine to be tried.

Requests ask in order of arrival, or in shares by tenant where weights are given. One whose adapter
has no room is passed by others whose adapters are there, which groups the running batch by adapter;
but not for ever:

**A request that was refused for want of room is passed by at most `max_passed` newer requests with
adapters over its whole wait. After that no newer one starts before it.** It then starts at the
latest when the requests that ran at that moment, and the older ones that wait, have ended.

Not counted: requests of the base model, which need no room; the time until an adapter's weights
have come from the disk; and waiting for one's own adapter's cap (`max_running`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from vexpert.config import shown
from vexpert.errors import ConfigError
from vexpert.lora.json_files import parse_json
from vexpert.lora.types import AdapterRef, Wait

MAX_PASSED = 64
WINDOW = 1024  # of the waiting requests, the oldest that may ask in one step


class Asking(Protocol):
    """A request that waits."""

    arrival: int  # smaller is older
    times_passed: int
    share_tag: float  # place in the order of shares; set by `Admission.add`

    @property
    def adapter(self) -> AdapterRef | None:
        """None: the base model."""


R = TypeVar("R", bound=Asking)


def tenant_of(adapter: AdapterRef | None) -> str:
    """Whose share a request counts to: the part of its adapter's name before "/", or all of it."""
    return "" if adapter is None else adapter.name.partition("/")[0]


def parse_weights(text: str | None) -> dict[str, float]:
    """Shares by tenant from the option lora_weights. ConfigError if it is none."""
    if not text:
        return {}
    try:
        weights = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"lora_weights={shown(text)}: not JSON ({error})") from None
    if not isinstance(weights, dict) or not all(_is_weight(w) for w in weights.values()):
        raise ConfigError(
            f'lora_weights={shown(text)}: give numbers above 0 by name, such as {{"team": 2}}'
        )
    return {name: float(weight) for name, weight in weights.items()}


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


class Admission:
    """What the policy remembers between steps."""

    def __init__(
        self,
        max_passed: int = MAX_PASSED,
        max_running: int | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.max_passed = max_passed
        self.max_running = max_running
        self.weights = dict(weights or {})
        self.running: Counter[AdapterRef] = Counter()
        self._virtual_time = 0.0
        self._coming: dict[AdapterRef, Wait] = {}  # answers of the step before, and of this one
        self._last: dict[AdapterRef, Wait] = {}
        self._tenant_end: dict[str, float] = {}  # where each tenant's next request comes in

    def add(self, request: Asking) -> None:
        """`request` begins to wait. Start-time fair queueing: one more of a tenant comes later."""
        if self.weights:
            tenant = tenant_of(request.adapter)
            request.share_tag = max(self._virtual_time, self._tenant_end.get(tenant, 0.0))
            self._tenant_end[tenant] = request.share_tag + 1 / self.weights.get(tenant, 1.0)

    def started(self, request: Asking) -> None:
        """`request` runs from now on."""
        self._virtual_time = max(self._virtual_time, request.share_tag)
        if request.adapter is not None:
            self.running[request.adapter] += 1

    def stopped(self, request: Asking) -> None:
        """`request` runs no more: it ended, or waits again."""
        if request.adapter is not None:
            self.running[request.adapter] -= 1
            if not self.running[request.adapter]:
                del self.running[request.adapter]

    def turns(self, waiting: Sequence[R]) -> "Turns[R]":
        """The turns of one step; `waiting` is sorted by arrival."""
        turns = Turns(self, waiting[:WINDOW])
        self._coming, self._last = self._last, turns.without_slot
        return turns

    def counts(self, request: Asking) -> bool:
        """Whether a request that was not asked in this step is passed by one that starts."""
        adapter = request.adapter
        if adapter is None or self._coming.get(adapter) is Wait.COMING:
            return False
        return not self.is_capped(adapter)

    def is_capped(self, adapter: AdapterRef) -> bool:
        """Whether as many requests of `adapter` run as may."""
        return self.max_running is not None and self.running[adapter] >= self.max_running


class Turns(Generic[R]):
    """One step: iterate, and tell of each request given whether it was refused or admitted."""

    def __init__(self, policy: Admission, waiting: Sequence[R]) -> None:
        self._policy = policy
        self._order = list(waiting)
        if policy.weights:
            self._order.sort(key=self._place)
        self._refused: list[R] = []
        self.without_slot: dict[AdapterRef, Wait] = {}
        self._due: int | None = None  # arrival of the oldest that must not be passed any more
        self._asked = 0

    def _place(self, request: R) -> tuple[bool, float, int]:
        is_due = request.times_passed >= self._policy.max_passed
        return not is_due, request.arrival if is_due else request.share_tag, request.arrival

    def __iter__(self) -> Iterator[R]:
        """Requests that may ask, each when its turn has come."""
        for request in self._order:
            self._asked += 1
            if self._may_ask(request):
                yield request

    def _may_ask(self, request: R) -> bool:
        adapter = request.adapter
        if adapter is None:
            return True
        if self._due is not None and request.arrival > self._due:
            return False
        if adapter in self.without_slot:
            self.refuse(request, self.without_slot[adapter])
            return False
        return not self._policy.is_capped(adapter)

    def refuse(self, request: R, why: Wait) -> None:
        """`request` gets no slot in this step."""
        assert request.adapter is not None
        self.without_slot[request.adapter] = why
        if why is Wait.NO_ROOM:
            self._refused.append(request)
            self._note_due(request)

    def admit(self, request: R) -> None:
        """`request` starts: it passes the older ones that were refused, or were not asked yet."""
        self._policy.started(request)
        if request.adapter is None:
            return
        later = self._order[self._asked :] if self._policy.weights else []
        passed = [r for r in self._refused if r.arrival < request.arrival]
        passed += [r for r in later if r.arrival < request.arrival and self._policy.counts(r)]
        for older in passed:
            older.times_passed += 1
            self._note_due(older)

    def _note_due(self, request: R) -> None:
        if request.times_passed >= self._policy.max_passed:
            due = request.arrival
            self._due = due if self._due is None else min(due, self._due)
