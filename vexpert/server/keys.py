"""API keys from a file."""

from pathlib import Path

from vexpert.errors import ConfigError


def read_keys(file: str) -> dict[str, frozenset[str]]:
    """The models that each key is for; an empty set: all. Raises ConfigError.

    A line holds a key, then names of models, all separated by white space. Empty lines and those
    that begin with # are left out.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file: {file} cannot be read: {error}") from error
    keys: dict[str, frozenset[str]] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words[0] in keys:
            raise ConfigError(f"api_key_file: {file}, line {number}: the key is given twice")
        keys[words[0]] = frozenset(words[1:])
    if not keys:
        raise ConfigError(f"api_key_file: {file} holds no key; write one a line")
    return keys
