"""Whether the grammar made of a JSON schema enforces every keyword of it.

The compiler looks at one keyword of a schema, in this order, and leaves the others aside: $ref,
const, enum, anyOf or oneOf, allOf of one, type. A keyword that it would leave aside is named, so
that no schema is half enforced.
"""

from collections.abc import Callable, Iterator
from typing import Any

from vexpert.engine.json_idle import plain
from vexpert.engine.json_numbers import KEYWORDS, MAX_INTEGER, NumberFault, enforced
from vexpert.engine.json_objects import fault_of_names
from vexpert.engine.json_parts import ANNOTATIONS, inner_schemas
from vexpert.engine.regex_parser import RegexError
from vexpert.engine.regex_writer import rewritten_in_json

MAX_DEPTH = 64  # schemas inside one another; compiling gets slow far beyond
NUMBER = set(KEYWORDS)
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
COUNTS = (
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
)
MAX_COUNT = 65536  # of a `min...`
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
    pending = [(schema, "schema", "#", 0)]
    places, refs = set[str](), list[tuple[str, Any]]()
    while pending:
        part, where, at, depth = pending.pop()
        places.add(at)
        if depth > MAX_DEPTH:
            return f"schemas nest more than {MAX_DEPTH} deep"
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            return f"{where} is not a schema: use an object or a boolean"
        part = plain(part)
        fault = _fault(part) or fault_of_names(part, strict, schema)
        if fault is not None:
            return f"{where}: {fault}"
        refs += [(where, part["$ref"])] if "$ref" in part else []
        pending += [
            (inner, name, f"{at}/{step}", depth + 1) for name, step, inner in inner_schemas(part)
        ]
    faults = (f"{where}: {fault}" for where, ref in refs if (fault := _fault_of_ref(ref, places)))
    return next(faults, None)


def _fault(part: dict[str, Any]) -> str | None:
    keyword = next((name for name in SINGLE if name in part), None)
    if keyword is None:
        return _fault_without_type(part)
    match keyword:
        case "$ref":
            return _beside(part, keyword, set())
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
    if any(abs(number) > MAX_INTEGER for number in _integers(values)):
        return f"{keyword}: integers go up to {MAX_INTEGER}; write larger ones as strings"
    return _beside(part, keyword, {"type"})


def _integers(value: Any) -> Iterator[int]:
    """All integers in a value."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _integers(inner)
    elif isinstance(value, int):
        yield value


def _types(kinds: Any) -> list[str] | None:
    kinds = [kinds] if isinstance(kinds, str) else kinds
    known = isinstance(kinds, list) and kinds and all(isinstance(k, str) for k in kinds)
    return kinds if known and set(kinds) <= set(OF_TYPE) else None


def _fault_of_type(part: dict[str, Any]) -> str | None:
    kinds = _types(part["type"])
    if kinds is None:
        return f"type: use one or more of {', '.join(OF_TYPE)}"
    allowed = set[str]().union(*(OF_TYPE[kind] for kind in kinds))
    return (
        _beside(part, "type", allowed)
        or _fault_of_counts(part)
        or _fault_of_text(part)
        or _fault_of_numbers(part, kinds)
        or _fault_of_object(part)
    )


def _fault_of_counts(part: dict[str, Any]) -> str | None:
    for names in COUNTS:
        for name in names:
            value = part.get(name, 0)
            if type(value) is not int or value < 0:
                return f"{name}: use an integer from 0"
        least, most = (part.get(name) for name in names)
        if least is not None and (least > MAX_COUNT or (most is not None and most < least)):
            return f"{names[0]}={least}: use at most {MAX_COUNT}, and no more than {names[1]}"
    return None


def _fault_of_text(part: dict[str, Any]) -> str | None:
    ways = [{"pattern"}, {"format"}, {"minLength", "maxLength"}]  # the compiler follows one of them
    if sum(bool(way & set(part)) for way in ways) > 1:
        return "two of pattern, format and minLength or maxLength cannot be enforced; use one"
    if not isinstance(part.get("format", ""), str):
        return "format: use a string"
    return _fault_of_patterns([part["pattern"]] if "pattern" in part else [])


def _fault_of_patterns(patterns: list[Any]) -> str | None:
    for pattern in patterns:
        if not isinstance(pattern, str):
            return "pattern: use a string"
        try:
            rewritten_in_json(pattern)
        except RegexError as error:
            return f"pattern: {error}"
    return None


def _fault_of_numbers(part: dict[str, Any], kinds: list[str]) -> str | None:
    try:
        if {"integer", "number"} & set(kinds):
            enforced(part, kinds)
    except NumberFault as fault:
        return str(fault)
    return None


def _fault_of_object(part: dict[str, Any]) -> str | None:
    properties, required = part.get("properties", {}), part.get("required", [])
    if not isinstance(properties, dict):
        return "properties: use an object of schemas"
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return "required: use a list of names"
    missing = [name for name in required if name not in properties]
    if missing:
        return f"required: {missing[0]!r} is not among the properties"
    patterns = part.get("patternProperties", {})
    if not isinstance(patterns, dict):
        return "patternProperties: use an object of schemas"
    return _fault_of_patterns(list(patterns))


def _fault_of_ref(ref: Any, places: set[str]) -> str | None:
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        return "$ref: only to a place in this schema, as #/$defs/NAME"
    if "%" in ref:
        return f"$ref: {ref!r} is escaped, which is not served; rename what it points to"
    return None if ref in places else f"$ref: no schema at {ref!r}"
