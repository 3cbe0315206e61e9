"""How families of models write tool calls in text."""

import json
from dataclasses import dataclass
from typing import Any

from vexpert.engine.structured_outputs import MAX_WHITESPACE


@dataclass(frozen=True)
class ToolFormat:
    """One family's way: `start`, then calls as JSON objects, `separator` between two, `end`.

    `start` is empty where the calls are all of the answer. `is_list`: one start and one end around
    all calls, not around each.
    """

    name: str
    start: str
    end: str
    separator: str  # between two calls, as a model is made to write it
    arguments: str  # key of a call's arguments
    is_list: bool
    opening: str  # what the prompt ends with where a call must follow
    closing: str  # what then follows the last call
    id_length: int = 24  # characters of a call's id behind "call_"; 9: nine and no prefix


FORMATS = {
    each.name: each
    for each in (
        ToolFormat(
            *("hermes", "<tool_call>", "</tool_call>"),
            separator="\n</tool_call>\n<tool_call>\n",
            arguments="arguments",
            is_list=False,
            opening="<tool_call>\n",
            closing="\n</tool_call>",
        ),
        ToolFormat(
            *("mistral", "[TOOL_CALLS]", "]"),
            separator=", ",
            arguments="arguments",
            is_list=True,
            opening="[TOOL_CALLS][",
            closing="]",
            id_length=9,  # what the family's templates insist on
        ),
        ToolFormat(
            *("llama3_json", "", ""),
            separator="; ",
            arguments="parameters",
            is_list=True,
            opening="",
            closing="",
        ),
    )
}


def calls_constraint(format: ToolFormat, tools: list[dict[str, Any]], single: bool) -> str:
    """A structural tag: one call of one of `tools`, or several; behind `format.opening`.

    Each tool is a function: {"name": ..., "parameters": schema}. White space between two parts of
    the arguments is bounded: a model that is made to call might write nothing else.
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
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": format.separator,
        "at_least_one": True,
        "stop_after_first": single,
    }
    closing = [{"type": "const_string", "value": format.closing}] if format.closing else []
    content = {"type": "sequence", "elements": [calls, *closing]}
    return json.dumps({"type": "structural_tag", "format": content}, ensure_ascii=False)
