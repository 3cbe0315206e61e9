"""Whether the grammar made of a JSON schema enforces every keyword of it.

The compiler looks at one keyword of a schema, in this order, and leaves the others aside: $ref,
const, enum, anyOf or oneOf, allOf of one, type. A keyword that it would leave aside is named, so
that no schema is half enforced.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

MAX_DEPTH = 64  # schemas inside one another; compiling gets slow far beyond
ANNOTATIONS = frozenset({
    "$anchor", "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType",
    "default", "definitions", "deprecated", "description", "discriminator", "example", "examples",
    "readOnly", "title", "writeOnly",
})  # fmt: skip
NUMBER = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": NUMBER,
    "number": NUMBER,
    "boolean": set[str](),
    "null": set[str](),
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties",
    },
}  # fmt: skip
# The compiler's own rule for lengths lets raw control characters into a string, which is no JSON.
PLAIN = r'[^"\\\x00-\x1f]'
CLASSES = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")
UNESCAPED = re.compile(r'"|\\\\|\\[tnrfvxuc0]|[\x00-\x1f]')  # the compiler writes these as they are
ESCAPE = re.compile(r"\\(.)", re.DOTALL)
KNOWN_ESCAPES = frozenset("dDwWsSnrtfvxu0")  # of letters and digits; others stand for themselves
SIDE_BY_SIDE = (
    {"pattern", "format"},
    {"minLength", "maxLength"},
)  # of these the first alone counts
SINGLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf", "type")
IS_OF_TYPE: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: _is_number(value) and value == int(value),
    "number": lambda value: _is_number(value),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_schema(schema: Any, strict: bool) -> str | None:
    """What is wrong with a schema, or None. `strict` as in StructuredOutputs."""
    pending = [(schema, "schema", 0)]
    while pending:
        part, where, depth = pending.pop()
        if depth > MAX_DEPTH:
            return f"schemas nest more than {MAX_DEPTH} deep"
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            return f"{where} is not a schema: use an object or a boolean"
        fault = _fault(part, schema)
        if fault is not None:
            return f"{where}: {fault}"
        pending += [(inner, name, depth + 1) for name, inner in _inner(part)]
    return None


def _fault(part: dict[str, Any], root: Any) -> str | None:
    keyword = next((name for name in SINGLE if name in part), None)
    if keyword is None:
        return _fault_without_type(part)
    match keyword:
        case "$ref":
            return _fault_of_ref(part["$ref"], root) or _beside(part, keyword, set())
        case "const" | "enum":
            return _fault_of_values(part, keyword)
        case "type":
            return _fault_of_type(part)
        case "allOf" if isinstance(part["allOf"], list) and len(part["allOf"]) != 1:
            return "allOf: only with one schema in it; merge them"
    if not isinstance(part[keyword], list) or not part[keyword]:
        return f"{keyword}: use a list of schemas"
    return _beside(part, keyword, set())


def _beside(part: dict[str, Any], keyword: str, allowed: set[str]) -> str | None:
    """Names the first keyword that is left aside because of `keyword`."""
    for name in part:
        if name != keyword and name not in allowed and name not in ANNOTATIONS:
            return f"{name!r} beside {keyword!r} cannot be enforced; leave it out"
    return None


def _fault_without_type(part: dict[str, Any]) -> str | None:
    """A schema without a type is anything, or an object or an array if it speaks of one."""
    names = set(part) - ANNOTATIONS
    fits = [kind for kind in ("object", "array") if names and names <= OF_TYPE[kind]]
    if not names or (fits and {"properties", "items", "prefixItems"} & names):
        return _fault_of_object(part)
    unknown = names - set().union(*OF_TYPE.values())
    if unknown:
        return f"{min(unknown)!r} cannot be enforced; leave it out"
    return f"{min(names)!r} without a type that it belongs to cannot be enforced; give the type"


def _fault_of_values(part: dict[str, Any], keyword: str) -> str | None:
    values = [part["const"]] if keyword == "const" else part["enum"]
    if not isinstance(values, list) or not values:
        return "enum: use a list of values, not empty"
    kinds = _types(part["type"]) if "type" in part else None
    if "type" in part and kinds is None:
        return f"type: use one or more of {', '.join(OF_TYPE)}"
    for value in values:
        if kinds is not None and not any(IS_OF_TYPE[kind](value) for kind in kinds):
            return f"{keyword}: {value!r} is not of type {part['type']!r}"
    return _beside(part, keyword, {"type"})


def _types(kinds: Any) -> list[str] | None:
    kinds = [kinds] if isinstance(kinds, str) else kinds
    known = isinstance(kinds, list) and kinds and all(isinstance(k, str) for k in kinds)
    return kinds if known and set(kinds) <= set(OF_TYPE) else None


def _fault_of_type(part: dict[str, Any]) -> str | None:
    kinds = _types(part["type"])
    if kinds is None:
        return f"type: use one or more of {', '.join(OF_TYPE)}"
    allowed = set[str]().union(*(OF_TYPE[kind] for kind in kinds))
    if all(side & set(part) for side in SIDE_BY_SIDE):
        return "pattern or format beside minLength or maxLength cannot be enforced; use one of them"
    lengths = (part.get("minLength", 0), part.get("maxLength", 0))
    if not all(type(length) is int and length >= 0 for length in lengths):
        return "minLength and maxLength: use an integer from 0"
    return _beside(part, "type", allowed) or _fault_of_pattern(part) or _fault_of_object(part)


def _fault_of_pattern(part: dict[str, Any]) -> str | None:
    patterns = part.get("patternProperties", {})
    names = list(patterns) if isinstance(patterns, dict) else []
    for pattern in [part.get("pattern", ""), *names]:
        if not isinstance(pattern, str):
            return "pattern: use a string"
        escape = unknown_escape(pattern)
        if escape is not None:
            return f"pattern: {escape!r} is not served"
        if UNESCAPED.search(CLASSES.sub("", pattern)):
            return "pattern: a quote, backslash or control character outside [...] is not served"
    return None


def _fault_of_object(part: dict[str, Any]) -> str | None:
    properties, required = part.get("properties", {}), part.get("required", [])
    if not isinstance(properties, dict):
        return "properties: use an object of schemas"
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return "required: use a list of names"
    missing = [name for name in required if name not in properties]
    return f"required: {missing[0]!r} is not among the properties" if missing else None


def _fault_of_ref(ref: Any, root: Any) -> str | None:
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        return "$ref: only to a place in this schema, as #/$defs/NAME"
    at = root
    for name in ref.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(at, dict) or name not in at:
            return f"$ref: nothing at {ref!r}"
        at = at[name]
    return None


def unknown_escape(expression: str) -> str | None:
    """An escape that the compiler would take for a plain character, as a word border, or None."""
    for letter in ESCAPE.findall(expression):
        if letter.isalnum() and letter not in KNOWN_ESCAPES:
            return f"\\{letter}"
    return None


def plain_lengths(schema: Any) -> Any:
    """A copy of a checked schema whose lengths of strings are patterns: the same, and valid JSON.

    Such a string holds no escapes.
    """
    if isinstance(schema, list):
        return [plain_lengths(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {
        name: value if name in ("const", "enum") else plain_lengths(value)
        for name, value in schema.items()
    }
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if isinstance(schema.get("type"), str | list) and (least or most != ""):
        copy.pop("maxLength", None)
        copy.pop("minLength", None)
        copy["pattern"] = f"^{PLAIN}{{{least},{most}}}$"
    return copy


def _inner(part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas in `part`, with names for messages."""
    for keyword in ("items", "additionalProperties", "propertyNames"):
        if keyword in part:
            yield keyword, part[keyword]
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        values = part.get(keyword)
        for i, value in enumerate(values if isinstance(values, list) else ()):
            yield f"{keyword}[{i}]", value
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        values = part.get(keyword)
        for name, value in values.items() if isinstance(values, dict) else ():
            yield f"{keyword} {name!r}", value
