"""Versions of adapters in the order of their names: few of thousands cost a look at few."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from threading import RLock

from vexpert.lora.adapter_version import Version
from vexpert.lora.info import EXAMINED_FOR_NAMES, UNUSABLE, AdapterInfo, AdapterPage, ListedNames

EXAMINED = 2000  # versions that one page looks at: about a millisecond, whatever it looks for


class Listing:
    """Every version that is there, retired ones in use too. Any thread."""

    def __init__(self, lock: RLock, newest: Mapping[str, Version]) -> None:
        """`lock`: the manager's, under which `newest` changes: the newest version of each name."""
        self._lock, self._newest = lock, newest
        self._order: list[Version] = []  # by name, then version

    def add(self, version: Version) -> None:
        """`version`, which is not there yet."""
        insort(self._order, version, key=_place)

    def remove(self, version: Version) -> None:
        """`version`, which is there."""
        place = bisect_left(self._order, _place(version), key=_place)
        assert self._order[place] is version, f"{version.ref} is not listed"
        del self._order[place]

    def all(self) -> list[AdapterInfo]:
        """Every version by name, then version. Of thousands that takes a while."""
        with self._lock:
            versions = self._order.copy()
        return [version.info() for version in versions]

    def named(self, names: Iterable[str]) -> list[AdapterInfo]:
        """All versions of `names`, in the order given."""
        with self._lock:
            return [version.info() for name in names for version in self._of(name)]

    def page(
        self, after: str | None, most: int, states: frozenset[str] = frozenset(), part: str = ""
    ) -> AdapterPage:
        """Of the names behind `after` the first `most` with a version in `states`.

        No states: any. `part`: of the name, in lower case. A look at EXAMINED versions may end the
        page before.
        """
        with self._lock:
            found, last = self._page(after, most, states, part)
            return AdapterPage([version.info() for version in found], last)

    def _page(
        self, after: str | None, most: int, states: frozenset[str], part: str
    ) -> tuple[list[Version], str | None]:
        found: list[Version] = []
        names, last = set[str](), None
        start = 0 if after is None else bisect_right(self._order, after, key=_name)
        for place in range(start, len(self._order)):
            version = self._order[place]
            name = version.ref.name
            if name != last and (place - start >= EXAMINED or len(names) == most):
                return found, last
            last = name
            if (not part or part in name.lower()) and (not states or version.shown_state in states):
                found.append(version)
                names.add(name)
        return found, None

    def some_names(self, most: int, without: Collection[str] = UNUSABLE) -> ListedNames:
        """The first `most` names whose newest version is in none of the states `without`.

        Of very many only the first are looked at; the others count as if they were.
        """
        with self._lock:
            states = [
                (version.ref.name, version.shown_state)
                for version in self._order[:EXAMINED_FOR_NAMES]
                if not version.life.is_retired
            ]
            names = [name for name, state in states if state not in without]
            left_out = len(states) - len(names)
            return ListedNames(names[:most], len(self._newest) - left_out - len(names[:most]))

    def check_integrity(self, versions: Collection[Version]) -> None:
        """Assert that the listing holds `versions`, in order."""
        assert self._order == sorted(versions, key=_place), "the listing of adapters is wrong"

    def _of(self, name: str) -> Iterator[Version]:
        for place in range(bisect_left(self._order, name, key=_name), len(self._order)):
            if self._order[place].ref.name != name:
                return
            yield self._order[place]


def _name(version: Version) -> str:
    return version.ref.name


def _place(version: Version) -> tuple[str, int]:
    return version.ref.name, version.ref.version
