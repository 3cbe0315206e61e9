"""Tool calls in OpenAI's shapes: of a whole message, and of the chunks of a stream."""

import secrets
import string
from typing import Any

from vexpert.server.tools.formats import ToolFormat
from vexpert.server.tools.parser import CallArguments, CallStart, Event, Words
from vexpert.server.tools.plan import ToolPlan

Json = dict[str, Any]
LETTERS = string.ascii_letters + string.digits


def new_call_id(format: ToolFormat) -> str:
    """A fresh id of a call, as the templates of the family take it."""
    word = "".join(secrets.choice(LETTERS) for _ in range(format.id_length))
    return word if format.id_length == 9 else f"call_{word}"


class ToolAnswer:
    """The calls of one choice."""

    def __init__(self, plan: ToolPlan) -> None:
        self._format = plan.format
        self._parser = plan.parser()
        self.has_calls = False

    @property
    def is_whole(self) -> bool:
        """Whether there are calls, and no cut one among them."""
        return self.has_calls and self._parser.is_whole

    def deltas(self, text: str, is_last: bool) -> list[Json]:
        """The `delta` objects that new text makes."""
        return [self._delta(event) for event in self._events(text, is_last)]

    def message(self, text: str) -> Json:
        """The message of a whole answer."""
        words, calls = "", list[Json]()
        for event in self._events(text, is_last=True):
            match event:
                case Words():
                    words += event.text
                case CallStart():
                    function = {"name": event.name, "arguments": ""}
                    calls.append(self._call(function))
                case CallArguments():
                    calls[-1]["function"]["arguments"] += event.text
        message: Json = {"role": "assistant", "content": words, "refusal": None}
        return message | {"content": words or None, "tool_calls": calls} if calls else message

    def _events(self, text: str, is_last: bool) -> list[Event]:
        events = self._parser.feed(text)
        events += self._parser.finish() if is_last else []
        self.has_calls |= any(isinstance(event, CallStart) for event in events)
        return events

    def _call(self, function: Json) -> Json:
        return {"id": new_call_id(self._format), "type": "function", "function": function}

    def _delta(self, event: Event) -> Json:
        match event:
            case Words():
                return {"content": event.text}
            case CallStart():
                call = self._call({"name": event.name, "arguments": ""})
                return {"tool_calls": [{"index": event.index, **call}]}
            case CallArguments():
                function = {"arguments": event.text}
                return {"tool_calls": [{"index": event.index, "function": function}]}
