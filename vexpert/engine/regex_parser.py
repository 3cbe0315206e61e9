"""Reads regular expressions: what ECMAScript, Python and Rust read alike. The rest is refused."""

import re
from dataclasses import dataclass

from vexpert.engine.code_points import (
    ANY_BUT_LINE_ENDS,
    SURROGATES,
    Ranges,
    complement,
    escaped_class,
    minus,
    union,
)

MAX_NESTING = 64  # groups inside one another
MAX_LEAST = 65536  # repetitions that are asked for
MAX_MOST = 2**20  # beyond, as many as wanted: no text gets there
CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
COUNTS = re.compile(r"\{(\d*)(,?)(\d*)\}")
NAME = re.compile(r"\?(?:P?<[A-Za-z_]\w*>|:)")
CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")


class RegexError(ValueError):
    """What is wrong with an expression, or not served."""


@dataclass(frozen=True)
class Characters:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Anchor:
    """`^` or `$`."""

    is_start: bool


@dataclass(frozen=True)
class Sequence:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True)
class Choice:
    options: "tuple[Node, ...]"


@dataclass(frozen=True)
class Repeat:
    """`part` from `least` to `most` times; None: any number."""

    part: "Node"
    least: int
    most: int | None


Node = Characters | Anchor | Sequence | Choice | Repeat


def parse(expression: str) -> Node:
    """The parts of an expression that is to match a whole text. Raises RegexError.

    Anchors stand only where they say nothing: at the beginning or the end of the whole.
    """
    parser = _Parser(expression)
    node = parser.choice(0)
    if parser.rest:
        raise RegexError(f"')' without '(' at character {parser.place}")
    _check_anchors(node, at_start=True, at_end=True)
    return node


def _check_anchors(node: Node, at_start: bool, at_end: bool) -> None:
    match node:
        case Anchor(is_start):
            if not (at_start if is_start else at_end):
                name, place = ("^", "beginning") if is_start else ("$", "end")
                raise RegexError(f"{name!r} is served only at the {place} of the expression")
        case Choice(options):
            for option in options:
                _check_anchors(option, at_start, at_end)
        case Repeat(part):
            _check_anchors(part, at_start=False, at_end=False)
        case Sequence(parts):
            ends = [i for i, part in enumerate(parts) if not isinstance(part, Anchor)]
            first, last = (ends[0], ends[-1]) if ends else (len(parts), -1)
            for i, part in enumerate(parts):
                _check_anchors(part, at_start and i <= first, at_end and i >= last)


class _Parser:
    """One pass over an expression, from left to right."""

    def __init__(self, expression: str) -> None:
        self._text = expression
        self.place = 0

    @property
    def rest(self) -> bool:
        return self.place < len(self._text)

    def _next(self) -> str:
        return self._text[self.place : self.place + 1]

    def _take(self) -> str:
        if not self.rest:
            raise RegexError("it ends too early")
        self.place += 1
        return self._text[self.place - 1]

    def _refuse(self, what: str) -> RegexError:
        return RegexError(f"{what} is not served, at character {self.place}")

    def choice(self, depth: int) -> Node:
        if depth > MAX_NESTING:
            raise RegexError(f"groups nest more than {MAX_NESTING} deep")
        options = [self._sequence(depth)]
        while self._next() == "|":
            self.place += 1
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self.rest and self._next() not in "|)":
            parts.append(self._repeated(self._atom(depth)))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _atom(self, depth: int) -> Node:
        begins_repeat = self._counts() is not None
        match self._take():
            case "(":
                return self._group(depth)
            case "[":
                return Characters(self._class())
            case ".":
                return Characters(ANY_BUT_LINE_ENDS)
            case "^":
                return Anchor(is_start=True)
            case "$":
                return Anchor(is_start=False)
            case "\\":
                return Characters(self._escaped(negated=False))
            case "*" | "+" | "?":
                raise RegexError(f"nothing to repeat at character {self.place}")
            case "{" if begins_repeat:
                raise RegexError(f"nothing to repeat at character {self.place}")
            case character:
                return Characters(self._code(ord(character)))

    def _code(self, code: int) -> Ranges:
        if SURROGATES[0] <= code <= SURROGATES[1] or code > 0x10FFFF:
            raise RegexError(f"U+{code:04X} is not a character; write the character itself")
        return ((code, code),)

    def _group(self, depth: int) -> Node:
        if self._next() == "?":
            named = NAME.match(self._text, self.place)
            if named is None:
                kind = self._text[self.place : self.place + 3]
                look = kind[1:2] in ("=", "!") or kind[1:] in ("<=", "<!")
                raise self._refuse(f"{'Lookahead or lookbehind' if look else 'the group'} ({kind}")
            self.place = named.end()
        node = self.choice(depth + 1)
        if self._next() != ")":
            raise RegexError("'(' is not closed")
        self.place += 1
        return node

    def _counts(self) -> tuple[int, int | None] | None:
        """The counts in braces that stand here; None for other text."""
        found = COUNTS.match(self._text, self.place)
        if found is None or (not found[1] and found[2] == "" and found[3] == ""):
            return None
        if not found[1]:
            if not found[3]:
                return None  # {,} stands for itself
            raise self._refuse("{,n}, which readers take differently; write {0,n}:")
        if len(found[1]) > 9 or len(found[3]) > 20 or int(found[1]) > MAX_LEAST:
            raise RegexError(f"{found[0]}: ask for at most {MAX_LEAST} repetitions")
        least = int(found[1])
        most = (int(found[3]) if found[3] else None) if found[2] else least
        if most is not None and most < least:
            raise RegexError(f"{found[0]}: the second number is smaller")
        self._length = len(found[0])
        return least, most

    def _repeated(self, node: Node) -> Node:
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        counts = simple.get(self._next())
        self._length = 1
        counts = counts or self._counts()
        if counts is None:
            return node
        if isinstance(node, Anchor):
            raise self._refuse("a repeated anchor")
        self.place += self._length
        if self._next() == "?":
            self.place += 1  # which of two ways matches makes no difference to a whole text
        if self._next() in ("*", "+", "?") or self._counts() is not None:
            raise self._refuse("a repetition of a repetition without a group")
        least, most = counts
        return Repeat(node, least, None if most is not None and most > MAX_MOST else most)

    def _escaped(self, negated: bool) -> Ranges:
        """Behind a backslash; in a class if `negated` says that it is one of those."""
        coded = CODE.match(self._text, self.place)
        if coded is not None:
            self.place = coded.end()
            return self._code(int(coded[1] or coded[2] or coded[3], 16))
        letter = self._take()
        known = escaped_class(letter, negated) if letter in "dDwWsS" else None
        if known is not None:
            return known
        if letter in CONTROLS:
            return self._code(CONTROLS[letter])
        if letter == "0" and not self._next().isdigit():
            return self._code(0)
        if letter.isalnum():
            escape = f"\\{letter}"
            raise RegexError(f"{escape!r} is not served")
        return self._code(ord(letter))

    def _class(self) -> Ranges:
        negated = self._next() == "^"
        self.place += negated
        if self._next() == "]":
            raise self._refuse("']' right behind '[', which readers take differently,")
        found: list[tuple[int, int]] = []
        while self._next() != "]":
            found += self._member(negated)
        self.place += 1
        ranges = union(found)
        ranges = complement(ranges) if negated else minus(ranges, ())
        if not ranges:
            raise RegexError("a class that no character is in")
        return ranges

    def _member(self, negated: bool) -> Ranges:
        """A character, a range or an escape of a class."""
        first = self._one(negated)
        following = self._text[self.place + 1 : self.place + 2]
        if self._next() != "-" or following in ("]", ""):
            return first
        self.place += 1
        last = self._one(negated)
        if not _is_one(first) or not _is_one(last) or last[0][0] < first[0][0]:
            raise RegexError(f"no range of characters ends at character {self.place}")
        return ((first[0][0], last[0][0]),)

    def _one(self, negated: bool) -> Ranges:
        if not self.rest:
            raise RegexError("'[' is not closed")
        if self._text[self.place : self.place + 2] in ("[:", "[.", "[=", "&&", "--", "~~", "||"):
            raise self._refuse(f"{self._text[self.place : self.place + 2]!r} in a class")
        character = self._take()
        if character == "\\":
            return self._escaped(negated)
        return self._code(ord(character))


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
