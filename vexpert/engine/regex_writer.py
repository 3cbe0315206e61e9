"""Writes regular expressions in the one form that the grammar compiler reads as it is meant."""

from functools import lru_cache

from vexpert.engine.code_points import LAST, Ranges, complement, minus, union
from vexpert.engine.regex_parser import (
    Anchor,
    Characters,
    Choice,
    Node,
    RegexError,
    Repeat,
    Sequence,
    parse,
)

# What a string of JSON holds only behind a backslash.
ESCAPED: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
CARET = 0x5E  # at the beginning of a class the compiler takes it for a negation, however written
LENGTHS = ((0, 0x7FF), (0x800, 0xFFFF), (0x10000, LAST))  # of a character: 1 or 2, 3, 4 bytes
IN_CLASS = frozenset("[]\\-^")


def rewritten(expression: str) -> tuple[str, int]:
    """An expression of a whole text as the compiler takes it, and its size in states.

    Raises RegexError for one that is not served.
    """
    text, size = _write(parse(expression), in_json=False)
    return text or "()", size


def rewritten_in_json(expression: str) -> tuple[str, int]:
    """The same for the text between the quotes of a JSON string, which then holds no escapes."""
    text, size = _write(parse(expression), in_json=True)
    return f"^(?:{text})$" if text else "^$", size


def _write(node: Node, in_json: bool) -> tuple[str, int]:
    match node:
        case Characters(ranges):
            return _characters(ranges, in_json)
        case Anchor():
            return "", 0
        case Sequence(parts):
            written = [_write(part, in_json) for part in parts]
            inner = [
                f"(?:{text})" if isinstance(part, Choice) else text
                for part, (text, _) in zip(parts, written, strict=True)
            ]
            return "".join(inner), sum(size for _, size in written)
        case Choice(options):
            written = [_write(option, in_json) for option in options]
            return "|".join(text for text, _ in written), 1 + sum(size for _, size in written)
        case Repeat(part, least, most):
            return _repeat(part, least, most, in_json)


def _repeat(part: Node, least: int, most: int | None, in_json: bool) -> tuple[str, int]:
    text, size = _write(part, in_json)
    if most == 0 or not text:
        return "", 0
    bounds = f"{{{least},{'' if most is None else most}}}"
    return f"(?:{text}){bounds}", size * max(1, least, most or 0)


@lru_cache(maxsize=1024)  # of long texts most characters are alike
def _characters(ranges: Ranges, in_json: bool) -> tuple[str, int]:
    if in_json:
        ranges = minus(ranges, ESCAPED)  # those that are left are enough
    if not ranges:
        raise RegexError(
            "it asks for a quote, a backslash or a control character, which are not served here"
        )
    return write_class(ranges), 1 + len(ranges) // 8


def write_class(ranges: Ranges) -> str:
    """A class, or one character; `ranges` is not empty.

    Characters of two, three and four bytes stand apart: of a class that holds some of each the
    compiler makes one that takes bytes which are no UTF-8.
    """
    classes = [_write_class(part) for low, high in LENGTHS if (part := _within(ranges, low, high))]
    return classes[0] if len(classes) == 1 else f"(?:{'|'.join(classes)})"


def _within(ranges: Ranges, low: int, high: int) -> Ranges:
    pairs = ((max(first, low), min(last, high)) for first, last in ranges)
    return tuple((first, last) for first, last in pairs if first <= last)


def _write_class(ranges: Ranges) -> str:
    if ranges[0][0] == CARET:
        rest = minus(ranges, ((CARET, CARET),))
        return rf"(?:\^|{_write_class(rest)})" if rest else r"\^"
    first, last = ranges[0][0], ranges[-1][1]
    if first == last and first < 0x80 and chr(first).isalnum():
        return chr(first)
    return f"[{''.join(_range(*pair) for pair in ranges)}]"


def _range(first: int, last: int) -> str:
    return _member(first) if first == last else f"{_member(first)}-{_member(last)}"


def _member(code: int) -> str:
    character = chr(code)
    if 0x20 <= code < 0x7F:
        return f"\\{character}" if character in IN_CLASS else character
    return f"\\u{{{code:x}}}"


PLAIN = write_class(complement(ESCAPED))  # one character of a JSON string


def class_of(character: str) -> str:
    """That character alone."""
    return write_class(((ord(character), ord(character)),))


def class_without(characters: list[str]) -> str:
    """Any character of a JSON string but these and those that need an escape."""
    return write_class(complement(union([*ESCAPED, *((ord(c), ord(c)) for c in characters)])))
