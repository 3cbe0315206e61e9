"""`lora_dir`: every folder of adapters in it is a name; new ones appear, removed ones drain.

Polling, because that works on network file systems too. A folder counts once it looked the same in
two scans: one that is still being copied is left alone.

Who has a name that others load and unload too:

| what happens to a name of the folder | what is served |
|---|---|
| others load it, before its folder came or in its place | theirs, whatever becomes of the folder |
| theirs is unloaded | what the folder holds then, from the next scan on |
| the folder's own is unloaded | nothing, until the folder changes |
"""

import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from vexpert.errors import AdapterError, AdapterNotFoundError
from vexpert.log import get_logger
from vexpert.lora.folder_look import Look, look
from vexpert.lora.source import Fingerprint
from vexpert.lora.types import AdapterRef
from vexpert.lora.watched_folder import check_folder

if TYPE_CHECKING:
    from vexpert.lora.manager import AdapterManager

logger = get_logger(__name__)

REST = 20  # a scan of many folders rests this many times as long as it took: 5% of a core


class Watcher:
    """What `lora_dir` held when last looked at. One thread at a time scans."""

    def __init__(self, manager: "AdapterManager", folder: Path) -> None:
        self._manager = weakref.ref(manager)
        self.folder = folder
        # None: refused, unloaded by others, or it stands behind what others loaded.
        self._served: dict[str, tuple[Fingerprint, AdapterRef | None]] = {}
        self._behind: set[str] = set()  # of them, those to be served once their name is free
        self._pending: dict[str, Fingerprint] = {}  # new or changed in the scan before
        self._lost: deque[tuple[AdapterRef, bool]] = deque()  # since the last scan, by `lose`
        self._unreadable = False
        self._loops: frozenset[Path] = frozenset()  # that the log has told of
        manager.on_loss = self.lose

    def lose(self, ref: AdapterRef, is_replaced: bool) -> None:
        """`ref` is not what its name means any more: replaced, or unloaded. Any thread."""
        self._lost.append((ref, is_replaced))

    def scan(self, is_first: bool = False) -> None:
        """Register what is new, replace what changed, unload what is gone."""
        manager = self._manager()
        self._note_losses()
        found = self._look()
        if manager is None or found is None:
            return
        for name in [name for name in self._served if name not in found.adapters]:
            if not found.may_hold(self.folder / name):
                self._gone(manager, name)
        pending = self._pending
        self._pending = {}
        for name, (path, state) in found.adapters.items():
            if name in self._served and self._served[name][0] == state:
                continue
            if is_first or pending.get(name) == state:
                self._serve(manager, name, path, state)
            else:
                self._pending[name] = state
        for name in sorted(self._behind - self._pending.keys()):
            if _newest(manager, name) is None:
                self._serve(manager, name, self.folder / name, self._served[name][0])

    def start(self, interval: float) -> None:
        """Scan again and again on a thread of its own, as long as the manager lives."""
        arguments = (weakref.ref(self), interval)
        # The manager keeps the watcher, the thread keeps neither.
        threading.Thread(target=_run, args=arguments, name="vexpert-lora-dir", daemon=True).start()

    def _look(self) -> Look | None:
        """What the folder holds; None while it cannot be read: nothing changes then."""
        try:
            found = look(self.folder)
        except OSError as error:
            if not self._unreadable:
                logger.warning("lora_dir %s cannot be read, and is kept: %s", self.folder, error)
            self._unreadable = True
            return None
        self._unreadable = False
        self._tell_loops(found.loops)
        return found

    def _serve(self, manager: "AdapterManager", name: str, path: Path, state: Fingerprint) -> None:
        mine, newest = self._served.get(name, ((), None))[1], _newest(manager, name)
        if manager.is_loading(name):
            self._pending[name] = state  # the next scan sees what came of it
        elif newest is not None and newest != mine:
            self._stand_behind(name, state)
        else:
            self._register(manager, name, path, state, newest)

    def _register(
        self,
        manager: "AdapterManager",
        name: str,
        path: Path,
        state: Fingerprint,
        newest: AdapterRef | None,
    ) -> None:
        """Serve `path` in place of `newest`, unless somebody else was faster."""
        self._behind.discard(name)
        try:
            info = manager.register(name, path, load_inplace=newest is not None)
        except AdapterError as error:
            if manager.is_loading(name) or _newest(manager, name) != newest:
                self._pending[name] = state
                return
            logger.warning("lora_dir: %s is not served: %s", path, error)
            self._served[name] = (state, None)
        else:
            self._served[name] = (state, AdapterRef(name, info.version))

    def _stand_behind(self, name: str, state: Fingerprint) -> None:
        if name not in self._behind:
            logger.info(
                "lora_dir: %s is what was loaded under this name otherwise; once that is unloaded, "
                "its folder is served",
                name,
            )
        self._behind.add(name)
        self._served[name] = (state, None)

    def _note_losses(self) -> None:
        """Leave names alone that others unloaded, stand behind those that they replaced."""
        while self._lost:
            ref, is_replaced = self._lost.popleft()
            state, mine = self._served.get(ref.name, ((), None))
            if ref != mine:
                continue  # not the folder's, or replaced by the folder itself
            if is_replaced:
                self._stand_behind(ref.name, state)
            else:
                logger.info(
                    "lora_dir: %s was unloaded; it is served again once its folder changes",
                    ref.name,
                )
                self._served[ref.name] = (state, None)

    def _tell_loops(self, links: frozenset[Path]) -> None:
        for link in sorted(links - self._loops):
            logger.warning("lora_dir: %s leads back to the folder it is in: left out", link)
        self._loops = links

    def _gone(self, manager: "AdapterManager", name: str) -> None:
        _, mine = self._served.pop(name)
        self._behind.discard(name)
        if mine is not None and manager.unload_version(mine):
            logger.info("lora_dir: %s was removed: its requests finish", name)


def _newest(manager: "AdapterManager", name: str) -> AdapterRef | None:
    """What `name` means now, whoever loaded it."""
    try:
        return manager.resolve(name)
    except AdapterNotFoundError:
        return None


def _run(watcher: "weakref.ref[Watcher]", interval: float) -> None:
    seconds = 0.0
    while True:
        time.sleep(max(interval, REST * seconds))
        alive = watcher()
        if alive is None:
            return
        began = time.perf_counter()
        try:
            alive.scan()
        except Exception:  # this thread is all that looks: it must not end
            logger.exception("lora_dir: a look met an unexpected error; the next one follows")
        seconds = time.perf_counter() - began
        del alive


def watch(manager: "AdapterManager", folder: str, interval: float) -> Watcher:
    """Serve the adapters of `folder`, now and as they come and go. ConfigError: no such folder."""
    watcher = Watcher(manager, check_folder(folder))
    watcher.scan(is_first=True)
    watcher.start(interval)
    return watcher
