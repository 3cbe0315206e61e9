"""Tool calls are found in text however the text is cut, and what is no call stays text."""

import json
import random

import pytest

from vexpert.server.tools.formats import FORMATS
from vexpert.server.tools.parser import CallArguments, CallStart, ToolParser, Words

Call = tuple[str, str]  # name, arguments as JSON text


def read(
    form: str, pieces: list[str], is_open: bool = False, single: bool = False
) -> tuple[str, list[Call]]:
    """(words, calls) that a parser finds in an answer that comes in `pieces`."""
    parser = ToolParser(FORMATS[form], is_open, single)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    words, calls = "", list[Call]()
    for event in events:
        match event:
            case Words(text):
                assert text, "an empty event"
                words += text
            case CallStart(index, name):
                assert index == len(calls), "a call out of order"
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1, "arguments of another call"
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return words, calls


A, B = '{"city": "Oslo, \\"N\\" }"}', '{"x": [1, {"y": "]"}]}'
CALL_A, CALL_B = f'{{"name": "get", "arguments": {A}}}', f'{{"name": "put", "arguments": {B}}}'
BOTH = [("get", A), ("put", B)]
OTHER_ORDER = '{"arguments": {"a": 1}, "name": "get"}'
ODD = (  # objects that are no calls
    r'{"name": "get\_weather", "arguments": {}}',
    r'{"name": "\ud83d", "arguments": {}}',
    r'{"arguments": {}, "name": "\ud83d"}',
    r'{"arguments": "\ud83d", "name": "f"}',
    '{"arguments": {"a": 1,}, "name": "f"}',
    '{"arguments": {"a" 1}, "name": "f"}',
    '{"name": 3, "arguments": {}}',
    '{"name": ' + "1" * 5000 + "}",
)
MANY_DIGITS = '{"arguments": {"a": ' + "1" * 5000 + '}, "name": "f"}'
SURROGATE = r'{"arguments": {"a": "\ud83d"}, "name": "f"}'
CASES = {
    "hermes": [
        ("just words", "just words", []),
        ("  words < <tool and }\n ", "  words < <tool and }\n ", []),
        (f"<tool_call>\n{CALL_A}\n</tool_call>", "", BOTH[:1]),
        (f"<tool_call>{CALL_A}</tool_call>\n<tool_call>\n{CALL_B}\n</tool_call>\n", "", BOTH),
        (f"I look.\n\n<tool_call>\n{CALL_A}\n</tool_call>", "I look.", BOTH[:1]),
        (f"<tool_call>{CALL_A}</tool_call>\n so, done. ", "so, done. ", BOTH[:1]),
        (f"<tool_call>\n{OTHER_ORDER}\n</tool_call>", "", [("get", '{"a": 1}')]),
        ("<tool_call>\nnothing\n</tool_call>", "<tool_call>\nnothing\n</tool_call>", []),
        (f"<tool_call>no<tool_call>{CALL_A}</tool_call>", "<tool_call>no", BOTH[:1]),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ("<tool_call>", "<tool_call>", []),
        (f"ok <tool_call>{CALL_A}</tool_call> bye", "ok bye", BOTH[:1]),
        (f"ok<tool_call>{CALL_A}</tool_call>\nbye", "ok\nbye", BOTH[:1]),
        (f"ok <tool_call>{CALL_A}</tool_call>\n", "ok", BOTH[:1]),
        ("ok <tool_call>no", "ok <tool_call>no", []),
        ("ok\n<tool_call>", "ok\n<tool_call>", []),
        ('<tool_call>{"name": "get"', '<tool_call>{"name": "get"', []),
        ('<tool_call>{"name": "get", "arguments": {"a": [1', "", [("get", '{"a": [1')]),
        ('<tool_call>{"name": "a\\"b", "arguments": {}}</tool_call>', "", [('a"b', "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", "{}")]),
        *((f"<tool_call>{odd}</tool_call>", f"<tool_call>{odd}</tool_call>", []) for odd in ODD),
        (f"<tool_call>{MANY_DIGITS}</tool_call>", "", [("f", f'{{"a": {"1" * 5000}}}')]),
        (f"<tool_call>{SURROGATE}</tool_call>", "", [("f", r'{"a": "\ud83d"}')]),
    ],
    "mistral": [
        ("a [TOOL", "a [TOOL", []),
        (f"[TOOL_CALLS] [{CALL_A}, {CALL_B}]", "", BOTH),
        (f"[TOOL_CALLS][{CALL_A}]", "", BOTH[:1]),
        (f"[TOOL_CALLS]{CALL_A}", "", BOTH[:1]),
        (f"Well. [TOOL_CALLS] [{CALL_A}]", "Well.", BOTH[:1]),
        ("[TOOL_CALLS] what", "[TOOL_CALLS] what", []),
    ],
    "llama3_json": [
        (CALL_A.replace("arguments", "parameters"), "", BOTH[:1]),
        (f"<|python_tag|>{CALL_A}; {CALL_B}", "", BOTH),
        (f" \n{CALL_A}", "", BOTH[:1]),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        (f"Here: {CALL_A}", f"Here: {CALL_A}", []),
        ("<|python", "<|python", []),
        ("{", "{", []),
    ],
}


@pytest.mark.parametrize(
    ("form", "text", "words", "calls"),
    [(form, *case) for form, cases in CASES.items() for case in cases],
)
def test_calls_are_found_however_the_text_is_cut(
    form: str, text: str, words: str, calls: list[Call]
) -> None:
    assert read(form, [text]) == (words, calls)
    assert read(form, list(text)) == (words, calls)
    rng = random.Random(text)
    for _ in range(30):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 5)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(form, pieces) == (words, calls)


def test_arguments_are_told_as_they_are_written() -> None:
    parser = ToolParser(FORMATS["hermes"], False, False)
    assert not parser.feed(f"<tool_call>\n{CALL_A[: -len(A) - 1]}")
    told = [parser.feed(character) for character in A]
    assert told[0] == [CallStart(0, "get"), CallArguments(0, A[0])]
    assert told[1:] == [[CallArguments(0, character)] for character in A[1:]]
    assert not parser.feed("}\n</tool_call>")


@pytest.mark.parametrize("form", list(FORMATS))
def test_a_forced_answer_is_read_from_behind_its_opening(form: str) -> None:
    one = FORMATS[form]
    text = f"{CALL_A}{one.separator}{CALL_B}{one.closing}"
    for pieces in ([text], list(text)):
        assert read(form, pieces, is_open=one.opening != "") == ("", BOTH)


@pytest.mark.parametrize("form", list(FORMATS))
def test_a_single_call_is_the_first(form: str) -> None:
    one = FORMATS[form]
    text = f"{one.opening}{CALL_A}{one.separator}{CALL_B}{one.closing}"
    assert read(form, list(text), single=True) == ("", BOTH[:1])


def test_arguments_come_while_they_are_written() -> None:
    parser = ToolParser(FORMATS["hermes"], False, False)
    assert parser.feed('Go.\n<tool_call>{"name": "get", "arg') == [Words("Go.")]
    assert parser.feed('uments": {"a') == [CallStart(0, "get"), CallArguments(0, '{"a')]
    assert parser.feed('": 1}') == [CallArguments(0, '": 1}')]
    assert parser.feed("}\n</tool_") == []
    assert parser.feed("call> bye") == [Words("\nbye")]


def test_any_text_at_all_is_read_to_its_end() -> None:
    rng = random.Random(0)
    pieces = [CALL_A, CALL_B, OTHER_ORDER, "{", "}", "[", "]", "; ", ", ", "word", "\n", '"', "\\"]
    for form, one in FORMATS.items():
        for _ in range(300):
            marks = [one.start, one.end, one.opening, "<|python_tag|>"]
            text = "".join(rng.choices(pieces + marks, k=rng.randrange(1, 9)))
            whole = read(form, [text])
            assert read(form, list(text)) == whole, text
            for _, arguments in whole[1]:
                if whole[0] == "":
                    assert arguments.startswith("{")
            assert json.dumps(whole)


@pytest.mark.parametrize("form", list(FORMATS))
def test_a_forced_call_that_is_cut_is_no_text_and_not_whole(form: str) -> None:
    one = FORMATS[form]
    text = f"{CALL_A}{one.separator}{CALL_B}{one.closing}"
    header, whole = text.index("{", 1), len(CALL_A) - 1
    for end in range(len(text)):
        parser = ToolParser(one, is_open=True, single=False)
        events = parser.feed(text[:end]) + parser.finish()
        assert not any(isinstance(event, Words) for event in events), text[:end]
        begun = any(isinstance(event, CallStart) for event in events)
        assert begun == (end > header)
        if begun and end < whole:
            assert not parser.is_whole
    assert parser.is_whole
