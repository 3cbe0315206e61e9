"""Renderings that left their bounds: what is refused after one, to whom, and for how long.

A template that does so with an ordinary conversation is at fault itself: everybody is refused it.
Else the variables were, and those are the caller's: this one alone is refused the template, with
variables of half their size or more. So each further try takes at most half of the one before.
"""

import hashlib
import threading
import time
from collections import OrderedDict

SECONDS = 60.0
REMEMBERED = 1024


class _Recent:
    """Keys with a number, each for SECONDS; the oldest go first where there are too many."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[str, ...], tuple[float, int]] = OrderedDict()

    def get(self, *key: str) -> int | None:
        until, number = self._found.get(key, (0.0, 0))
        return number if until > time.monotonic() else None

    def put(self, number: int, *key: str) -> None:
        self._found[key] = time.monotonic() + SECONDS, number
        self._found.move_to_end(key)
        if len(self._found) > REMEMBERED:
            self._found.popitem(last=False)


def name_of(template: str) -> str:
    """A short name of a template, which may have a megabyte."""
    return hashlib.sha256(template.encode("utf-8", "surrogatepass")).hexdigest()


class Refusals:
    """For any thread. Templates go by `name_of`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._templates, self._sound, self._callers = _Recent(), _Recent(), _Recent()

    def why(self, name: str, caller: str, size: int) -> str | None:
        """Why a rendering is not tried now; None: it may be. `size`: characters of variables."""
        with self._lock:
            if self._templates.get(name) is not None:
                return "it left its bounds a moment ago; mend it, or try again in a minute"
            most = self._callers.get(name, caller)
            if most is None or size < most:
                return None
            return "yours made it leave its bounds a moment ago; send less, or wait a minute"

    def is_sound(self, name: str) -> bool:
        """Whether an ordinary conversation was rendered lately."""
        with self._lock:
            return self._sound.get(name) is not None

    def blame_template(self, name: str) -> None:
        """It leaves its bounds with an ordinary conversation."""
        with self._lock:
            self._templates.put(0, name)

    def blame_caller(self, name: str, caller: str, size: int) -> None:
        """The template is sound; the variables of `caller` were too much."""
        with self._lock:
            self._sound.put(0, name)
            before = self._callers.get(name, caller)
            half = size // 2
            self._callers.put(half if before is None else min(half, before), name, caller)
