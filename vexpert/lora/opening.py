"""Opening files of an adapter's folder that other people may write to.

Links can be changed at any moment, so a check of a path says nothing about a later open. Below an
allowed root a file is therefore opened from that root downwards, without following any link: what
is open then lies inside, whatever happens meanwhile. Hard links and mounts count as inside.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

from vexpert.errors import AdapterError

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not hang who opens it
_STEP = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

# Of the thread, as the block of `limited` says: every open of a read, however deep, is held to it.
_roots: ContextVar[tuple[Path, ...]] = ContextVar("roots", default=())


def resolved_inside(path: str | Path, roots: Sequence[str]) -> Path | None:
    """`path` with links followed, if that is in one of `roots`; else None. Raises OSError."""
    real = Path(os.path.realpath(path))
    return real if _root_of(real, _resolved(roots)) else None


@contextlib.contextmanager
def limited(folder: Path, roots: Sequence[str]) -> Iterator[None]:
    """Inside the block this thread's `open_file` opens only what lies in one of `roots`.

    But anything for a `folder` whose path, as it is written, begins outside of them: only the
    server's operator can have named it.
    """
    real = _resolved(roots)
    written = Path(os.path.abspath(folder))
    is_below = _root_of(written, (*real, *(Path(os.path.abspath(root)) for root in roots)))
    token = _roots.set(real if is_below else ())
    try:
        yield
    finally:
        _roots.reset(token)


def open_file(path: Path) -> BinaryIO:
    """A regular file, to read. AdapterError for another kind, or outside the block's roots.

    Raises OSError.
    """
    roots = _roots.get()
    descriptor = _open_inside(path, roots) if roots else os.open(path, _READ)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise AdapterError(f"{path} is not a regular file: copy the adapter's own files there")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _resolved(roots: Sequence[str]) -> tuple[Path, ...]:
    return tuple(Path(os.path.realpath(root)) for root in roots)


def _root_of(place: Path, roots: Sequence[Path]) -> Path | None:
    return next((root for root in roots if place.is_relative_to(root)), None)


def _open_inside(path: Path, roots: tuple[Path, ...]) -> int:
    """A descriptor of the file that `path` means, reached from a root without links."""
    real = Path(os.path.realpath(path))
    root = _root_of(real, roots)
    if root is None:
        raise AdapterError(
            f"{path} leads out of the folders that adapters may be read from: copy the file itself"
        )
    try:
        return _descend(root, real.relative_to(root).parts)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):  # a link, where there was none
            raise AdapterError(f"{path} changed while it was opened; load it again") from None
        raise


def _descend(root: Path, parts: Sequence[str]) -> int:
    place = os.open(root, _STEP)
    try:
        for part in parts[:-1]:
            inner = os.open(part, _STEP, dir_fd=place)
            os.close(place)
            place = inner
        return os.open(parts[-1] if parts else ".", _READ | os.O_NOFOLLOW, dir_fd=place)
    finally:
        os.close(place)
