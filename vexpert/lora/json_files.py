"""JSON objects of an adapter folder, read with care for what such a folder may hold."""

import errno
import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from vexpert.config import shown
from vexpert.errors import AdapterError
from vexpert.lora.opening import open_file

# What `stat` says of a link to what is not there, or to itself.
LOST = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})


def check_regular(path: Path) -> None:
    """AdapterError if `path`, links followed, is a pipe, socket or device: to open it may hang.

    A folder passes: the reader's own error says more. Raises OSError as `stat` does, but for a link
    that leads nowhere: the error of a file that is not there would be said of what is.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno in LOST and path.is_symlink():
            raise _lost(path, error) from None
        raise
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise AdapterError(f"{path} is not a regular file: copy the adapter's own files there")


def _lost(link: Path, error: OSError) -> AdapterError:
    leads = "leads back to itself" if error.errno == errno.ELOOP else "is not there"
    return AdapterError(
        f"{link} is a link to {shown(os.readlink(link))}, which {leads}: copy the file itself there"
    )


POINTER = b"version https://git-lfs.github.com/spec/"


def check_pointer(path: Path, head: bytes) -> None:
    """AdapterError where `path`, which begins with `head`, is what git-lfs leaves for a file."""
    if head.startswith(POINTER):
        raise AdapterError(
            f"{path} is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder"
        )


MAX_BYTES = 4 * 2**20  # of a config: one with a pattern for each of 128 experts in 94 layers fits
MAX_INDEX_BYTES = 64 * 2**20  # of an index, which names every tensor


def read_json(path: Path, most: int = MAX_BYTES) -> dict[str, Any]:
    """A JSON object from a file; AdapterError when it is missing, broken, or not an object.

    Also for one of more than `most` bytes: parsed, they take many times that memory.
    """
    try:
        check_regular(path)
        text = _read_text(path, most)
        check_pointer(path, text[:100].encode())
        raw = parse_json(text)
    except AdapterError:
        raise
    except FileNotFoundError:
        raise AdapterError(
            f"{path} is missing: the folder holds no adapter; give the folder that PEFT's "
            "save_pretrained wrote"
        ) from None
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is not valid JSON ({error}); save the adapter again") from None
    if not isinstance(raw, dict):
        raise AdapterError(f"{path} holds a JSON {type(raw).__name__}, not an object")
    return raw


def _read_text(path: Path, most: int) -> str:
    with open_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise AdapterError(
            f"{path} has more than {most} bytes, and such a file has far fewer; save the adapter "
            "again"
        )
    return content.decode("utf-8")


def parse_json(text: str) -> Any:
    """`json.loads`, but a ValueError where an object has one key twice: which counts is unknown."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shown(twice)} is there twice; keep one")
    return found
