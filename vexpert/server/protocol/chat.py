"""Body of POST /v1/chat/completions."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from vexpert.engine.structured_outputs import StructuredOutputs
from vexpert.errors import RequestError
from vexpert.server.protocol.fields import (
    ListOf,
    Positive,
    StrictModel,
    TopCount,
    at_most,
    first_wrong,
    only,
    refusal,
)
from vexpert.server.protocol.message import (
    MAX_MESSAGES,
    OLD_FUNCTIONS,
    TEXT_ONLY,
    Message,
    check_template_variables,
)
from vexpert.server.protocol.sampling import SamplingFields
from vexpert.server.protocol.tools import ToolChoiceField, Tools


class JsonSchemaFormat(StrictModel):
    """A named JSON schema. `strict` false: objects may have properties that it does not name."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """What the text of the answer is."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise refusal("the field 'json_schema' goes with type 'json_schema', and needs it")
        return self

    def constraint(self) -> StructuredOutputs | None:
        """The same for the sampler. Raises RequestError for a malformed schema."""
        if self.type == "text":
            return None
        form = self.json_schema
        if form is None or form.schema_ is None:
            return StructuredOutputs(json_object=True, param="response_format")
        strict = form.strict is not False
        return StructuredOutputs(json=form.schema_, strict=strict, param="response_format")


class ChatCompletionRequest(SamplingFields):
    """A chat request: OpenAI's fields and vLLM's."""

    route: ClassVar = "/v1/chat/completions"

    messages: Annotated[ListOf[Message], Field(min_length=1), at_most(MAX_MESSAGES)]
    max_completion_tokens: Positive | None = None
    max_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None

    # Labels and hints that change no answer.
    metadata: Annotated[dict[str, str] | None, first_wrong(str)] = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Served in their neutral value only.
    audio: Annotated[Any, only(TEXT_ONLY)] = None
    function_call: Annotated[Any, only(OLD_FUNCTIONS, "none")] = None
    functions: Annotated[Any, only(OLD_FUNCTIONS, [])] = None
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
    service_tier: Annotated[Any, only("there is one tier; use auto", "auto", "default")] = None
    store: Annotated[Any, only("answers are not stored", False)] = None
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
        if self.parallel_tool_calls is not None and not self.tools:
            message = "parallel_tool_calls: only with tools; leave it out"
            raise RequestError(message, "parallel_tool_calls")
        check_template_variables(self.chat_template_kwargs)

    def constraints(self) -> list[StructuredOutputs]:
        """As for all completions, and `response_format`."""
        own = None if self.response_format is None else self.response_format.constraint()
        return super().constraints() + ([] if own is None else [own])

    @property
    def output_limit(self) -> int | None:
        """Tokens to generate at most; None: as many as fit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
