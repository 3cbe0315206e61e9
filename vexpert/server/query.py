"""The parameters in the query of a list: one that is not known would show everything."""

from collections import Counter
from collections.abc import Callable

from starlette.requests import Request

from vexpert.config import shown
from vexpert.errors import nearest
from vexpert.server.errors import ApiError

PAGE = ("limit", "after", "name")  # of every list
STATE = "state"  # of /v1/adapters, may be repeated


def only(*known: str) -> Callable[[Request], None]:
    """A dependency of a route: 400 for a parameter beside `known`, or one that is given twice."""

    def check(request: Request) -> None:
        given = Counter(name for name, _ in request.query_params.multi_items())
        for name, count in given.items():
            if name not in known:
                raise ApiError(f"unknown parameter {shown(name)}{_hint(name, known)}", 400, name)
            if count > 1 and name != STATE:
                raise ApiError(f"{name}: given {count} times; give it once", 400, name)

    return check


def _hint(name: str, known: tuple[str, ...]) -> str:
    if near := nearest(name, known):
        return f"; did you mean {near!r}?"
    where = ": it is one of /v1/adapters;" if name == STATE else ":"
    return f"{where} use {', '.join(known)}"
