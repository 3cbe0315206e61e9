"""What the folder `lora_dir` holds: which folders in it may be adapters, in which state."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vexpert.lora.adapter_config import CONFIG_NAME
from vexpert.lora.source import FILE_TYPES, Fingerprint, file_state

# What says that a folder is not there, or not ours to read. Any other error, such as too many open
# files or a network file system that does not answer, says nothing of what is there.
ABSENT = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG}
)


def leads_back(folder: Path, link: Path) -> bool:
    """Whether `link`, in `folder`, is a link to `folder` itself or to one above it.

    What is in it then has its names already, or is not in `folder` at all.
    """
    return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(link))


class Look(NamedTuple):
    """What a folder holds now."""

    adapters: dict[str, tuple[Path, Fingerprint]]  # by name: its folder, and its files
    unsure: frozenset[Path]  # folders that could not be looked at now: what is there is not known
    loops: frozenset[Path]  # links that lead back: left out

    def may_hold(self, path: Path) -> bool:
        """Whether an adapter that is not found at `path` may be there all the same."""
        return path in self.unsure or path.parent in self.unsure


def look(folder: Path) -> Look:
    """The adapters in `folder`, and those one level further down. Raises OSError for `folder`."""
    loops = frozenset(link for link in _links(folder) if leads_back(folder, link))
    adapters: dict[str, tuple[Path, Fingerprint]] = {}
    unsure: set[Path] = set()
    for entry in _folders(folder, unsure):
        if entry in loops:
            continue
        files = _files(entry, unsure)
        if files:
            adapters[entry.name] = entry, files
            continue
        for inner in _folders_of_tenant(entry, unsure):
            files = _files(inner, unsure)
            if files:
                adapters[f"{entry.name}/{inner.name}"] = inner, files
    return Look(adapters, frozenset(unsure), loops)


@contextlib.contextmanager
def _looking_at(path: Path, unsure: set[Path]) -> Iterator[None]:
    """An OSError ends the block: `path` is not there, or joins `unsure`."""
    try:
        yield
    except OSError as error:
        if error.errno not in ABSENT:
            unsure.add(path)


def _links(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return [folder / e.name for e in entries if not e.name.startswith(".") and e.is_symlink()]


def _folders(folder: Path, unsure: set[Path]) -> list[Path]:
    """Raises OSError for `folder`."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            path = folder / entry.name
            # Of each by itself: one link that leads nowhere says nothing of the others.
            with _looking_at(path, unsure):
                if not entry.name.startswith(".") and entry.is_dir():
                    found.append(path)
    return sorted(found)


def _folders_of_tenant(folder: Path, unsure: set[Path]) -> list[Path]:
    found: list[Path] = []
    with _looking_at(folder, unsure):
        found += _folders(folder, unsure)
    return found


def _files(folder: Path, unsure: set[Path]) -> Fingerprint:
    """Names, sizes and times of an adapter's files; empty: no adapter, or none that is whole."""
    found, names = [], set()
    with _looking_at(folder, unsure):
        with os.scandir(folder) as entries:
            for entry in entries:
                if os.path.splitext(entry.name)[1] in FILE_TYPES:
                    names.add(entry.name)
                    found.append(file_state(entry.name, _stat(entry)))
        has_weights = any(not name.endswith((".json", ".jinja")) for name in names)
        if CONFIG_NAME in names and has_weights:
            return tuple(sorted(found))
    return ()


def _stat(entry: "os.DirEntry[str]") -> os.stat_result:
    """Raises OSError: of kind ESTALE for a file that was replaced since it was listed."""
    try:
        return entry.stat()
    except FileNotFoundError:
        if entry.is_symlink():
            raise  # it leads nowhere, for as long as it is there
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), entry.path) from None
