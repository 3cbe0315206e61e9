"""Lists of keys for messages: the numbers of layers and experts as sets, `layers.{0,3,5-7}`."""

import re
from collections.abc import Iterable
from itertools import groupby
from math import prod
from typing import NamedTuple

from vexpert.config import cut, printable

MOST_LINES = 40  # of one message
MOST_LETTERS = 500  # of one line

HOLE = "\0"  # stands for a number in a general name
_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,8})(?=\.|$)")
_MOST_NUMBERS = 4  # of one name; layers and experts are two
_FACTOR = re.compile(r"(?<=\.lora_)(embedding_)?([AB])(?=\.|$)")

Numbers = tuple[int, ...]


class KeyGroup(NamedTuple):
    """Keys that differ in their numbers alone, or in lora_A and lora_B."""

    text: str  # stands for exactly these keys; `printable`
    size: int  # keys
    general: str  # the name with HOLE for each number


def split_numbers(name: str) -> tuple[str, Numbers]:
    """The general name, and the numbers in its holes."""
    name = name.replace(HOLE, "?")
    numbers = _NUMBER.findall(name)[:_MOST_NUMBERS]
    return _NUMBER.sub(HOLE, name, count=_MOST_NUMBERS), tuple(map(int, numbers))


def fill(general: str, numbers: Iterable[int | str]) -> str:
    """A general name with `numbers` in its holes."""
    first, *others = general.split(HOLE)
    return first + "".join(f"{n}{part}" for n, part in zip(numbers, others, strict=True))


def grouped(keys: Iterable[str]) -> list[KeyGroup]:
    """All of `keys`, in order of their first appearance."""
    names = dict.fromkeys(keys)
    found: dict[str, dict[Numbers, None]] = {}
    for name in names:
        both = _FACTOR.sub(r"\1{A,B}", name) if partner(name) in names else name
        general, numbers = split_numbers(both)
        found.setdefault(general, {})[numbers] = None
    return [
        KeyGroup(printable(fill(general, map(_set, sets))), _count(general, sets), general)
        for general, members in found.items()
        for sets in _products(list(members))
    ]


def key_lines(keys: Iterable[str], noun: str = "key", plural: str = "") -> str:
    """One line for each group, indented, with its number of keys; of hundreds, the first."""
    groups = grouped(keys)
    return limited([f"  {group.text} ({counted(group.size, noun, plural)})" for group in groups])


def limited(lines: list[str]) -> str:
    """Lines as one text, the first MOST_LINES of them, each cut where it is very long."""
    more = len(lines) - MOST_LINES
    told = [cut(line, MOST_LETTERS) for line in lines[:MOST_LINES]]
    return "\n".join([*told, *([f"  and {more} more lines"] if more > 0 else [])])


def counted(count: int, noun: str, plural: str = "") -> str:
    """ "1 key", "2 keys"."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or noun + 's'}"


def spans(numbers: Iterable[int]) -> str:
    """ "0,3,5-7" of 0, 3, 5, 6, 7."""
    ordered = enumerate(sorted(numbers))
    runs = [[n for _, n in run] for _, run in groupby(ordered, lambda pair: pair[1] - pair[0])]
    return ",".join(_run(run[0], run[-1]) for run in runs)


def _run(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first},{last}" if last == first + 1 else f"{first}-{last}"


def _set(numbers: Numbers) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{{{spans(numbers)}}}"


def _count(general: str, sets: tuple[Numbers, ...]) -> int:
    return prod(map(len, sets)) * (2 if "{A,B}" in general else 1)


def partner(key: str) -> str | None:
    """The other factor's key; None where `key` is of neither."""
    found = _FACTOR.search(key)
    if found is None:
        return None
    return f"{key[: found.start(2)]}{'B' if found[2] == 'A' else 'A'}{key[found.end(2) :]}"


def _products(members: list[Numbers]) -> list[tuple[Numbers, ...]]:
    """`members` as products of sets: layers with the same experts are one."""
    if not members[0]:
        return [()]
    rests: dict[int, list[Numbers]] = {}
    for first, *rest in members:
        rests.setdefault(first, []).append(tuple(rest))
    firsts: dict[tuple[Numbers, ...], list[int]] = {}
    for first, found in rests.items():
        firsts.setdefault(tuple(sorted(found)), []).append(first)
    return [
        (tuple(numbers), *sets)
        for rest, numbers in firsts.items()
        for sets in _products(list(rest))
    ]
