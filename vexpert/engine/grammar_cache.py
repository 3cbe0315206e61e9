"""Compiled grammars that are kept, the least recently used of them the shortest."""

import threading
from collections import OrderedDict
from typing import Any

from vexpert.engine.structured_outputs import StructuredOutputs

LAZY_SIZES = range(16, 2048)  # states


def key_of(wanted: StructuredOutputs) -> tuple[str, str, bool, bool]:
    """What a compiler is given of a constraint: kind, text, strict, without white space."""
    return wanted.kind, wanted.text, wanted.strict, wanted.disable_any_whitespace


def is_lazy(wanted: StructuredOutputs) -> bool:
    """Whether the masks of a grammar are made as sequences come to its places, not before.

    Open names have a place for each letter of the names that are described, at 30 ms each, and
    sequences come to few of them. With too many names steps would wait too often.
    """
    is_of_schemas = wanted.kind in ("json", "structural_tag")
    return is_of_schemas and wanted.size in LAZY_SIZES and '"propertyNames"' in wanted.text


def _whole_key(wanted: StructuredOutputs) -> tuple[Any, ...]:
    """The same, and for which tokens."""
    return *key_of(wanted), wanted.special_tokens


class GrammarCache:
    """At most `limit` bytes of compiled grammars, or one. For any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._grammars: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

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
            self._grammars[key] = compiled
            sizes = [each.memory_size_bytes for each in self._grammars.values()]  # some grow
            while sum(sizes) > self._limit and len(sizes) > 1:
                self._grammars.popitem(last=False)
                del sizes[0]
