"""From a request's words to token ids: chat template, tokenizer, and the room left for output."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from vexpert.engine.template_errors import TEMPLATE_ERRORS
from vexpert.errors import RequestError
from vexpert.server.interface import EngineFacts, Tokenizer
from vexpert.server.protocol.message import Message
from vexpert.server.templates import adapter_template

ToolList = Sequence[dict[str, Any]]
BYTES_PER_TOKEN = 64  # of UTF-8, at most, on average over a prompt


@dataclass(frozen=True)
class Prompt:
    """A prompt as the engine takes it."""

    text: str | None
    token_ids: list[int]


class Conversation(Protocol):
    """What a prompt is made of: a chat request, or a request to count one's tokens."""

    messages: list[Message]
    add_generation_prompt: bool | None
    add_special_tokens: bool | None
    chat_template_kwargs: dict[str, Any] | None


class PromptBuilder:
    """Builds prompts on one thread of its own: tokenizers are not safe to share, nor quick."""

    def __init__(
        self, tokenizer: Tokenizer, facts: EngineFacts, chat_template: str | None = None
    ) -> None:
        """`chat_template`: in place of the tokenizer's own."""
        self._chat_template = chat_template
        self._tokenizer = tokenizer
        self._vocab_size = facts.vocab_size
        self._max_model_len = facts.max_model_len
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vexpert-tokenizer")

    def close(self) -> None:
        # Not waited for: a template that never ends must not keep the server from ending.
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def chat(
        self, body: Conversation, folder: str | None = None, tools: ToolList = (), opening: str = ""
    ) -> Prompt:
        """The prompt of a conversation. Raises RequestError.

        `folder` is the adapter's, whose own chat template counts if it ships one; `tools` are as
        templates take them; the prompt ends with `opening`.
        """
        loop = asyncio.get_running_loop()
        work = (body, folder, tools, opening)
        return await loop.run_in_executor(self._thread, self._chat, *work)

    async def plain(
        self, prompts: Sequence[str | list[int]], add_special_tokens: bool
    ) -> list[Prompt]:
        """Prompts of plain texts or token ids. Raises RequestError."""
        loop = asyncio.get_running_loop()
        work = (prompts, add_special_tokens)
        return await loop.run_in_executor(self._thread, self._plain, *work)

    def _template(self, folder: str | None, tools: ToolList) -> str | None:
        """The template to use; None: the tokenizer's own. Raises RequestError."""
        own = None if folder is None else adapter_template(folder)
        template = own or self._chat_template or getattr(self._tokenizer, "chat_template", None)
        if not template:
            message = "this model has no chat template; use /v1/completions"
            raise RequestError(message, "messages")
        if tools and "tools" not in str(template):
            message = "tools: the chat template of this model takes no tools; leave them out"
            raise RequestError(message, "tools")
        return own or self._chat_template

    def _chat(
        self, body: Conversation, folder: str | None, tools: ToolList, opening: str
    ) -> Prompt:
        template = self._template(folder, tools)
        options: dict[str, Any] = {} if template is None else {"chat_template": template}
        options |= {"tools": list(tools)} if tools else {}
        prompting = True if body.add_generation_prompt is None else body.add_generation_prompt
        try:
            text = self._tokenizer.apply_chat_template(
                [message.for_template() for message in body.messages],
                tokenize=False,
                add_generation_prompt=prompting,
                **options,
                **(body.chat_template_kwargs or {}),
            )
        except TEMPLATE_ERRORS as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise RequestError(message, "messages") from error
        text += opening
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
            if not 0 <= token < self._vocab_size:
                rule = f"token ids go from 0 to {self._vocab_size - 1}"
                raise RequestError(f"prompt: token {token}: {rule}", "prompt")
        return token_ids

    async def pieces(self, token_ids: list[int]) -> list[str]:
        """The text of each token alone. Raises RequestError."""
        loop = asyncio.get_running_loop()
        work = lambda: [self.decode([token]) for token in self._check_ids(token_ids)]  # noqa: E731
        return await loop.run_in_executor(self._thread, work)

    async def text(self, token_ids: list[int]) -> str:
        """The text of `token_ids`. Raises RequestError."""
        loop = asyncio.get_running_loop()
        work = lambda: self.decode(self._check_ids(token_ids))  # noqa: E731
        return await loop.run_in_executor(self._thread, work)

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
