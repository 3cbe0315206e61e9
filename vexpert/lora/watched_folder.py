"""The folder `lora_dir`: what it must be. Read by the command line, so it imports little."""

import os
from pathlib import Path

from vexpert.config import EngineConfig
from vexpert.errors import ConfigError


def check_lora_dir(config: EngineConfig) -> None:
    """ConfigError for a lora_dir that cannot be served; needs no model."""
    if config.lora_dir is not None:
        if not config.enable_lora:
            raise ConfigError("lora_dir is given with enable_lora=False; leave one of them out")
        check_folder(config.lora_dir)


def check_folder(folder: str) -> Path:
    """`folder` as a Path; ConfigError if there is none, or it may not be looked into."""
    path = Path(folder)
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError):  # a folder above may not be searched; no name of a file
        is_folder = False
    if not is_folder:
        raise ConfigError(f"lora_dir={folder!r}: no such folder; create it first, it may be empty")
    if not os.access(path, os.R_OK | os.X_OK):
        raise ConfigError(
            f"lora_dir={folder!r}: the folder may not be read; give the server's user the right to"
        )
    return path
