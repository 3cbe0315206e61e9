"""Chat templates that adapters ship in their folders."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vexpert.errors import AdapterError
from vexpert.lora.opening import open_file

MAX_BYTES = 2**20
FILES = ("chat_template.jinja", "tokenizer_config.json")  # the first that has one counts


@dataclass(frozen=True)
class ChatTemplate:
    """What one version of an adapter has of its own: `text`, or why there is none to be used."""

    text: str | None = None
    fault: str | None = None  # of its file, which only requests that need the template hear of
    version: int = field(default=0, compare=False)  # of the adapter, once it has one; 0: none


def shared(template: ChatTemplate) -> ChatTemplate:
    """The same, its text kept once for all adapters that have it: thousands may."""
    return template if template.text is None else ChatTemplate(sys.intern(template.text))


def read_template(folder: Path) -> ChatTemplate:
    """The template in an adapter's folder; never waits for a pipe or a device."""
    for name in FILES:
        try:
            template = _template_of(folder / name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (AdapterError, OSError, ValueError, RecursionError) as error:
            return ChatTemplate(fault=f"{name} cannot be read: {error}")
        if template:
            return ChatTemplate(template)
    return ChatTemplate()


def _template_of(file: Path) -> str | None:
    with open_file(file) as opened:
        content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    text = content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    return text if file.suffix == ".jinja" else _template_in(json.loads(text))


def _template_in(config: Any) -> str | None:
    """The template of a tokenizer_config.json; of several, the one named default."""
    found = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(found, list):
        named = [entry for entry in found if isinstance(entry, dict)]
        default = [entry for entry in named if entry.get("name") == "default"]
        found = default[-1].get("template") if default else None
    return found if isinstance(found, str) else None
