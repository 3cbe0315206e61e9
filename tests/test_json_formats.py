"""Strings with a format: dates of the calendar, times of the clock, addresses and names in full."""

import datetime
import ipaddress
import json
import random
from typing import Any

import pytest
from helpers_walks import compiled, walk

from vexpert.engine.structured_outputs import StructuredOutputs

xgrammar = pytest.importorskip("xgrammar")
jsonschema_rs = pytest.importorskip("jsonschema_rs")
YEARS = ("0000", "0001", "0004", "0100", "0400", "1900", "1999", "2000", "2023", "2024", "9999")


def grammar_of(kind: str) -> Any:
    return compiled(StructuredOutputs(json={"type": ["string", "null"], "format": kind}))


def accepts(grammar: Any, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return bool(matcher.accept_string(json.dumps(text)) and matcher.is_completed())


def is_date(text: str) -> bool:
    try:
        return bool(datetime.date.fromisoformat(text))
    except ValueError:
        return False


def test_a_date_is_one_of_the_calendar() -> None:
    grammar = grammar_of("date")
    days = [f"{y}-{month:02}-{day:02}" for y in YEARS for month in range(14) for day in range(33)]
    assert [day for day in days if accepts(grammar, day) != is_date(day)] == []
    years = [f"{year:04}-02-29" for year in range(10000)]
    assert [day for day in years if accepts(grammar, day) != is_date(day)] == []
    for other in ("2024-2-03", "2024-02-03T", "24-02-03", "", "2024-02-031"):
        assert not accepts(grammar, other)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("time", ["00:00:00Z", "23:59:59.25+05:30"], ["24:00:00Z", "12:00:60Z", "12:00:00"]),
        (
            "date-time",
            ["2024-02-29T00:00:00Z", "1999-12-31T23:59:59.123456789-01:00"],
            ["2023-02-29T00:00:00Z", "2024-04-31T00:00:00Z", "2024-04-30", "2024-04-30T00:00:00"],
        ),
        ("ipv4", ["0.0.0.0", "255.249.199.10"], ["01.0.0.0", "256.0.0.0", "1.1.1", "1.1.1.1."]),
        (
            "hostname",
            ["a", "X.com", "a-b.c.1", "a." * 9 + "b", "x" * 63 + ".de"],
            ["", "-a", "a-", "a..b", "a.", ".a", "a_b", "x" * 64, "a." + "x" * 64],
        ),
        (
            "email",
            ["a@b.c", "A.b+c@mail.x.com", "o'neil@a-b.d", "a@b", "x@" + "y" * 63 + ".de"],
            ["a", "@b.c", "a@", ".a@b.c", "a.@b.c", "a..b@c.d", "a@-b.c", "a@b.c.", "a b@c.d"],
        ),
    ],
)
def test_times_and_addresses(kind: str, good: list[str], bad: list[str]) -> None:
    grammar = grammar_of(kind)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def is_ipv6(text: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False


def test_an_ipv6_address_is_one_in_any_form() -> None:
    """All counts of groups before and behind a `::`, with IPv4 at the end or without."""
    grammar = grammar_of("ipv6")
    groups = ["1", "0", "fF", "aB9", "00a0", "ffff", "2", "3", "4"]
    texts = [":".join(groups[:n]) for n in range(10)]
    texts += [f"{':'.join(groups[:n])}::{':'.join(groups[:m])}" for n in range(9) for m in range(9)]
    texts += [f"{text}{sep}1.2.3.255" for text in texts for sep in ("", ":", "::")]
    texts += ["1:::2", "1::2::3", "::1.2.3.256", "::1.2.3", "::g", "::12345", ":1:2", "::1%eth0"]
    texts += ["1.2.3.4::", "1.2.3.4:1::", ":", "::1.2.3.4:5", "1:2:3:4:5:6:7:"]
    wrong = [
        text for text in texts if accepts(grammar, text) != (is_ipv6(text) and "%" not in text)
    ]
    assert wrong == []


@pytest.mark.parametrize("kind", ["date", "time", "date-time", "ipv4", "ipv6", "hostname", "uuid"])
def test_random_texts_of_a_format_are_valid(kind: str) -> None:
    schema = {"type": "string", "format": kind}
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    grammar, rng = grammar_of(kind), random.Random(4)
    texts = [text for _ in range(60) if (text := walk(grammar, rng)) not in (None, "null")]
    assert len(texts) > 5
    for text in texts:
        validator.validate(json.loads(str(text)))
