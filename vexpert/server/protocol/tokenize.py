"""Bodies of POST /tokenize and /detokenize, and of their answers."""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field, model_validator

from vexpert.server.protocol.fields import Int64, ListOf, StrictModel, at_most, refusal
from vexpert.server.protocol.message import MAX_MESSAGES, Message
from vexpert.server.protocol.tools import Tools

MAX_TOKENS = 2**20


class TokenizeRequest(StrictModel):
    """A text, or a conversation in the model's chat template."""

    route: ClassVar = "/tokenize"

    model: str | None = None  # an adapter may ship a chat template of its own
    prompt: str | None = None
    messages: Annotated[ListOf[Message], Field(min_length=1), at_most(MAX_MESSAGES)] | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise refusal("send one of prompt and messages")
        return self


class TokenizeResponse(BaseModel):
    """Token ids, and their texts if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(StrictModel):
    """Token ids."""

    route: ClassVar = "/detokenize"

    model: str | None = None
    tokens: Annotated[ListOf[Int64], Field(max_length=MAX_TOKENS)]


class DetokenizeResponse(BaseModel):
    """Their text, special tokens included."""

    prompt: str
