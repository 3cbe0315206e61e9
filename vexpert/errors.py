"""Errors a user can cause. Each message says the cause, the value and the remedy."""

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST_WORD = 100  # characters; no name that anybody could mean is longer
LIKENESS = 0.8  # of two words that one may be a slip for, 0 to 1; below, guesses mislead


class VexpertError(ValueError):
    """Base of every error that the caller can mend; a server answers it with a 4xx status."""


class ConfigError(VexpertError):
    """An option is unknown, has a bad value, or contradicts another."""


class ModelError(VexpertError):
    """The base model cannot be served, with the reason."""


class AdapterError(VexpertError):
    """An adapter is refused, unknown, or cannot be loaded or unloaded now."""


class AdapterNameError(AdapterError):
    """An adapter is refused for its name: no adapter may have it, or another has it now."""


class AdapterNotFoundError(AdapterError):
    """No adapter has this name."""


class RequestError(VexpertError):
    """A request is refused before it runs.

    `param` is the request field at fault, or None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class AdapterGoneError(AdapterError):
    """A request cannot run, or not to its end, by no fault of its own.

    Its adapter was unloaded, its files are gone or broken, or there is no room for it now.
    """


class AdapterReplacedError(AdapterError):
    """A prompt was made for a version of an adapter that is not the newest any more."""


class UnsupportedError(VexpertError):
    """No backend can run this operation with this shape, dtype and device."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `word` was meant to be, if any is like it."""
    if len(word) > LONGEST_WORD:  # to compare megabytes takes seconds
        return None
    near = get_close_matches(word, list(known), 1, LIKENESS)
    return near[0] if near else None
