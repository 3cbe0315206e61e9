"""Renderings that left their bounds: what is refused after one, to whom, and for how long.

A template that does so with an ordinary conversation is at fault itself: everybody is refused it.
Else the variables were, and those are the caller's: this one alone is refused the template, with
variables of half their size or more. So each further try takes at most half of the one before.
"""

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


class Refusals:
    """For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._templates, self._sound, self._callers = _Recent(), _Recent(), _Recent()

    def why(self, template: str, caller: str, size: int) -> str | None:
        """Why a rendering is not tried now; None: it may be. `size`: of the task, in characters."""
        with self._lock:
            if self._templates.get(template) is not None:
                return "it left its bounds a moment ago; mend it, or try again in a minute"
            most = self._callers.get(template, caller)
            if most is None or size < most:
                return None
            return "yours made it leave its bounds a moment ago; send less, or wait a minute"

    def is_sound(self, template: str) -> bool:
        """Whether an ordinary conversation was rendered lately."""
        with self._lock:
            return self._sound.get(template) is not None

    def blame_template(self, template: str) -> None:
        with self._lock:
            self._templates.put(0, template)

    def blame_caller(self, template: str, caller: str, size: int) -> None:
        """The template is sound."""
        with self._lock:
            self._sound.put(0, template)
            self._callers.put(size // 2, template, caller)
