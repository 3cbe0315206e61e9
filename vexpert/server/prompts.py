"""From a request's words to token ids: chat template, tokenizer, and the room left for output."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from vexpert.engine.detokenizer import Detokenizer
from vexpert.engine.template_errors import TEMPLATE_ERRORS
from vexpert.errors import RequestError
from vexpert.lora.chat_template import ChatTemplate
from vexpert.server.daemon_pool import DaemonPool
from vexpert.server.interface import EngineFacts, Tokenizer
from vexpert.server.places import Places
from vexpert.server.protocol.message import Message
from vexpert.server.renderer import Renderer
from vexpert.server.structure import excess

T = TypeVar("T")
ToolList = Sequence[dict[str, Any]]
BYTES_PER_TOKEN = 64  # of UTF-8, at most, on average over a prompt


@dataclass(frozen=True)
class Prompt:
    """A prompt as the engine takes it."""

    text: str | None
    token_ids: Sequence[int]
    starts: tuple[int, ...] | None = None  # where each token begins in the text, if asked


class Conversation(Protocol):
    """What a prompt is made of: a chat request, or a request to count one's tokens."""

    @property
    def messages(self) -> list[Message] | None: ...

    add_generation_prompt: bool | None
    add_special_tokens: bool | None
    chat_template_kwargs: dict[str, Any] | None


@dataclass(frozen=True)
class Own:
    """An adapter's chat template, and who asks to have it rendered."""

    template: ChatTemplate
    caller: str = ""

    def text(self) -> str | None:
        """None: the adapter ships no template. Raises RequestError for one that cannot be read."""
        if self.template.fault is not None:
            message = f"the adapter's chat template {self.template.fault}"
            raise RequestError(message, "model")
        return self.template.text


class PromptBuilder:
    """Builds prompts on one thread of its own: tokenizers are not safe to share, nor quick.

    Templates of adapters are rendered elsewhere, where they can be ended.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        facts: EngineFacts,
        chat_template: str | None = None,
    ) -> None:
        """`chat_template`: in place of the tokenizer's own."""
        self._chat_template = chat_template
        self._tokenizer = tokenizer
        self._vocab_size = facts.vocab_size
        self._max_model_len = facts.max_model_len
        self._thread = DaemonPool(1, "vexpert-tokenizer")
        self._renderer = Renderer(BYTES_PER_TOKEN * facts.max_model_len)

    def close(self) -> None:
        self._thread.close()
        self._renderer.close()

    async def chat(
        self, body: Conversation, own: Own | None = None, tools: ToolList = (), opening: str = ""
    ) -> Prompt:
        """The prompt of a conversation. Raises RequestError.

        `own`: the adapter's template, which counts if it has one. `tools` are as templates take
        them; the prompt ends with `opening`.
        """
        template = None if own is None else own.text()
        self._check_template(template, tools)
        if own is None or template is None:
            text = await self._on_thread(self._render, body, tools)
        else:
            variables = await self._on_thread(self._variables, body, tools)
            rendering = self._renderer.submit(template, variables, own.caller)
            text = await asyncio.wrap_future(rendering)
        return await self._on_thread(self._whole, text + opening, bool(body.add_special_tokens))

    async def _on_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.wrap_future(self._thread.submit(function, *arguments))

    async def plain(
        self,
        prompts: Sequence[str | list[int]],
        add_special_tokens: bool,
        with_starts: bool = False,
    ) -> list[Prompt]:
        """Prompts of plain texts or token ids. Raises RequestError."""
        return await self._on_thread(self._plain, prompts, add_special_tokens, with_starts)

    def _check_template(self, own: str | None, tools: ToolList) -> None:
        """Raise RequestError where there is no template, or it takes no tools."""
        template = own or self._chat_template or getattr(self._tokenizer, "chat_template", None)
        if not template:
            message = "this model has no chat template; use /v1/completions"
            raise RequestError(message, "messages")
        if tools and "tools" not in str(template):
            message = "tools: the chat template of this model takes no tools; leave them out"
            raise RequestError(message, "tools")

    def _render(self, body: Conversation, tools: ToolList) -> str:
        """The text of a conversation by the operator's template or the tokenizer's own."""
        given = self._chat_template
        options: dict[str, Any] = {} if given is None else {"chat_template": given}
        options |= {"tools": list(tools)} if tools else {}
        messages = _messages(body)
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=_is_prompting(body),
                **options,
                **(body.chat_template_kwargs or {}),
            )
        except TEMPLATE_ERRORS as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise RequestError(message, "messages") from error
        return str(text)

    def _variables(self, body: Conversation, tools: ToolList) -> dict[str, Any]:
        """What apply_chat_template would give to a template."""
        special = getattr(self._tokenizer, "special_tokens_map", {})
        variables = {name: str(token) for name, token in special.items() if name.endswith("token")}
        variables |= body.chat_template_kwargs or {}
        return variables | {
            "messages": _messages(body),
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": _is_prompting(body),
        }

    def _whole(self, text: str, add_special_tokens: bool) -> Prompt:
        return Prompt(text, self._encode(text, add_special_tokens, "messages"))

    def _plain(
        self, prompts: Sequence[str | list[int]], add_special_tokens: bool, with_starts: bool
    ) -> list[Prompt]:
        made = [
            Prompt(prompt, self._encode(prompt, add_special_tokens, "prompt"))
            if isinstance(prompt, str)
            else Prompt(None, self._check_ids(prompt))
            for prompt in prompts
        ]
        if not with_starts:
            return made
        return [replace(each, starts=self._starts(each, add_special_tokens)) for each in made]

    def _starts(self, prompt: Prompt, add_special_tokens: bool) -> tuple[int, ...]:
        """Where the tokens begin."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if prompt.text is not None and backend is not None:
            # Of a batch: for that alone others may run meanwhile.
            [encoding] = backend.encode_batch([prompt.text], add_special_tokens=add_special_tokens)
            if encoding.ids == prompt.token_ids:
                return _monotone(encoding.offsets)
        places = self.places(skip_special_tokens=False).append(prompt.token_ids)
        return tuple(places if prompt.text is None else (min(p, len(prompt.text)) for p in places))

    def places(self, skip_special_tokens: bool, start: int = 0) -> Places:
        """Where tokens of a text begin that goes on at `start`."""
        return Places(Detokenizer(self._tokenizer, skip_special_tokens), start)

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
        what = "the text" if param == "tokens" else "the prompt"
        return RequestError(f"{param}: {what} has {length}, and {limit}; shorten it", param)

    def _check_ids(self, token_ids: Sequence[int], param: str = "prompt") -> Sequence[int]:
        if len(token_ids) > self._max_model_len:
            raise self._too_long(f"{len(token_ids)} tokens", param)
        for token in token_ids:
            if not 0 <= token < self._vocab_size:
                rule = f"token ids go from 0 to {self._vocab_size - 1}"
                raise RequestError(f"{param}: token {token}: {rule}", param)
        return token_ids

    async def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token alone. Raises RequestError."""
        work = lambda: [self.decode([token]) for token in self._check_ids(token_ids)]  # noqa: E731
        return await self._on_thread(work)

    async def text(self, token_ids: list[int]) -> str:
        """The text of `token_ids`. Raises RequestError."""
        work = lambda: self.decode(self._check_ids(token_ids, "tokens"))  # noqa: E731
        return await self._on_thread(work)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids))


def _monotone(spans: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The starts of tokens; one of no text, (0, 0), begins where the next could."""
    starts, place = list[int](), 0
    for start, end in spans:
        starts.append(max(start, starts[-1] if starts else 0) if end > start else place)
        place = max(place, end)
    return tuple(starts)


def _messages(body: Conversation) -> list[dict[str, Any]]:
    """Raises RequestError for a call whose arguments are no object, or too much at once."""
    messages = body.messages
    assert messages is not None, "a request has either messages or a prompt"
    calls = (call for message in messages for call in message.tool_calls or ())
    texts = [call.function.arguments.encode("utf-8", "surrogatepass") for call in calls]
    if (too_much := excess(texts)) is not None:
        message = f"messages: the arguments of tool_calls have more than {too_much}"
        raise RequestError(message, "messages")
    try:
        return [message.for_template() for message in messages]
    except ValueError as error:
        raise RequestError(f"messages: {error}", "messages") from error


def _is_prompting(body: Conversation) -> bool:
    return True if body.add_generation_prompt is None else body.add_generation_prompt


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
