"""Finds tool calls in the text of an answer as it grows."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vexpert.server.tools.formats import PYTHON_TAG, ToolFormat


@dataclass(frozen=True)
class Words:
    """Text beside the calls."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """Call `index` begins."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of the arguments of call `index`."""

    index: int
    text: str


Event = Words | CallStart | CallArguments

# Up to the arguments of a call whose keys come in the usual order.
HEADER = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{'
)
LONGEST_HEADER = 2000  # characters; beyond, an object is read whole
DECODER = json.JSONDecoder(strict=False, parse_int=str)  # an int has a largest number of digits
COLON = re.compile(r"\s*:\s*")
COMMA = re.compile(r"\s*(?:,\s*(?!\})|(?=\}))")


class JsonEnd:
    """Finds the end of a JSON object, character by character."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, character: str) -> bool:
        """Whether the object ends with `character`."""
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            return False
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


class Call:
    """One call that is being read. `feed` takes its text from the object's brace on."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.text = ""
        self.is_started = False
        self._object, self._arguments = JsonEnd(), JsonEnd()
        self._scanned = 0  # arguments before this place are scanned
        self._sent = 0  # and before this one, handed out
        self._arguments_end: int | None = None
        self.rest = ""
        self.is_complete = False

    @property
    def is_whole(self) -> bool:
        """Whether all that was handed out is complete."""
        return not self.is_started or self._arguments_end is not None

    def feed(self, text: str) -> Iterator[Event]:
        """Take the object's characters from `text`; `rest` is what follows its end."""
        self.rest = ""
        for place, character in enumerate(text):
            self.text += character
            if self._object.feed(character):
                self.is_complete = True
                self.rest = text[place + 1 :]
                break
        yield from self._advance()

    def _advance(self) -> Iterator[Event]:
        is_short = len(self.text) < LONGEST_HEADER or self.is_complete
        if not self.is_started and is_short and (match := HEADER.match(self.text)):
            name = _name(match[1])
            if name is not None:
                self.is_started = True
                self._sent = self._scanned = match.end() - 1
                yield CallStart(self.index, name)
        if self.is_started:
            yield from self._more_arguments()
        elif self.is_complete:
            yield from self._whole()

    def _more_arguments(self) -> Iterator[Event]:
        while self._arguments_end is None and self._scanned < len(self.text):
            self._scanned += 1
            if self._arguments.feed(self.text[self._scanned - 1]):
                self._arguments_end = self._scanned
        new = self.text[self._sent : self._scanned]
        self._sent += len(new)
        if new:
            yield CallArguments(self.index, new)

    def _whole(self) -> Iterator[Event]:
        """A complete object whose keys came in another order, if it is a call at all."""
        call = _call_of(self.text)
        if call is not None:
            self.is_started = True
            yield CallStart(self.index, call[0])
            yield CallArguments(self.index, call[1])


def _name(text: str) -> str | None:
    """The name that a JSON string tells; None for what is no JSON or no Unicode text."""
    try:
        found: Any = json.loads(text, strict=False)
        found.encode()
    except (ValueError, AttributeError):
        return None
    return str(found)


def _call_of(text: str) -> tuple[str, str] | None:
    """(name, arguments as the JSON text that the model wrote) of a call object, or None."""
    try:
        members = _members(text)
    except (ValueError, RecursionError):
        return None
    name = _name(members.get("name", ""))
    written = members.get("arguments", members.get("parameters", ""))
    if name is None:
        return None
    if written.startswith("{"):
        return name, written
    inner = _name(written)  # a string that holds the arguments
    return None if inner is None else (name, inner)


def _members(text: str) -> dict[str, str]:
    """The JSON text of each member of an object. Raises ValueError for what is no object."""
    place = len(text) - len(text[1:].lstrip())
    members: dict[str, str] = {}
    while text[place : place + 1] != "}":
        key, end = DECODER.raw_decode(text, place)
        colon = COLON.match(text, end)
        if not isinstance(key, str) or colon is None:
            raise ValueError("no member of an object")
        _, end = DECODER.raw_decode(text, colon.end())
        members[key] = text[colon.end() : end]
        comma = COMMA.match(text, end)
        if comma is None:
            raise ValueError("the object goes on without a comma")
        place = comma.end()
    return members


class ToolParser:
    """Reads one answer. `is_open`: a call must come, and the prompt has written `format.opening`.

    Text that only looks like a call is handed out as words. White space beside calls is dropped,
    but what stands between words before them and words behind.
    With `single`, calls after the first are dropped.
    """

    def __init__(self, format: ToolFormat, is_open: bool, single: bool) -> None:
        self._format = format
        self._is_forced = is_open
        self._single = single
        self._buffer = ""
        self._call: Call | None = None
        self._skipped = ""  # what led to the call that is being read
        self._count = 0
        self._spoke = False
        self._after_call = False
        self._gap = ""  # white space between the last words and a call
        self._expects = "call" if is_open else "words"

    def feed(self, text: str) -> list[Event]:
        """What `text` adds."""
        self._buffer += text
        events: list[Event] = []
        while True:
            before = (self._buffer, self._expects, self._call)
            events += self._step()
            if before == (self._buffer, self._expects, self._call):
                return [event for event in events if self._is_wanted(event)]

    def finish(self) -> list[Event]:
        """What was held back, at the end of the answer."""
        text, self._buffer = self._buffer, ""
        if self._expects == "end" or (self._call is not None and self._call.is_started):
            return []
        if self._is_forced:
            return []  # what was to be a call, and was cut before its arguments
        if self._expects == "call":
            begun = "" if self._call is None else self._call.text
            text = self._led_here() + begun + text
        elif self._after_call:
            text = self._joined(text.rstrip())
        return [Words(text)] if text else []

    @property
    def is_whole(self) -> bool:
        """Whether the calls that were handed out have all of their arguments."""
        return self._call is None or self._call.is_whole

    def _is_wanted(self, event: Event) -> bool:
        return isinstance(event, Words) or not (self._single and event.index > 0)

    def _step(self) -> Iterator[Event]:
        match self._expects:
            case "words":
                yield from self._read_words()
            case "call":
                yield from self._read_call()
            case "end":
                self._read_end()

    def _read_words(self) -> Iterator[Event]:
        if not self._format.start:
            yield from self._read_bare()
            return
        place = self._buffer.find(self._format.start)
        if place >= 0:
            yield from self._say(self._buffer[:place].rstrip())
            if not self._after_call:
                self._gap = self._buffer[len(self._buffer[:place].rstrip()) : place]
            self._expect_call(self._buffer[place + len(self._format.start) :])
            self._skipped = self._format.start
            return
        ready = len(self._buffer) - _held(self._buffer, self._format.start)
        ready = len(self._buffer[:ready].rstrip())
        yield from self._say(self._buffer[:ready])
        self._buffer = self._buffer[ready:]

    def _read_bare(self) -> Iterator[Event]:
        """Calls without a mark: an answer that begins with a brace, or with llama's own tag."""
        text = self._buffer.lstrip()
        if not self._spoke and PYTHON_TAG.startswith(text[: len(PYTHON_TAG)]):
            if text.startswith(PYTHON_TAG):
                self._expect_call(text.removeprefix(PYTHON_TAG))
                self._skipped = PYTHON_TAG
            return
        if not self._spoke and not self._count and text.startswith("{"):
            self._expect_call(text)
            return
        ready = len(self._buffer.rstrip())
        yield from self._say(self._buffer[:ready])
        self._buffer = self._buffer[ready:]

    def _say(self, text: str) -> Iterator[Event]:
        text = self._joined(text) if self._after_call else text
        if text:
            self._spoke, self._after_call = True, False
            yield Words(text)

    def _joined(self, text: str) -> str:
        """Words behind a call as they follow those before it."""
        words = text.lstrip()
        space = self._gap or text[: len(text) - len(words)]
        return space + words if words and self._spoke else words

    def _expect_call(self, rest: str) -> None:
        self._expects, self._buffer, self._skipped = "call", rest, ""

    def _read_call(self) -> Iterator[Event]:
        if self._call is None:
            yield from self._begin_call()
            return
        text, self._buffer = self._buffer, ""
        if text:
            yield from self._call.feed(text)
            self._buffer = self._call.rest
        if self._call.is_complete:
            yield from self._end_call(self._call)

    def _begin_call(self) -> Iterator[Event]:
        text = self._buffer.lstrip()
        space = self._buffer[: len(self._buffer) - len(text)]
        opens_list = self._skipped == self._format.start and self._format.is_list
        if opens_list and text.startswith("["):
            self._skipped += f"{space}["
            self._buffer = text[1:]
        elif text.startswith("{"):
            self._skipped += space
            self._call, self._buffer = Call(self._count), text
        elif text:
            yield from self._give_up(self._buffer)

    def _end_call(self, call: Call) -> Iterator[Event]:
        self._call = None
        if call.is_started:
            self._count += 1
            self._expects, self._after_call = "end", True
        else:
            yield from self._give_up(call.text + self._buffer)

    def _give_up(self, text: str) -> Iterator[Event]:
        """What led to a call is words, and so is `text` behind it, if it holds no other call."""
        skipped, self._skipped = self._led_here(), ""
        self._expects, self._buffer = "words", text
        yield from self._say(skipped)
        self._spoke = True

    def _led_here(self) -> str:
        return self._skipped if self._after_call else self._gap + self._skipped

    def _read_end(self) -> None:
        """What stands between two calls, or after the last one."""
        text = self._buffer.lstrip()
        form = self._format
        next_mark = form.separator.strip() if form.is_list else ""
        for mark, expects in ((form.end, "words"), (next_mark, "call")):
            if mark and text.startswith(mark):
                self._expects, self._buffer = expects, text[len(mark) :]
                self._skipped = ""
                return
        marks = [mark for mark in (form.end, next_mark) if mark]
        if text and not any(mark.startswith(text) for mark in marks):
            self._expects, self._buffer = "words", text


def _held(text: str, mark: str) -> int:
    """Characters at the end of `text` that may begin `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if mark.startswith(text[-n:])), 0)
