"""Regular expressions of a config, matched in bounded time."""

import re
import time
from collections.abc import Callable

import regex

from vexpert.config import shown
from vexpert.errors import AdapterError

SECONDS = 5.0  # for all matches of one adapter
MOST_CHARACTERS = 5000  # of one pattern
# Without any of these a pattern has one way to match, and time is linear.
_BRANCHING = frozenset("*+?{|(")
# Read otherwise by `regex`: "{" that is no repeat count (fuzzy matching), and POSIX classes.
_OTHERWISE = re.compile(r"(?<!\\)\{(?!\d+(,\d*)?\}|,\d+\})|\[[\[:]")


class Clock:
    """Time left for patterns that can take very long."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._left = seconds

    def run(self, match: Callable[[float], bool]) -> bool:
        """`match(timeout)`, which raises TimeoutError; its time is taken from what is left."""
        if self._left <= 0:
            raise TimeoutError
        start = time.monotonic()
        try:
            return match(self._left)
        finally:
            self._left -= time.monotonic() - start


class Matcher:
    """One regular expression. AdapterError for a bad one, and for one that takes too long."""

    def __init__(self, field: str, pattern: str, expression: str, clock: Clock) -> None:
        """`expression`: what is matched from a name's start on; `pattern`: what the user wrote."""
        self.field, self.pattern, self._clock = field, pattern, clock
        if len(pattern) > MOST_CHARACTERS:
            raise self._bad(f"at most {MOST_CHARACTERS} characters")
        if _OTHERWISE.search(pattern):
            raise self._bad("without { that is no repeat count, without [: and without [[")
        try:
            self._plain = re.compile(expression)
        except (re.error, OverflowError, RecursionError) as error:
            raise self._bad(f"a regular expression ({error})") from None
        # Thousands of whole names for thousands of modules are fast by their last letters.
        is_name = re.fullmatch(r"[\w.]*?(\w+)", pattern)
        self._tail = is_name[1] if is_name else ""
        self._timed: regex.Pattern[str] | None = None
        if not _BRANCHING.isdisjoint(pattern):
            self._timed = self._compile(expression)

    def matches(self, name: str) -> bool:
        """What `re.match` says of `name`."""
        timed = self._timed
        if not name.endswith(self._tail):
            return False
        if timed is None:
            return self._plain.match(name) is not None

        def match(timeout: float) -> bool:
            return timed.match(name, timeout=timeout, concurrent=True) is not None

        try:
            return self._clock.run(match)
        except TimeoutError:
            raise self._bad(
                f"a pattern that is matched in bounded time: on {name} it takes too long; write it "
                "without repeats inside repeats"
            ) from None

    def _compile(self, expression: str) -> "regex.Pattern[str]":
        """The same with a time limit, which `re` has not."""
        try:
            return regex.compile(expression, regex.V0)
        except (regex.error, OverflowError, RecursionError, MemoryError) as error:
            raise self._bad(f"a regular expression ({error})") from None

    def _bad(self, wanted: str) -> AdapterError:
        return AdapterError(
            f"adapter_config.json: {self.field}={shown(self.pattern)}: must be {wanted}"
        )
