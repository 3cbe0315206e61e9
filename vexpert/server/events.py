"""Server-sent events of an answer. Most differ in their text alone, and are filled, not encoded."""

import json
from collections.abc import Iterable
from json.encoder import encode_basestring
from typing import Any, Protocol
from uuid import uuid4

from vexpert.server.progress import Delta, Update

Json = dict[str, Any]
MARK = f"text {uuid4().hex}"  # in no chunk by itself


class Chunker(Protocol):
    """Makes the chunks of one answer."""

    include_usage: bool

    def chunks(self, i: int, update: Update) -> Iterable[Json]:
        """Chunks for an update of prompt `i`."""

    def choice_of_text(self, i: int, delta: Delta) -> int | None:
        """The choice that gains nothing but text by `delta` of prompt `i`.

        All chunks of such deltas of one choice are equal but for the text, and one each; an empty
        text needs none. None: `chunks` must see it.
        """


def event(content: Json) -> str:
    """An event that carries `content`."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


class EventWriter:
    """Writes updates as events."""

    def __init__(self, chunker: Chunker) -> None:
        self._chunker = chunker
        self._blank: Json = {"usage": None} if chunker.include_usage else {}
        self._around: dict[int, tuple[str, str]] = {}  # by choice: what stands around the text

    def write(self, i: int, update: Update) -> str:
        """The events for an update of prompt `i`; may be none."""
        return "".join([self._write(i, delta, update) for delta in update.deltas])

    def _write(self, i: int, delta: Delta, update: Update) -> str:
        choice = self._chunker.choice_of_text(i, delta)
        if choice is None:
            return self._encode(i, update._replace(deltas=[delta]))
        if not delta.text:
            return ""
        around = self._around.get(choice)
        if around is None:
            pattern = self._encode(i, update._replace(deltas=[delta._replace(text=MARK)]))
            before, after = pattern.split(encode_basestring(MARK))
            around = self._around[choice] = before, after
        return f"{around[0]}{encode_basestring(delta.text)}{around[1]}"

    def _encode(self, i: int, update: Update) -> str:
        return "".join([event(chunk | self._blank) for chunk in self._chunker.chunks(i, update)])
