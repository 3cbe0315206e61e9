"""`lora_dir`: every folder of adapters in it is a name; new ones appear, removed ones drain.

Polling, because that works on network file systems too. A folder counts once it looked the same in
two scans: one that is still being copied is left alone. Names that were loaded otherwise are not
touched.
"""

import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vexpert.errors import AdapterError, AdapterNotFoundError, ConfigError
from vexpert.log import get_logger
from vexpert.lora.adapter_config import CONFIG_NAME
from vexpert.lora.source import FILE_TYPES, Fingerprint, file_state
from vexpert.lora.types import AdapterRef

if TYPE_CHECKING:
    from vexpert.lora.manager import AdapterManager

logger = get_logger(__name__)

REST = 20  # a scan of many folders rests this many times as long as it took: 5% of a core


class Watcher:
    """What `lora_dir` held when last looked at. One thread at a time scans."""

    def __init__(self, manager: "AdapterManager", folder: Path) -> None:
        self._manager = weakref.ref(manager)
        self.folder = folder
        self._served: dict[str, tuple[Fingerprint, AdapterRef | None]] = {}  # None: refused
        self._pending: dict[str, Fingerprint] = {}  # new or changed in the scan before
        self._unreadable = False

    def scan(self, is_first: bool = False) -> None:
        """Register what is new, replace what changed, unload what is gone."""
        manager = self._manager()
        found = self._look()
        if manager is None or found is None:
            return
        for name in [name for name in self._served if name not in found]:
            self._gone(manager, name)
        pending = self._pending
        self._pending = {}
        for name, (path, state) in found.items():
            if name in self._served and self._served[name][0] == state:
                continue
            if is_first or pending.get(name) == state:
                self._serve(manager, name, path, state)
            else:
                self._pending[name] = state

    def start(self, interval: float) -> None:
        """Scan again and again on a thread of its own, as long as the manager lives."""
        arguments = (weakref.ref(self), interval)
        # The manager keeps the watcher, the thread keeps neither.
        threading.Thread(target=_run, args=arguments, name="vexpert-lora-dir", daemon=True).start()

    def _look(self) -> dict[str, tuple[Path, Fingerprint]] | None:
        """Adapter folders by name; None while the folder cannot be read: nothing changes then."""
        try:
            found = {name: (path, files) for name, path, files in _adapters(self.folder)}
        except OSError as error:
            if not self._unreadable:
                logger.warning("lora_dir %s cannot be read, and is kept: %s", self.folder, error)
            self._unreadable = True
            return None
        self._unreadable = False
        return found

    def _serve(self, manager: "AdapterManager", name: str, path: Path, state: Fingerprint) -> None:
        mine = self._served.get(name, ((), None))[1]
        try:
            info = manager.register(name, path, load_inplace=_is_current(manager, mine))
        except AdapterError as error:
            logger.warning("lora_dir: %s is not served: %s", path, error)
            self._served[name] = (state, None)
        else:
            self._served[name] = (state, AdapterRef(name, info.version))

    def _gone(self, manager: "AdapterManager", name: str) -> None:
        _, mine = self._served.pop(name)
        if _is_current(manager, mine):
            logger.info("lora_dir: %s was removed: its requests finish", name)
            manager.unload(name)


def _is_current(manager: "AdapterManager", ref: AdapterRef | None) -> bool:
    """Whether `ref` is what its name means now: not unloaded, nor loaded anew by somebody else."""
    try:
        return ref is not None and manager.resolve(ref.name) == ref
    except AdapterNotFoundError:
        return False


def _adapters(folder: Path) -> Iterator[tuple[str, Path, Fingerprint]]:
    """(name, path, files) of the adapters in `folder`, and of those one level further down."""
    for entry in _folders(folder):
        files = _files(entry)
        if files:
            yield entry.name, entry, files
            continue
        for inner in _folders_of_tenant(entry):
            files = _files(inner)
            if files:
                yield f"{entry.name}/{inner.name}", inner, files


def _folders(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if not e.name.startswith(".") and e.is_dir()]
    return [folder / name for name in sorted(names)]


def _folders_of_tenant(folder: Path) -> list[Path]:
    try:
        return _folders(folder)
    except OSError:
        return []  # removed meanwhile, or not ours to read: the others go on


def _files(folder: Path) -> Fingerprint:
    """Names, sizes and times of an adapter's files; empty: no adapter, or none that is whole."""
    found, names = [], set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if os.path.splitext(entry.name)[1] in FILE_TYPES:
                    stat = entry.stat()
                    names.add(entry.name)
                    found.append(file_state(entry.name, stat))
    except OSError:
        return ()  # removed while it was looked at, or not ours to read
    has_weights = any(not name.endswith((".json", ".jinja")) for name in names)
    return tuple(sorted(found)) if CONFIG_NAME in names and has_weights else ()


def _run(watcher: "weakref.ref[Watcher]", interval: float) -> None:
    seconds = 0.0
    while True:
        time.sleep(max(interval, REST * seconds))
        alive = watcher()
        if alive is None:
            return
        began = time.perf_counter()
        alive.scan()
        seconds = time.perf_counter() - began
        del alive


def check_folder(folder: str) -> Path:
    """`folder` as a Path; ConfigError if there is none."""
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"lora_dir={folder!r}: no such folder; create it first, it may be empty")
    return path


def watch(manager: "AdapterManager", folder: str, interval: float) -> Watcher:
    """Serve the adapters of `folder`, now and as they come and go. ConfigError: no such folder."""
    watcher = Watcher(manager, check_folder(folder))
    watcher.scan(is_first=True)
    watcher.start(interval)
    return watcher
