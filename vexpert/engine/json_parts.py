"""Where in a JSON schema other schemas stand."""

from collections.abc import Callable, Iterator
from typing import Any

ANNOTATIONS = frozenset({
    "$anchor", "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType",
    "default", "definitions", "deprecated", "description", "discriminator", "example", "examples",
    "readOnly", "title", "writeOnly",
})  # fmt: skip
ONE = ("items", "additionalProperties", "propertyNames")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs", "definitions")


def inner_schemas(part: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(name for messages, place as in a $ref, schema) of each schema in `part`."""
    for keyword in ONE:
        if keyword in part:
            yield keyword, keyword, part[keyword]
    for keyword in LISTS:
        values = part.get(keyword)
        for i, value in enumerate(values if isinstance(values, list) else ()):
            yield f"{keyword}[{i}]", f"{keyword}/{i}", value
    for keyword in NAMED:
        values = part.get(keyword)
        for name, value in values.items() if isinstance(values, dict) else ():
            step = name.replace("~", "~0").replace("/", "~1")
            yield f"{keyword} {name!r}", f"{keyword}/{step}", value


def with_inner(part: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A copy without annotations, each schema in it changed by `change`."""
    copy: dict[str, Any] = {}
    for keyword, value in part.items():
        if keyword in ONE:
            copy[keyword] = change(value)
        elif keyword in LISTS:
            copy[keyword] = [change(each) for each in value]
        elif keyword in NAMED:
            copy[keyword] = {name: change(each) for name, each in value.items()}
        elif keyword not in ANNOTATIONS:
            copy[keyword] = value
    return copy
