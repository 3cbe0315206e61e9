"""How families of models write tool calls in text."""

from dataclasses import dataclass

PYTHON_TAG = "<|python_tag|>"  # of llama3_json, in front of a call


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
