"""Compiled grammars that are kept, the least recently used of them the shortest."""

import threading
from collections import OrderedDict
from typing import Any

from vexpert.engine.structured_outputs import StructuredOutputs


def key_of(wanted: StructuredOutputs) -> tuple[str, str, bool, bool]:
    """What a compiler is given of a constraint: kind, text, strict, without white space."""
    return wanted.kind, wanted.text, wanted.strict, wanted.disable_any_whitespace


def _whole_key(wanted: StructuredOutputs) -> tuple[Any, ...]:
    """The same, and for which tokens."""
    return *key_of(wanted), wanted.special_tokens


class GrammarCache:
    """At most `limit` bytes of compiled grammars, or one. For any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._grammars: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._bytes = 0

    def get(self, wanted: StructuredOutputs) -> Any:
        """The compiled grammar, or None."""
        key = _whole_key(wanted)
        with self._lock:
            if key in self._grammars:
                self._grammars.move_to_end(key)
            return self._grammars.get(key)

    def put(self, wanted: StructuredOutputs, compiled: Any) -> None:
        """Keep a grammar; others may go."""
        key = _whole_key(wanted)
        with self._lock:
            if key not in self._grammars:
                self._bytes += compiled.memory_size_bytes
            self._grammars[key] = compiled
            while self._bytes > self._limit and len(self._grammars) > 1:
                _, old = self._grammars.popitem(last=False)
                self._bytes -= old.memory_size_bytes
