"""What the text of an answer with tool calls may be, as xgrammar's structural tags."""

import json
from collections.abc import Sequence
from typing import Any

from vexpert.engine.code_points import ANY_SPACE, Ranges, complement, union
from vexpert.engine.regex_writer import class_of, write_class
from vexpert.engine.structured_outputs import MAX_WHITESPACE
from vexpert.server.tools.formats import PYTHON_TAG, ToolFormat

Function = dict[str, Any]  # {"name": ..., "parameters": schema}
Part = dict[str, Any]  # of a structural tag


def calls_constraint(format: ToolFormat, tools: Sequence[Function], single: bool) -> str:
    """A structural tag: one call of one of `tools`, or several; behind `format.opening`."""
    return _tag(_calls(format, tools, single), _text(format.closing))


def _calls(format: ToolFormat, tools: Sequence[Function], single: bool) -> Part:
    """White space between two parts of the arguments is bounded.

    A model that is made to call might write nothing else.
    """
    begin = '{{"name": {name}, "{key}": '
    tags = [
        {
            "type": "tag",
            "begin": begin.format(name=json.dumps(tool["name"]), key=format.arguments),
            "content": {
                "type": "json_schema",
                "json_schema": tool["parameters"],
                "max_whitespace_cnt": MAX_WHITESPACE,
            },
            "end": "}",
        }
        for tool in tools
    ]
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": format.separator,
        "at_least_one": True,
        "stop_after_first": single,
    }


def _text(text: str) -> Part | None:
    return {"type": "const_string", "value": text} if text else None


def _sequence(*parts: Part | None) -> Part:
    return {"type": "sequence", "elements": [part for part in parts if part is not None]}


def _tag(*parts: Part | None) -> str:
    tag = {"type": "structural_tag", "format": _sequence(*parts)}
    return json.dumps(tag, ensure_ascii=False)


def _optional(part: Part) -> Part:
    return {"type": "optional", "content": part}


def _regex(pattern: str) -> Part:
    return {"type": "regex", "pattern": pattern}


# Words beside calls.

SPACE = {"type": "regex", "pattern": "[ \\n]?"}  # models write the marks with or without
SPACES = f"{write_class(ANY_SPACE)}*"
ANY = f"{write_class(complement(()))}*"


def words_constraint(format: ToolFormat, tools: Sequence[Function]) -> str:
    """A structural tag: words, in which each call that a `ToolParser` finds is one of `tools`.

    What opens a call in the words leads to one. `tools` as in `calls_constraint`.
    """
    if not format.start:
        return _tag({"type": "or", "elements": [_bare_calls(format, tools), _regex(_words())]})
    opening = format.opening.removeprefix(format.start)
    calls = _calls(format, tools, single=not format.is_list)
    call = _sequence(
        *(SPACE, _text(opening.strip()), SPACE, calls, SPACE, _text(format.closing.strip()))
    )
    return _tag({"type": "dispatch", "rules": [[format.start, call]], "loop": True})


def _bare_calls(format: ToolFormat, tools: Sequence[Function]) -> Part:
    """Calls at the beginning, and words behind that open no other call."""
    lead = _sequence(_regex(SPACES), _optional(_sequence(_text(PYTHON_TAG), SPACE)))
    begins = _class_without(";<{")
    return _sequence(
        lead, _calls(format, tools, single=False), _regex(f"{SPACES}(?:{begins}{ANY})?")
    )


def _words() -> str:
    """A text that does not begin as calls do: neither with a brace nor with PYTHON_TAG."""
    rest = ""  # behind the characters up to `place`, which are those of the tag
    for place, character in reversed(list(enumerate(PYTHON_TAG))):
        others = write_class(complement(_codes(character)))
        if place == 0:
            others = _class_without("{" + character)
        rest = f"(?:{others}{ANY}{f'|{class_of(character)}{rest}' if rest else ''})?"
    return f"{SPACES}{rest}"


def _class_without(characters: str) -> str:
    """One character, but white space and these."""
    return write_class(complement(union([*ANY_SPACE, *_codes(characters)])))


def _codes(characters: str) -> Ranges:
    return tuple((ord(character), ord(character)) for character in characters)
