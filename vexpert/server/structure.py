"""Bodies whose structure would hold up everybody: told before they are parsed.

A parser and a validator take time for each value, with the interpreter's lock, so that no thread
helps: seconds for the millions that 16 MiB can hold. Text costs next to nothing. What is counted
is what lies outside of strings; up to the first error of a broken body it is what a parser sees.
"""

from collections.abc import Sequence
from json import detect_encoding

MOST_VALUES = 2**20  # one after another, as the token ids of a prompt: 0.2 s
MOST_NAMES = 2**17  # names of fields, objects and lists, each of which costs ten times as much


def count_marks(text: bytes) -> tuple[int, int]:
    """(commas, colons and opening brackets) of JSON text, those in strings too."""
    return text.count(b","), text.count(b":") + text.count(b"{") + text.count(b"[")


def excess(chunks: Sequence[bytes]) -> str | None:
    """What a body in pieces has too much of; None: it may be parsed."""
    if sum(map(len, chunks)) <= MOST_NAMES:  # nearly all bodies
        return None
    values, names = zip(*map(count_marks, chunks), strict=True)
    found = _judge(sum(values), sum(names))
    if found is None:
        return None
    whole = b"".join(chunks)
    if not detect_encoding(whole[:4]).startswith("utf-8"):  # a quote may be half of a letter there
        return found
    text = whole.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote is one now
    if text.count(b'"') // 2 > MOST_VALUES + MOST_NAMES:
        return f"{MOST_VALUES} values"
    return _judge(*count_marks(b"".join(text.split(b'"')[::2])))


def _judge(values: int, names: int) -> str | None:
    if names > MOST_NAMES:
        return f"{MOST_NAMES} names, objects and lists"
    return f"{MOST_VALUES} values" if values > MOST_VALUES else None
