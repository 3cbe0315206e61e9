"""A weights file's bytes in memory of their own.

First the header alone is read, and held against the file's size; then the bytes are counted; then
they are allocated, and each is read once.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from vexpert.errors import AdapterError
from vexpert.lora.header import HEAD_BYTES, Entry, header_size, parse_header
from vexpert.lora.json_files import check_pointer
from vexpert.lora.opening import open_file
from vexpert.lora.parallel import run_all

READ_BYTES = 8 << 20  # one read
POINTER_BYTES = 100  # of a file that show whether it is a pointer

Book = Callable[[int], None]  # told the bytes that a file will take; raises where there is no room

# Of the thread, as the block of `booking` says: a read, however deep, asks it before it allocates.
_book: ContextVar[Book | None] = ContextVar("book", default=None)


@contextlib.contextmanager
def booking(book: Book | None) -> Iterator[None]:
    """Inside the block this thread calls `book` before it takes memory for a weights file."""
    token = _book.set(book)
    try:
        yield
    finally:
        _book.reset(token)


def book_bytes(nbytes: int) -> None:
    """Ask the block's `book` for memory; raises what it raises."""
    book = _book.get()
    if book is not None:
        book(nbytes)


def read_weights(path: Path) -> tuple[torch.Tensor, tuple[Entry, ...]]:
    """Bytes [N] of a safetensors file, those of its header undefined, and where its tensors lie.

    ValueError for a file that is not what its header says, before any memory is taken; OSError.

    Not a mapping: a file that is cut short while it is mapped, or a disk that fails, would kill the
    process, with every other adapter in it.
    """
    with open_file(path) as file:
        descriptor = file.fileno()
        before = os.fstat(descriptor)
        nbytes = before.st_size
        check_pointer(path, _part(descriptor, 0, min(POINTER_BYTES, nbytes)))
        size = header_size(_part(descriptor, 0, min(HEAD_BYTES, nbytes)), nbytes)
        entries = parse_header(_part(descriptor, HEAD_BYTES, size), nbytes)
        book_bytes(nbytes)
        content = torch.empty(nbytes, dtype=torch.uint8)
        view = content.numpy()
        run_all(
            [
                functools.partial(_fill, descriptor, view[start : start + READ_BYTES], start)
                for start in range(HEAD_BYTES + size, nbytes, READ_BYTES)
            ]
        )
        if _state(os.fstat(descriptor)) != _state(before):
            raise AdapterError(
                f"{path} changed while it was read; load it again once it is written"
            )
    return content, entries


def _part(descriptor: int, start: int, count: int) -> bytes:
    part = bytearray(count)
    _fill(descriptor, memoryview(part), start)
    return bytes(part)


def _fill(descriptor: int, view: Any, start: int) -> None:
    """Read the bytes from `start` on into `view`, a writable buffer."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], start + done)
        if count == 0:
            raise OSError(f"it ended at byte {start + done} while it was read")
        done += count


def _state(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
