"""Every version that is there, and which of them each name means."""

import itertools
from collections.abc import Iterator, Mapping
from threading import RLock

from vexpert.config import shown
from vexpert.errors import AdapterNameError, AdapterNotFoundError
from vexpert.lora.adapter_version import Version
from vexpert.lora.info import SHOWN_NAMES
from vexpert.lora.listing import Listing
from vexpert.lora.source import Source
from vexpert.lora.types import AdapterRef


class Versions(Mapping[AdapterRef, Version]):
    """The newest version of each name, and retired ones in use. Under `lock`, the manager's."""

    def __init__(self, lock: RLock) -> None:
        self._by_ref: dict[AdapterRef, Version] = {}
        self._newest: dict[str, Version] = {}
        self._loading: dict[str, Source] = {}  # by name; each is of one call alone
        self._numbers = itertools.count(1)
        self.listing = Listing(lock, self._newest)

    def __getitem__(self, ref: AdapterRef) -> Version:
        return self._by_ref[ref]

    def __iter__(self) -> Iterator[AdapterRef]:
        return iter(self._by_ref)

    def __len__(self) -> int:
        return len(self._by_ref)

    @property
    def num_names(self) -> int:
        return len(self._newest)

    def is_loading(self, name: str) -> bool:
        """Whether somebody loads or registers `name` just now."""
        return name in self._loading

    def begin_load(self, name: str, source: Source, load_inplace: bool, pinned: bool) -> Version:
        """A new version of `name`, which nobody else may load until `end_load` with this `source`.

        AdapterNameError where somebody does, or where `name` is there and is not to be replaced.
        """
        if name in self._loading:
            raise AdapterNameError(f"adapter {shown(name)} is being loaded now; wait for it")
        if name in self._newest and not load_inplace:
            raise AdapterNameError(
                f"adapter {name!r} is already loaded from {str(self._newest[name].source)!r}; "
                "unload it first, or pass load_inplace to replace it"
            )
        self._loading[name] = source
        return Version(AdapterRef(name, next(self._numbers)), source, pinned)

    def end_load(self, name: str, source: Source) -> None:
        """Whatever came of it. Harmless where it was refused."""
        if self._loading.get(name) is source:
            del self._loading[name]

    def find(self, name: str) -> Version | None:
        """The newest version of `name`."""
        return self._newest.get(name) if isinstance(name, str) else None

    def newest(self, name: str) -> Version:
        """`find`, with AdapterNotFoundError if there is none."""
        version = self.find(name)
        if version is None:
            known = self.listing.some_names(SHOWN_NAMES, without=())
            raise AdapterNotFoundError(f"no adapter {shown(name, 300)}; loaded adapters: {known}")
        return version

    def add(self, version: Version) -> None:
        """Its name means `version` from now on."""
        self._newest[version.ref.name] = self._by_ref[version.ref] = version
        self.listing.add(version)

    def retire(self, version: Version) -> None:
        """Its name does not mean `version` any more; others may still use it."""
        if self._newest.get(version.ref.name) is version:
            del self._newest[version.ref.name]

    def remove(self, version: Version) -> None:
        """Nobody uses `version`. Harmless where it was never added."""
        if self._by_ref.pop(version.ref, None) is not None:
            self.listing.remove(version)

    def check_integrity(self) -> None:
        """Assert that names, references and the listing agree."""
        assert all(self._by_ref[version.ref] is version for version in self._newest.values())
        self.listing.check_integrity(self._by_ref.values())
