"""Chat templates that adapters ship in their folders."""

import json
import stat
from functools import lru_cache
from pathlib import Path
from typing import Any

from vexpert.errors import AdapterError, RequestError
from vexpert.lora.opening import limited, open_file

MAX_BYTES = 2**20
FILES = ("chat_template.jinja", "tokenizer_config.json")  # the first that has one counts


def adapter_template(folder: str, roots: tuple[str, ...] = ()) -> str | None:
    """The template in an adapter's folder, or None. Raises RequestError for a broken file.

    Also for a pipe or a device: to open one may hang the thread that all prompts share; and, where
    the folder lies below one of `roots`, for a file that does not.
    """
    stamps = tuple(_stamp(Path(folder) / name) for name in FILES)
    return _read(folder, roots, stamps) if any(stamps) else None


def _stamp(file: Path) -> tuple[int, ...] | None:
    """Changes when the file does."""
    try:
        status = file.stat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise _broken(file, "it is not a regular file")
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino


@lru_cache(maxsize=1024)
def _read(
    folder: str, roots: tuple[str, ...], stamps: tuple[tuple[int, ...] | None, ...]
) -> str | None:
    for name, stamp in zip(FILES, stamps, strict=True):
        if stamp is None:
            continue
        file = Path(folder) / name
        if stamp[0] > MAX_BYTES:
            raise _broken(file, f"more than {MAX_BYTES} bytes")
        try:
            with limited(Path(folder), roots), open_file(file) as opened:
                content = opened.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:  # it grew since
                raise _broken(file, f"more than {MAX_BYTES} bytes")
            text = content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
            template = text if name.endswith(".jinja") else _template_in(json.loads(text))
        except (AdapterError, OSError, ValueError, RecursionError) as error:
            raise _broken(file, str(error)) from error
        if template:
            return template
    return None


def _template_in(config: Any) -> str | None:
    """The template of a tokenizer_config.json; of several, the one named default."""
    found = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(found, list):
        named = [entry for entry in found if isinstance(entry, dict)]
        default = [entry for entry in named if entry.get("name") == "default"]
        found = default[-1].get("template") if default else None
    return found if isinstance(found, str) else None


def _broken(file: Path, cause: str) -> RequestError:
    return RequestError(f"the adapter's chat template {file.name} cannot be read: {cause}", "model")
