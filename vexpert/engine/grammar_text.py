"""Grammars that the compiler makes of JSON schemas, changed where they would say too much."""

import re
from typing import Any

# One character of a string with a length: the compiler lets tabs and other control characters in.
COUNTED = re.compile(r'(?m)^(\w+ ::= )\(\(\[\^\\"\\\\\\r\\n\]\)\)$')
PLAIN = r"(([^\0-\x1f\"\\]))"
LENGTHS = ('"minLength"', '"maxLength"')


def compile_schema(compiler: Any, text: str, **options: Any) -> Any:
    """The compiled grammar of a schema in the form of `compiled_form`.

    A length stays a count of the grammar: spelled out in a pattern, its cost has no bound.
    """
    import xgrammar

    if not _has_lengths(text):
        return compiler.compile_json_schema(text, **options)
    return compiler.compile_grammar(_exact(xgrammar.Grammar.from_json_schema(text, **options)))


def compile_tag(compiler: Any, text: str) -> Any:
    """The compiled grammar of a structural tag, the lengths in its schemas kept as well."""
    import xgrammar

    if not _has_lengths(text):
        return compiler.compile_structural_tag(text)
    return compiler.compile_grammar(_exact(xgrammar.Grammar.from_structural_tag(text)))


def _has_lengths(text: str) -> bool:
    return any(keyword in text for keyword in LENGTHS)


def _exact(grammar: Any) -> str:
    """As text; the characters that a length counts are those that a JSON string may hold."""
    return COUNTED.sub(lambda found: found[1] + PLAIN, str(grammar))
