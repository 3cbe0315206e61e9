"""Sets of characters as ranges of code points, and the classes of regular expressions."""

from collections.abc import Iterable
from functools import lru_cache

Ranges = tuple[tuple[int, int], ...]  # both ends inside; in order, apart from one another

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # of UTF-16; no characters
ASCII_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
# All that any reader takes for white space: ECMAScript, Python, Rust.
ANY_SPACE: Ranges = (
    *((0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680)),
    *((0x180E, 0x180E), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F)),
    *((0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x85, 0x85), (0x2028, 0x2029))


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All of `ranges`, in order, those that touch joined."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """All characters but those of `ranges`."""
    gaps, start = [], 0
    for first, last in union([*ranges, SURROGATES]):
        if start < first:
            gaps.append((start, first - 1))
        start = last + 1
    return tuple([*gaps, (start, LAST)] if start <= LAST else gaps)


def minus(ranges: Ranges, others: Ranges) -> Ranges:
    return complement(union([*complement(ranges), *others]))


ANY_BUT_LINE_ENDS = complement(LINE_ENDS)


@lru_cache(maxsize=16)
def escaped_class(letter: str, widest: bool) -> Ranges | None:
    r"""The characters of \d, \w, \s and their opposites; None for another letter.

    Readers differ on white space: what all of them take for it, or with `widest`, any of them.
    """
    if letter.isupper():
        opposite = escaped_class(letter.lower(), not widest)
        return None if opposite is None else complement(opposite)
    space = ANY_SPACE if widest else ASCII_SPACE
    return {"d": DIGITS, "w": WORD, "s": space}.get(letter)
