"""One schema as other writers mean it: what says nothing is left out, what is implied is said."""

from typing import Any

from vexpert.engine.json_parts import ANNOTATIONS

LENGTHS = ("minLength", "maxLength")
COUNTS = (*LENGTHS, "minItems", "maxItems", "minProperties", "maxProperties")
OF_NAMES = {*LENGTHS, "pattern", "format"}
CLOSING = ("properties", "patternProperties", "propertyNames")


def plain(part: dict[str, Any]) -> dict[str, Any]:
    """A copy that allows the same values; the schemas inside stay, but for what names are."""
    copy = {name: value for name, value in part.items() if not _is_idle(name, value)}
    _whole_counts(copy)
    _say_names_are_strings(copy)
    _name_required(copy)
    _filter_values(copy)
    return copy


def _is_idle(name: str, value: Any) -> bool:
    return name.startswith("x-") or (name == "nullable" and value is False)


def _whole_counts(copy: dict[str, Any]) -> None:
    """To JSON Schema, 1.0 is an integer."""
    for name in COUNTS:
        value = copy.get(name)
        if isinstance(value, float) and value.is_integer():
            copy[name] = int(value)


def _say_names_are_strings(copy: dict[str, Any]) -> None:
    """Names of properties are of one type, whether a schema says it or not."""
    names = copy.get("propertyNames")
    if isinstance(names, dict) and names.keys() - ANNOTATIONS <= OF_NAMES:
        copy["propertyNames"] = {"type": "string", **names}


def _name_required(copy: dict[str, Any]) -> None:
    """Names that are required and not described have any value."""
    names = copy.get("required")
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    is_free = isinstance(copy.get("additionalProperties", True), bool)
    is_closed = copy.get("additionalProperties") is False or any(name in copy for name in CLOSING)
    if names and is_list and is_free and not is_closed and "object" in copy.get("type", ()):
        copy["properties"] = {name: {} for name in names}


def _filter_values(copy: dict[str, Any]) -> None:
    """Lengths beside an enum are kept by leaving out what breaks them."""
    least, most = (
        copy.get(name, default) for name, default in zip(LENGTHS, (0, 2**63), strict=True)
    )
    values = copy.get("enum")
    if isinstance(values, list) and type(least) is int and type(most) is int:
        for name in LENGTHS:
            copy.pop(name, None)
        copy["enum"] = [
            value for value in values if not isinstance(value, str) or least <= len(value) <= most
        ]
