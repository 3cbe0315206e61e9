"""Turns of a conversation, in the body of a chat request."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from vexpert.config import shown
from vexpert.errors import RequestError
from vexpert.server.protocol.fields import (
    ListOf,
    StrictModel,
    at_most,
    is_small,
    only,
    refusal,
)
from vexpert.server.protocol.tools import ToolCall

OLD_FUNCTIONS = "the old function calls are not served; use tools"
TEXT_ONLY = "this server takes and gives text only"
# Arguments of apply_chat_template that are not variables of a template.
RESERVED = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation",
    "conversations", "documents", "max_length", "messages", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens",
    "self", "tokenize", "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip
MAX_MESSAGES = 32768  # each takes some tokens of the context
MAX_CALLS = 1024  # of one message
MAX_PARTS = 8192  # of one message
MAX_VARIABLES = 4096  # values in chat_template_kwargs, of all depths
MAX_VARIABLES_TEXT = 2**18  # characters of their names and texts
MAX_DEPTH = 32
ROLES = ("system", "developer", "user", "assistant", "tool")


def check_template_variables(given: dict[str, Any] | None) -> None:
    """Raise RequestError where `chat_template_kwargs` holds more than variables of a template."""
    given = given or {}
    if not is_small(given, MAX_VARIABLES, MAX_VARIABLES_TEXT, MAX_DEPTH):
        message = (
            f"chat_template_kwargs: at most {MAX_VARIABLES} values and {MAX_VARIABLES_TEXT} "
            f"characters, {MAX_DEPTH} deep"
        )
        raise RequestError(message, "chat_template_kwargs")
    reserved = sorted(RESERVED & set(given))
    if reserved:
        message = f"chat_template_kwargs: {', '.join(reserved)} cannot be set here"
        raise RequestError(message, "chat_template_kwargs")


class TextPart(StrictModel):
    """One piece of a message."""

    type: Literal["text"]
    text: str


def check_content(value: Any) -> Any:
    """Say which kind of part is at fault before pydantic tries the branches of the union."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise refusal("must be a string or a non-empty list of text parts")
    if len(value) > MAX_PARTS:
        raise refusal(f"{len(value)} parts; send at most {MAX_PARTS}")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise refusal(f"a part of type {shown(kind)} is not served: {TEXT_ONLY}")
    return value


def check_role(value: Any) -> Any:
    """Refuse the role of the old function calls by its own reason."""
    if value == "function":
        raise refusal(f"role {value!r}: {OLD_FUNCTIONS}")
    if value not in ROLES:
        raise refusal(f"{shown(value)}: use one of {', '.join(ROLES)}")
    return value


class Message(StrictModel):
    """One turn of the conversation."""

    role: Annotated[str, BeforeValidator(check_role)]
    content: Annotated[str | ListOf[TextPart] | None, BeforeValidator(check_content)] = None
    name: str | None = None  # handed to the chat template
    tool_calls: Annotated[ListOf[ToolCall] | None, at_most(MAX_CALLS)] = None
    tool_call_id: str | None = None
    refusal: Annotated[Any, only("an assistant's refusal cannot be replayed; use content")] = None
    annotations: Annotated[Any, only(TEXT_ONLY, [])] = None  # null in an answer sent back whole
    audio: Annotated[Any, only(TEXT_ONLY)] = None
    function_call: Annotated[Any, only(OLD_FUNCTIONS)] = None

    @model_validator(mode="after")
    def _check(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise refusal(f"tool_calls: only in a message of the assistant, not of {self.role!r}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise refusal("tool_call_id: every message of role 'tool' has it, and no other")
        if self.content is None and not self.tool_calls:
            raise refusal("content: is missing; only an assistant's message with calls has none")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it; text parts are joined by line breaks.

        Raises ValueError for arguments of a call that are not a JSON object.
        """
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        optional = {"name": self.name, "tool_call_id": self.tool_call_id}
        return message | {name: value for name, value in optional.items() if value}


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"tool_calls: arguments of {shown(call.id)} are not JSON: {error}"
        ) from error
    if not isinstance(arguments, dict):
        raise ValueError(f"tool_calls: arguments of {shown(call.id)} are not a JSON object")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
