"""Body of POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vexpert.errors import RequestError
from vexpert.server.protocol.fields import Positive, StrictModel, TopCount, only, refusal
from vexpert.server.protocol.sampling import SamplingFields

NO_TOOLS = "tool calling is not served; leave the field out"
TEXT_ONLY = "this server takes and gives text only"
ROLES = ("system", "developer", "user", "assistant")
# Arguments of apply_chat_template that are not variables of a template.
RESERVED = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation",
    "documents", "max_length", "messages", "padding", "return_assistant_tokens_mask",
    "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip


class TextPart(StrictModel):
    """One piece of a message."""

    type: Literal["text"]
    text: str


def check_content(value: Any) -> Any:
    """Say which kind of part is at fault before pydantic tries the branches of the union."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise refusal("must be a string or a non-empty list of text parts")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise refusal(f"a part of type {kind!r} is not served: {TEXT_ONLY}")
    return value


def check_role(value: Any) -> Any:
    """Refuse the roles of tool calling by their own reason."""
    if value in ("tool", "function"):
        raise refusal(f"role {value!r}: {NO_TOOLS}")
    if value not in ROLES:
        raise refusal(f"{value!r}: use one of {', '.join(ROLES)}")
    return value


class Message(StrictModel):
    """One turn of the conversation."""

    role: Annotated[str, BeforeValidator(check_role)]
    content: Annotated[str | list[TextPart], BeforeValidator(check_content)]
    name: str | None = None  # handed to the chat template
    refusal: Annotated[Any, only("an assistant's refusal cannot be replayed; use content")] = None
    audio: Annotated[Any, only(TEXT_ONLY)] = None
    function_call: Annotated[Any, only(NO_TOOLS)] = None
    tool_calls: Annotated[Any, only(NO_TOOLS, [])] = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates take it; text parts are joined by line breaks."""
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({"name": self.name} if self.name else {})


class ChatCompletionRequest(SamplingFields):
    """A chat request: OpenAI's fields and vLLM's."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    max_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Labels and hints that change no answer.
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None

    # Served in their neutral value only.
    audio: Annotated[Any, only(TEXT_ONLY)] = None
    function_call: Annotated[Any, only(NO_TOOLS, "none")] = None
    functions: Annotated[Any, only(NO_TOOLS, [])] = None
    modalities: Annotated[Any, only(TEXT_ONLY, ["text"])] = None
    moderation: Annotated[Any, only("moderation is not offered")] = None
    prediction: Annotated[Any, only("predicted outputs are not offered")] = None
    prompt_cache_options: Annotated[Any, only("the prefix cache has no request options")] = None
    prompt_cache_retention: Annotated[
        Any, only("the prefix cache is in memory only", "in_memory")
    ] = None
    reasoning_effort: Annotated[
        Any, only("set what the model's template knows in chat_template_kwargs", "none")
    ] = None
    response_format: Annotated[
        Any, only("structured output is not served; use text", {"type": "text"})
    ] = None
    service_tier: Annotated[Any, only("there is one tier; use auto", "auto", "default")] = None
    store: Annotated[Any, only("answers are not stored", False)] = None
    tool_choice: Annotated[Any, only(NO_TOOLS, "none", "auto")] = None
    tools: Annotated[Any, only(NO_TOOLS, [])] = None
    verbosity: Annotated[Any, only("verbosity cannot be set; ask in words", "medium")] = None
    web_search_options: Annotated[Any, only("web search is not offered")] = None

    def check(self) -> None:
        """Raise RequestError for fields that contradict each other."""
        self.check_stream_fields()
        both = (self.max_completion_tokens, self.max_tokens)
        if None not in both and both[0] != both[1]:
            message = f"max_tokens={both[1]} contradicts max_completion_tokens={both[0]}; send one"
            raise RequestError(message, "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs: only with logprobs=true", "top_logprobs")
        reserved = sorted(RESERVED & set(self.chat_template_kwargs or {}))
        if reserved:
            message = f"chat_template_kwargs: {', '.join(reserved)} cannot be set here"
            raise RequestError(message, "chat_template_kwargs")

    @property
    def output_limit(self) -> int | None:
        """Tokens to generate at most; None: as many as fit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
