"""Pydantic's findings in one sentence that names the field."""

from collections.abc import Sequence
from typing import Any

from vexpert.config import cut, shown
from vexpert.errors import nearest
from vexpert.server.protocol.fields import known_fields, known_models, routes_with

MOST_NAME = 200  # characters
NOT_AN_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"


def explain(errors: Sequence[Any]) -> tuple[str, str | None]:
    """(message, field at fault or None) of one of pydantic's errors.

    Of a union's branches, the deepest finding is of the branch that the caller meant.
    """
    error = max(errors, key=lambda each: len(each["loc"]))
    path = _fields(error)
    if error["type"] == "json_invalid":
        cause = error["ctx"]["error"]
        return f"the body is not valid JSON: {cause} at character {error['loc'][-1]}", None
    if not path:
        return (str(error["msg"]) if error["type"] == "refused" else NOT_AN_OBJECT), None
    name = _dotted(path)
    if error["type"] == "extra_forbidden":
        return f"unknown field {shown(name)}{_hint(str(path[-1]))}", name
    if error["type"] == "missing":
        return f"field {shown(name)} is missing", name
    message = str(error["msg"])
    return f"{_short(name)}: {message[:1].lower()}{message[1:]}", name


def _fields(error: Any) -> list[str | int]:
    """The path of an error's field, without the branches of unions on the way."""
    path = [*error["loc"][1:]]
    is_own = error["type"] in ("extra_forbidden", "missing")  # the last part is a field's name
    last = path[-1:] if is_own else []
    return [part for part in path[: len(path) - len(last)] if not _is_branch(part)] + last


def _is_branch(part: object) -> bool:
    """Whether a piece of a location names a branch of a union, not a field."""
    if not isinstance(part, str):
        return False
    models = {model.__name__ for model in known_models()}
    return part in ("str", "int", "float", "bool", *models) or "[" in part


def _dotted(path: list[str | int]) -> str:
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return name.removeprefix(".")


def _short(name: str) -> str:
    """A name may be a client's own, as a key of metadata is."""
    return cut(name, MOST_NAME)


def _hint(name: str) -> str:
    if routes := routes_with(name):
        return f" here; it is one of {', '.join(routes)}"
    near = None if name in (known := known_fields()) else nearest(name, known)
    return f"; did you mean {near!r}?" if near else "; leave it out"
