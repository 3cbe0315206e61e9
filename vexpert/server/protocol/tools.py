"""Tools in the body of a chat request: their definitions, the choice among them, their calls."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from vexpert.config import shown
from vexpert.server.protocol.fields import ListOf, StrictModel, at_most, refusal

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
MAX_TOOLS = 128  # OpenAI's


def check_kind(value: Any) -> Any:
    """Say which kind of tool is not served."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind != "function":
        raise refusal(f"a tool of type {shown(kind)} is not served; use type 'function'")
    return value


class FunctionDefinition(StrictModel):
    """What a function is for and what it takes."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; none: no parameters
    strict: bool | None = None  # a call that is not forced keeps to the schema as well


class Tool(StrictModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": function}


Tools = Annotated[ListOf[Annotated[Tool, BeforeValidator(check_kind)]], Field(max_length=MAX_TOOLS)]


class FunctionName(StrictModel):
    """Names a function."""

    name: str


class NamedTool(StrictModel):
    """Names one tool."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(StrictModel):
    """The tools of a request that this turn may use."""

    mode: Literal["auto", "required"]
    tools: Annotated[
        ListOf[Annotated[NamedTool, BeforeValidator(check_kind)]],
        Field(min_length=1),
        at_most(MAX_TOOLS),
    ]


class ToolChoice(StrictModel):
    """One tool that must be called, or those that may be."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _check(self) -> "ToolChoice":
        other = "allowed_tools" if self.type == "function" else "function"
        if getattr(self, self.type) is None or getattr(self, other) is not None:
            raise refusal(f"type {self.type!r} goes with the field {self.type!r} alone")
        return self


def check_choice(value: Any) -> Any:
    """One message for the four forms, instead of two findings of pydantic."""
    modes = ("none", "auto", "required")
    if isinstance(value, dict) or value in (None, *modes):
        return value
    raise refusal(f"use one of {', '.join(modes)}, or an object that names a function")


ToolChoiceField = Annotated[
    ToolChoice | Literal["none", "auto", "required"] | None, BeforeValidator(check_choice)
]


class FunctionCall(StrictModel):
    """A call's function and its arguments, JSON text."""

    name: str
    arguments: str


class ToolCall(StrictModel):
    """A call of an earlier answer."""

    id: str
    type: Literal["function"]
    function: FunctionCall
