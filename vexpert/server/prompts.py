"""From a request's words to token ids: chat template, tokenizer, and the room left for output."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from jinja2 import TemplateError

from vexpert.errors import RequestError
from vexpert.server.interface import EngineProtocol
from vexpert.server.protocol.chat import ChatCompletionRequest

# What a template raises when its variables are of another kind than it expects.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, KeyError, AttributeError)
BYTES_PER_TOKEN = 64  # of UTF-8, at most, on average over a prompt


@dataclass(frozen=True)
class Prompt:
    """A prompt as the engine takes it."""

    text: str | None
    token_ids: list[int]


class PromptBuilder:
    """Builds prompts on one thread of its own: tokenizers are not safe to share, nor quick."""

    def __init__(self, engine: EngineProtocol) -> None:
        self._tokenizer = engine.tokenizer
        self._info = engine.model_info
        self._max_model_len = engine.max_model_len
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vexpert-tokenizer")

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    async def chat(self, body: ChatCompletionRequest) -> Prompt:
        """The prompt of a conversation. Raises RequestError."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._chat, body)

    async def plain(
        self, prompts: Sequence[str | list[int]], add_special_tokens: bool
    ) -> list[Prompt]:
        """Prompts of plain texts or token ids. Raises RequestError."""
        loop = asyncio.get_running_loop()
        work = (prompts, add_special_tokens)
        return await loop.run_in_executor(self._thread, self._plain, *work)

    def _chat(self, body: ChatCompletionRequest) -> Prompt:
        if not getattr(self._tokenizer, "chat_template", None):
            message = "this model has no chat template; use /v1/completions"
            raise RequestError(message, "messages")
        prompting = True if body.add_generation_prompt is None else body.add_generation_prompt
        try:
            text = self._tokenizer.apply_chat_template(
                [message.for_template() for message in body.messages],
                tokenize=False,
                add_generation_prompt=prompting,
                **(body.chat_template_kwargs or {}),
            )
        except TEMPLATE_ERRORS as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise RequestError(message, "messages") from error
        return Prompt(text, self._encode(text, bool(body.add_special_tokens), "messages"))

    def _plain(self, prompts: Sequence[str | list[int]], add_special_tokens: bool) -> list[Prompt]:
        return [
            Prompt(prompt, self._encode(prompt, add_special_tokens, "prompt"))
            if isinstance(prompt, str)
            else Prompt(None, self._check_ids(prompt))
            for prompt in prompts
        ]

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            message = f"{param}: not valid Unicode text: {error.reason}"
            raise RequestError(message, param) from error
        if size > BYTES_PER_TOKEN * self._max_model_len:
            raise self._too_long(f"{size} bytes", param)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _too_long(self, length: str, param: str) -> RequestError:
        limit = f"the model takes {self._max_model_len} tokens with the answer"
        return RequestError(f"{param}: the prompt has {length}, and {limit}; shorten it", param)

    def _check_ids(self, token_ids: list[int]) -> list[int]:
        if len(token_ids) > self._max_model_len:
            raise self._too_long(f"{len(token_ids)} tokens", "prompt")
        for token in token_ids:
            if not 0 <= token < self._info.vocab_size:
                rule = f"token ids go from 0 to {self._info.vocab_size - 1}"
                raise RequestError(f"prompt: token {token}: {rule}", "prompt")
        return token_ids

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))


def output_room(prompt: Prompt, wanted: int | None, max_model_len: int, param: str) -> int:
    """Tokens that may be generated: `wanted`, or all that fit. RequestError if they do not fit.

    `param` is the field that holds the prompt.
    """
    length = len(prompt.token_ids)
    room = max_model_len - length
    if length == 0:
        raise RequestError(f"{param}: the prompt has no tokens; send some text", param)
    if room < 1:
        message = (
            f"{param}: the prompt has {length} tokens, and the model takes {max_model_len} with "
            f"the answer; shorten it by at least {1 - room}"
        )
        raise RequestError(message, param)
    if wanted is not None and wanted > room:
        message = (
            f"max_tokens={wanted}: the prompt has {length} tokens, and the model takes "
            f"{max_model_len} with the answer; use at most {room}"
        )
        raise RequestError(message, "max_tokens")
    return room if wanted is None else wanted
