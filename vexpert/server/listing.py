"""GET /v1/models and /v1/adapters of thousands of names: piece by piece, others in between.

Each piece is a call of the engine, and is text as soon as it is there.
"""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from vexpert.lora.info import AdapterInfo
from vexpert.server.engine_client import AsyncEngine

PIECE = 200  # names: a millisecond or two

Entry = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """What a list is to hold."""

    allowed: frozenset[str] | None = None  # names that the request's API key is for; None: all
    limit: int | None = None  # names; None: all
    after: str | None = None  # the name to go on behind
    states: tuple[str, ...] = ()  # none: any
    part: str = ""  # of names, in any case

    def has(self, name: str) -> bool:
        """Whether the list may hold `name`."""
        is_allowed = self.allowed is None or name in self.allowed
        return is_allowed and self.part.lower() in name.lower()


class Page:
    """A list of entries as JSON, in the shape of OpenAI's lists."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._names = 0
        self._last: str | None = None
        self.has_more = False  # than the limit
        self._texts: list[str] = []

    @property
    def room(self) -> int:
        """Names that may be added in one piece, and one more, which shows that there is more."""
        return PIECE if self._limit is None else min(PIECE, self._limit + 1 - self._names)

    def add(self, name: str, entry: Entry) -> None:
        """One more entry, unless there is no room for its name; those of a name are together."""
        is_new = name != self._last
        self.has_more = self.has_more or (is_new and self._names == self._limit)
        if self.has_more:
            return
        self._names += is_new
        self._last = name
        self._texts.append(json.dumps(entry, separators=(",", ":")))

    def response(self) -> Response:
        """The list."""
        last, more = json.dumps(self._last), json.dumps(self.has_more)
        text = f'{{"object":"list","data":[{",".join(self._texts)}],"last_id":{last},'
        return Response(f'{text}"has_more":{more}}}', media_type="application/json")


async def fill(
    page: Page, engine: AsyncEngine, wanted: Wanted, entry: Callable[[AdapterInfo], Entry]
) -> Response:
    """Add what is `wanted` to `page`; the page as a response."""
    async for infos in _pieces(page, engine, wanted):
        for info in infos:
            page.add(info.name, entry(info))
        if page.has_more:
            break
    return page.response()


async def _pieces(
    page: Page, engine: AsyncEngine, wanted: Wanted
) -> AsyncIterator[list[AdapterInfo]]:
    after = wanted.after
    if wanted.allowed is None:
        while True:
            part = wanted.part.lower()
            infos, last = await engine.adapter_page(after, page.room, wanted.states, part)
            yield infos
            if last is None:
                return
            after = last
    names = sorted(each for each in wanted.allowed if after is None or each > after)
    names = [name for name in names if wanted.has(name)]
    for start in range(0, len(names), PIECE):
        infos = await engine.adapters_named(names[start : start + PIECE])
        yield [info for info in infos if not wanted.states or info.state in wanted.states]
