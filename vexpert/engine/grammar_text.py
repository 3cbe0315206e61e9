"""Grammars that the compiler makes of JSON schemas, changed where they would say too much."""

import re
from typing import Any

from vexpert.engine.grammar_objects import factored

# One character of a string with a length: the compiler lets tabs and other control characters in.
COUNTED = re.compile(r'(?m)^(\w+ ::= )\(\(\[\^\\"\\\\\\r\\n\]\)\)$')
PLAIN = r"(([^\0-\x1f\"\\]))"


def compile_schema(compiler: Any, text: str, **options: Any) -> Any:
    """The compiled grammar of a schema in the form of `compiled_form`.

    A length stays a count of the grammar: spelled out in a pattern, its cost has no bound.
    """
    import xgrammar

    return compiler.compile_grammar(_changed(xgrammar.Grammar.from_json_schema(text, **options)))


def compile_tag(compiler: Any, text: str) -> Any:
    """The compiled grammar of a structural tag, the same changes made to its schemas."""
    import xgrammar

    return compiler.compile_grammar(_changed(xgrammar.Grammar.from_structural_tag(text)))


def _changed(grammar: Any) -> str:
    """As text; the characters that a length counts are those that a JSON string may hold."""
    return factored(COUNTED.sub(lambda found: found[1] + PLAIN, str(grammar)))
