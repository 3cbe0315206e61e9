"""Why a body that is no JSON error by itself could not be parsed, and where."""

import re
import sys
from collections.abc import Iterator
from json import detect_encoding

DEEPEST = 256  # levels that every parser takes; far fewer than those at which one gives up
BRACKET = re.compile(r"[\[\]{}]")


def explain_unreadable(error: BaseException | None, body: bytes) -> str | None:
    """What is told of the parser's `error`; None: nothing that a body can cause."""
    if isinstance(error, UnicodeDecodeError):
        where = f"at byte {error.start}"
        return f"the body is not valid {error.encoding}: {error.reason} {where}"
    text = body.decode(detect_encoding(body), "surrogatepass")
    if isinstance(error, RecursionError):
        place = _place_of_level(text, DEEPEST + 1)
        where = f"level {DEEPEST + 1} begins at character {place}"
        return f"the body is nested too deeply: {where}; send at most {DEEPEST} levels"
    most = sys.get_int_max_str_digits()
    for start, piece in _outside_strings(text) if isinstance(error, ValueError) else ():
        if number := re.search(rf"\d{{{most + 1},}}", piece):
            what = f"an integer of {len(number[0])} digits at character {start + number.start()}"
            return f"the body has {what}; send at most {most} digits"
    return None


def _outside_strings(text: str) -> Iterator[tuple[int, str]]:
    """The pieces of JSON text between its strings, each with its place."""
    marked = text.replace("\\\\", "__").replace('\\"', "__")  # every quote is one now
    place = 0
    for i, piece in enumerate(marked.split('"')):
        if i % 2 == 0:
            yield place, piece
        place += len(piece) + 1


def _place_of_level(text: str, wanted: int) -> int:
    """Where the bracket stands that opens this level; the text's end, if none does."""
    depth = 0
    for start, piece in _outside_strings(text):
        for bracket in BRACKET.finditer(piece):
            depth += 1 if bracket[0] in "[{" else -1
            if depth == wanted:
                return start + bracket.start()
    return len(text)
