"""A checked JSON schema in the form in which the grammar compiler enforces all of it."""

from typing import Any

from vexpert.engine.json_formats import PATTERNS
from vexpert.engine.json_idle import plain
from vexpert.engine.json_numbers import KEYWORDS, enforced
from vexpert.engine.json_objects import is_open, other_names
from vexpert.engine.json_parts import with_inner
from vexpert.engine.regex_parser import MAX_MOST
from vexpert.engine.regex_writer import rewritten_in_json

FORMAT_SIZE = 64  # states of one of the compiler's own
CHARACTERS = 64  # of a value, or of names, that weigh as much as a state


class _Form:
    """Rewrites schemas, and counts their states."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self.size = 0

    def rewrite(self, part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        copy = with_inner(plain(part), self.rewrite)
        self.size += 1
        if "const" in copy or "enum" in copy:
            self.size += len(str(copy.get("const", copy.get("enum")))) // CHARACTERS
            return copy
        for change in (self._text, self._names, self._counts):
            change(copy)
        return self._numbers(copy)

    def _text(self, copy: dict[str, Any]) -> None:
        """Lengths stay: see engine/grammar_text.py."""
        if copy.get("minLength") == 0:
            del copy["minLength"]
        if copy.get("maxLength", 0) >= MAX_MOST:
            del copy["maxLength"]
        if copy.get("format") in PATTERNS:
            copy["pattern"] = PATTERNS[copy.pop("format")]
        if "pattern" in copy:
            copy["pattern"], size = rewritten_in_json(copy["pattern"])
            self.size += size
        self.size += FORMAT_SIZE * ("format" in copy)

    def _names(self, copy: dict[str, Any]) -> None:
        """Names that are left open are none of those that the schema names, written in any way."""
        patterns = copy.get("patternProperties")
        if patterns:
            written = {rewritten_in_json(name): value for name, value in patterns.items()}
            copy["patternProperties"] = {name: value for (name, _), value in written.items()}
            self.size += sum(size for _, size in written)
        elif copy.get("properties") and is_open(copy, self._strict):
            pattern, size = other_names(copy["properties"])
            copy["propertyNames"] = {"type": "string", "pattern": pattern}
            self.size += size

    def _counts(self, copy: dict[str, Any]) -> None:
        for name in ("maxItems", "maxProperties"):
            if copy.get(name, 0) > MAX_MOST:
                del copy[name]
        if {"minItems", "maxItems"} & set(copy) and not {"items", "prefixItems"} & set(copy):
            copy["items"] = True  # the compiler would allow none
        properties = copy.get("properties", {})
        self.size += sum(map(len, properties)) // CHARACTERS
        self.size += (copy.get("minItems", 0) + copy.get("maxItems", 0)) // CHARACTERS
        counted = max(copy.get("minProperties", 0), copy.get("maxProperties", 0))
        self.size += len(properties) * min(counted, len(properties))

    def _numbers(self, copy: dict[str, Any]) -> dict[str, Any]:
        if not set(KEYWORDS) & set(copy):
            return copy
        given = copy["type"]
        kinds = given if isinstance(given, list) else [given]
        types, keywords, size = enforced(copy, kinds)
        self.size += size
        rest = {name: value for name, value in copy.items() if name not in KEYWORDS}
        if "enum" not in keywords:
            return rest | keywords | {"type": types}
        others = {**rest, "type": types[:-1]}
        return {"anyOf": [others, keywords]} if types[:-1] else keywords


def compiled_form(schema: Any, strict: bool) -> tuple[Any, int]:
    """(a copy of a schema that `check_schema` accepts, its size in states of a grammar, about).

    Strings with a length or a pattern hold no escapes.
    """
    form = _Form(strict)
    return form.rewrite(schema), form.size
