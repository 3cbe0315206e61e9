"""API keys: which are usable, and those of a file."""

from collections.abc import Collection, Iterable
from pathlib import Path

from vexpert.errors import ConfigError
from vexpert.log import get_logger

METRICS = "/metrics"  # stands in a key's list for that path; no model is named so
logger = get_logger(__name__)


def check_keys(keys: Iterable[str]) -> None:
    """Raise ConfigError, which tells no key, unless each is one word."""
    for key in keys:
        if key.split() != [key] or not key.isprintable():
            what = "has white space or control characters in it" if key.strip() else "is empty"
            remedy = "write one word for each, or leave the option out to serve without keys"
            raise ConfigError(f"api_key: a key {what}; {remedy}")


def read_keys(file: str) -> dict[str, frozenset[str]]:
    """The models that each key is for; an empty set: all. Raises ConfigError.

    A line holds a key, then names of models, or METRICS, all separated by white space. Empty lines
    and those that begin with # are left out.
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
        fault = _fault(words, keys)
        if fault is not None:
            raise ConfigError(f"api_key_file: {file}, line {number}: {fault}")
        keys[words[0]] = frozenset(words[1:])
    if not keys:
        raise ConfigError(f"api_key_file: {file} holds no key; write one a line")
    return keys


def _fault(words: list[str], keys: Collection[str]) -> str | None:
    """What is wrong with the words of one line; None: nothing."""
    if words[0] in keys:
        return "the key is given twice"
    if any("," in name for name in words[1:]):
        return "a comma in the names of models; separate them by white space"
    if any(name.startswith("#") for name in words[1:]):
        return "a comment behind a key; give it a line of its own"
    return None


def warn_of_unknown(lists: Iterable[frozenset[str]], known: Collection[str]) -> None:
    """Log the names in the keys' lists that are not in `known`: an adapter may come, or a typo."""
    named = frozenset[str]().union(*lists)
    for name in sorted(named - set(known) - {METRICS}):
        logger.warning("api_key_file: no model is named %r now; its keys wait for one", name)
