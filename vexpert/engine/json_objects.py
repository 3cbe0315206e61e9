"""The names of the properties of objects, where a schema leaves some of them open."""

import json
from collections.abc import Iterable
from typing import Any

from vexpert.engine.regex_writer import PLAIN, class_of, class_without

Trie = dict[str, "Trie"]  # by next character; "" where a name ends
MAX_LETTERS = 48  # of a name that are looked at


def is_open(part: dict[str, Any], strict: bool) -> bool:
    """Whether an object may have properties that `part` does not name."""
    return part.get("additionalProperties", not strict) is not False


def fault_of_names(part: dict[str, Any], strict: bool, root: Any) -> str | None:
    """What about the names of properties could not be enforced, or None; `root`: all schemas."""
    patterns, names = part.get("patternProperties"), part.get("propertyNames")
    if patterns is not None or names is not None:
        if part.get("properties"):
            return "properties beside patternProperties or propertyNames cannot be enforced; " + (
                "use one of them"
            )
        if patterns is not None and (names is not None or len(patterns) != 1):
            return "patternProperties: only one pattern, and no propertyNames beside it"
        if patterns is not None and part.get("additionalProperties", False) is not False:
            return "additionalProperties beside patternProperties cannot be enforced; use false"
    if names is not None and not _is_of_strings(_referred(names, root)):
        return "propertyNames: use type 'string', or an enum or const of strings"
    return _fault_of_least(part, strict)


def _referred(names: Any, root: Any) -> Any:
    """What a $ref to one of the $defs stands for; other schemas as they are."""
    if not isinstance(names, dict) or not isinstance(names.get("$ref"), str):
        return names
    shared = root.get("$defs")
    name = names["$ref"].removeprefix("#/$defs/")
    return shared.get(name) if isinstance(shared, dict) else None


def _is_of_strings(names: Any) -> bool:
    if not isinstance(names, dict):
        return False
    if "const" in names or "enum" in names:
        values = [names["const"]] if "const" in names else names["enum"]
        return isinstance(values, list) and all(isinstance(value, str) for value in values)
    return names.get("type") == "string"


def _fault_of_least(part: dict[str, Any], strict: bool) -> str | None:
    """Of open names the same one may come again, so that they count as one."""
    least, properties = part.get("minProperties", 0), part.get("properties", {})
    if least == 0 or not isinstance(properties, dict):
        return None
    if properties and not is_open(part, strict):
        most = len(properties)
    else:
        most = len(set(part.get("required", []))) + 1
    if least > most:
        return f"minProperties={least}: at most {most} can be enforced here; require names"
    return None


def other_names(names: Iterable[str]) -> tuple[str, int]:
    """A pattern of all names but these, without escapes, and its size in states.

    Nor does it match a name that is equal to one of these in MAX_LETTERS characters.
    """
    trie: Trie = {}
    for name in names:
        if name == json.dumps(name, ensure_ascii=False)[1:-1]:  # else it needs an escape
            at = trie
            for character in name[:MAX_LETTERS]:
                at = at.setdefault(character, {})
            at[""] = {}
    return f"^(?:{_others(trie, 0)})$", 8 + 2 * sum(len(name[:MAX_LETTERS]) for name in names)


def _others(trie: Trie, depth: int) -> str:
    """What may follow where a name has begun as those of `trie` do, so that it is none of them."""
    following = sorted(character for character in trie if character)
    options = [f"{class_without(following)}{PLAIN}*"]
    if depth < MAX_LETTERS - 1:
        branches = [(character, _others(trie[character], depth + 1)) for character in following]
        options += [f"{class_of(character)}(?:{others})" for character, others in branches]
    return "|".join(options if "" in trie else [*options, ""])
