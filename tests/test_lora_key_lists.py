"""Keys in messages: every key is stood for, and nothing else."""

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vexpert.lora.key_lists import counted, grouped, key_lines, spans


def numbers(text: str) -> list[str]:
    """The numbers that "{0,3,5-7}" without its braces stands for."""
    found: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += map(str, range(int(first), int(last or first) + 1))
    return found


def expand(text: str) -> list[str]:
    """All keys that a group's text stands for."""
    parts = re.split(r"\{([^}]*)\}", text)
    choices = [
        [part] if at % 2 == 0 else ["A", "B"] if part == "A,B" else numbers(part)
        for at, part in enumerate(parts)
    ]
    return ["".join(words) for words in product(*choices)]


KEYS = st.builds(
    "m.layers.{}.experts.{}.{}.lora_{}.weight".format,
    st.integers(0, 4),
    st.integers(0, 4),
    st.sampled_from(["up", "down"]),
    st.sampled_from("AB"),
)


@given(st.lists(KEYS, min_size=1, max_size=60))
def test_groups_stand_for_their_keys(keys: list[str]) -> None:
    groups = grouped(keys)
    expanded = [key for group in groups for key in expand(group.text)]
    assert sorted(expanded) == sorted(set(keys))
    assert [len(expand(group.text)) for group in groups] == [group.size for group in groups]


def test_layers_are_shown() -> None:
    keys = [f"m.layers.{i}.q.lora_{part}.weight" for i in (0, 3, 5, 6, 7) for part in "AB"]
    assert key_lines(keys) == "  m.layers.{0,3,5-7}.q.lora_{A,B}.weight (10 keys)"
    assert key_lines(keys[:1]) == "  m.layers.0.q.lora_A.weight (1 key)"


@pytest.mark.parametrize(
    ("keys", "texts"),
    [
        (["a.01.b", "a.1.b"], ["a.01.b", "a.1.b"]),
        (["a.\u0661.b"], ["a.\u0661.b"]),
        (["a\0.1.b", "c.\0"], ["a?.1.b", "c.?"]),
        ([".".join("1" * 50)], [".".join("1" * 50)]),
        (["", ".", "1"], ["", ".", "1"]),
    ],
)
def test_odd_names(keys: list[str], texts: list[str]) -> None:
    assert [group.text for group in grouped(keys)] == texts


def test_messages_stay_short() -> None:
    assert len(key_lines(f"name{i}x" for i in range(1000))) < 2000
    assert "and 960 more lines" in key_lines(f"name{i}x" for i in range(1000))
    assert len(key_lines(["x" * 100_000])) < 600


def test_words() -> None:
    assert spans([7, 5, 0, 6, 2, 1]) == "0-2,5-7"
    assert (counted(1, "key"), counted(2, "bias", "biases")) == ("1 key", "2 biases")
