"""Who may ask for an adapter slot: passing is allowed, starving is not."""

from vexpert.engine.request import Sequence
from vexpert.lora.types import AdapterRef


class Turns:
    """One step's view of the waiting sequences that got no slot, asked in order of arrival.

    A sequence refused a slot is passed by at most `max_passed` newer sequences with an adapter
    over its whole wait; after that no newer one may ask before it is served. Sequences of the
    base model need no slot and always pass.
    """

    def __init__(self, max_passed: int) -> None:
        self._max_passed = max_passed
        self._refused: list[Sequence] = []
        self._without_slot: set[AdapterRef] = set()
        self._is_due = False

    def may_ask(self, sequence: Sequence) -> bool:
        """Whether to try `sequence` now; it is newer than all that were tried before."""
        if sequence.adapter is None:
            return True
        if self._is_due:
            return False
        if sequence.adapter in self._without_slot:
            self.refuse(sequence)
            return False
        return True

    def refuse(self, sequence: Sequence) -> None:
        """The manager has no slot for the adapter of `sequence` in this step."""
        assert sequence.adapter is not None
        self._without_slot.add(sequence.adapter)
        self._refused.append(sequence)
        self._is_due |= sequence.times_passed >= self._max_passed

    def admit(self, sequence: Sequence) -> None:
        """`sequence` has its slot: it passes all that were refused before."""
        if sequence.adapter is not None:
            for older in self._refused:
                older.times_passed += 1
                self._is_due |= older.times_passed >= self._max_passed
