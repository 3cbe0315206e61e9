"""What a chat request wants of its tools: which, and whether a call must come."""

from dataclasses import dataclass
from typing import Any

from vexpert.config import shown
from vexpert.engine.structured_outputs import StructuredOutputs, enforceable, own_tag
from vexpert.errors import RequestError
from vexpert.server.protocol.chat import ChatCompletionRequest
from vexpert.server.protocol.tools import Tool
from vexpert.server.tools.formats import ToolFormat
from vexpert.server.tools.parser import ToolParser
from vexpert.server.tools.tags import Function, calls_constraint, words_constraint

NO_PARSER = (
    "tools: this server was started without a tool format; start it with --tool-call-parser, "
    "or send tool_choice 'none'"
)


@dataclass(frozen=True)
class ToolPlan:
    """Tools of one request. `is_forced`: the answer is calls and nothing else."""

    format: ToolFormat
    tools: list[Tool]
    is_forced: bool
    single: bool

    @property
    def opening(self) -> str:
        """What the prompt ends with."""
        return self.format.opening if self.is_forced else ""

    def for_template(self) -> list[dict[str, Any]]:
        return [tool.for_template() for tool in self.tools]

    def parser(self) -> ToolParser:
        return ToolParser(self.format, is_open=self.is_forced, single=self.single)

    def constraint(self) -> StructuredOutputs | None:
        """Of the text, where a call is forced or a tool is strict.

        Raises RequestError for a schema that cannot be enforced.
        """
        if not self.is_forced and not any(tool.function.strict for tool in self.tools):
            return None
        functions, sizes = zip(*map(self._function, self.tools), strict=True)
        if self.is_forced:
            tag = calls_constraint(self.format, functions, self.single)
        else:
            tag = words_constraint(self.format, functions)
        return own_tag(tag, sum(sizes), "tools", special_tokens=not self.is_forced)

    def _function(self, tool: Tool) -> tuple[Function, int]:
        """(a function, its size); unless something asks for more, arguments are any object."""
        if self.is_forced or tool.function.strict:
            return _enforced(tool)
        return {"name": tool.function.name, "parameters": {"type": "object"}}, 1


def _enforced(tool: Tool) -> tuple[Function, int]:
    """A function whose arguments keep to its schema."""
    name = tool.function.name
    parameters = tool.function.parameters or {"type": "object", "properties": {}}
    try:
        schema, size = enforceable(parameters, "tools")
    except RequestError as error:
        raise RequestError(f"{error} (parameters of {name!r})", "tools") from error
    if not _may_be_object(parameters):
        raise RequestError(f"tools: parameters of {name!r}: use type 'object'", "tools")
    return {"name": name, "parameters": schema}, size


def _may_be_object(schema: dict[str, Any]) -> bool:
    """Whether the arguments are an object, as far as the schema itself says; a $ref may."""
    return "$ref" in schema or schema.get("type", "properties" in schema and "object") == "object"


def plan_tools(body: ChatCompletionRequest, format: ToolFormat | None) -> ToolPlan | None:
    """The plan, or None for an answer without calls. Raises RequestError."""
    choice = body.tool_choice
    tools = body.tools or []
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice: only with tools", "tool_choice")
        return None
    if choice == "none":
        return None
    if format is None:
        raise RequestError(NO_PARSER, "tools")
    mode, names = _mode(body)
    known = {tool.function.name: tool for tool in tools}
    if len(known) < len(tools):
        raise RequestError("tools: two of them have the same name", "tools")
    unknown = [name for name in names if name not in known]
    if unknown:
        message = f"tool_choice: {shown(unknown[0])} is not among the tools"
        raise RequestError(message, "tool_choice")
    chosen = [known[name] for name in names] or tools
    single = mode == "named" or body.parallel_tool_calls is False
    return ToolPlan(format, chosen, mode != "auto", single)


def _mode(body: ChatCompletionRequest) -> tuple[str, list[str]]:
    """(auto, required or named; the names chosen or none for all)."""
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto", []
    if choice.allowed_tools is not None:
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        return choice.allowed_tools.mode, list(dict.fromkeys(names))
    assert choice.function is not None
    return "named", [choice.function.name]
