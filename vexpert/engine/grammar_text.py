"""Grammars that the compiler makes of JSON schemas, changed where they would say too much."""

import re
from typing import Any

from vexpert.engine.grammar_objects import factored

# One character of a string with a length: the compiler lets tabs and other control characters in.
COUNTED = re.compile(r'(?m)^(\w+ ::= )\(\(\[\^\\"\\\\\\r\\n\]\)\)$')
# One of other strings: as all negations, it lets bytes in that would be halves of surrogates.
FREE = r"[^\0-\x1f\"\\\r\n]"
OF_TOKENS = re.compile(r'"(?:token|(?:exclude|trigger)_tokens)":\[?(?:\d+,)*"|"token_dispatch"')
PLAIN = r"[^\0-\x1f\"\\\ud800-\udfff]"


def compile_schema(compiler: Any, text: str, **options: Any) -> Any:
    """The compiled grammar of a schema in the form of `compiled_form`.

    A length stays a count of the grammar: spelled out in a pattern, its cost has no bound.
    """
    import xgrammar

    return compiler.compile_grammar(_changed(xgrammar.Grammar.from_json_schema(text, **options)))


def compile_tag(compiler: Any, text: str) -> Any:
    """The compiled grammar of a structural tag, the same changes made to its schemas.

    But for tags that name tokens by their text: only the compiler itself knows these.
    """
    import xgrammar

    if OF_TOKENS.search(text):
        return compiler.compile_structural_tag(text)
    return compiler.compile_grammar(_changed(xgrammar.Grammar.from_structural_tag(text)))


def _changed(grammar: Any) -> str:
    """As text; the characters of strings are those that a JSON string may hold."""
    text = COUNTED.sub(lambda found: f"{found[1]}(({PLAIN}))", str(grammar))
    return factored(text.replace(FREE, PLAIN))
