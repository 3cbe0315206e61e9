"""The Python API: prompts in, finished outputs back, in order."""

import itertools
from collections.abc import Sequence
from types import NoneType
from typing import Any, TypeVar

from vexpert.config import EngineConfig, shown
from vexpert.engine.engine import Engine
from vexpert.engine.outputs import RequestOutput
from vexpert.engine.sampling_params import SamplingParams
from vexpert.engine.template_errors import TEMPLATE_ERRORS
from vexpert.engine.turns import Turns
from vexpert.engine.validation import check_conversation, check_list, check_text
from vexpert.errors import RequestError
from vexpert.lora.types import AdapterInfo

T = TypeVar("T")
Prompt = str | dict[str, Any]  # {"prompt": text} or {"prompt_token_ids": [...]}
Message = dict[str, Any]


class LLM:
    """A model with its adapters in this process; the options are those of `EngineConfig`.

    Any thread may call. `generate` and `chat` take turns, one call at a time in order of arrival;
    adapters are loaded, listed and unloaded meanwhile.
    """

    def __init__(self, model: str = "", **options: Any) -> None:
        self._set_up(Engine(EngineConfig.from_options(model=model, **options)))

    @classmethod
    def from_engine(cls, engine: Engine) -> "LLM":
        """An LLM on an engine that exists."""
        llm = cls.__new__(cls)
        llm._set_up(engine)
        return llm

    def _set_up(self, engine: Engine) -> None:
        self.engine = engine
        self._ids = itertools.count()
        self._turns = Turns("LLM.generate or LLM.chat")  # the engine's steps are one thread's

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """One finished output for each prompt, in order.

        `sampling_params` and `adapter` are one for all, or one for each prompt; adapter None is
        the base model. Raises RequestError or AdapterNotFoundError before anything runs, and
        RequestError where the weights of an adapter, or the options, leave no token to choose;
        AdapterGoneError where its adapter cannot be read, or is unloaded meanwhile and has to end;
        UnsupportedError within a call on the same thread.
        """
        batch: list[Prompt] = (
            [prompts] if isinstance(prompts, str | dict) else check_list("prompts", prompts)
        )

        def run() -> list[RequestOutput]:  # with the tokenizer, which is one thread's too
            parsed = [self._parse(prompt) for prompt in batch]
            return self._run(parsed, sampling_params, adapter, use_tqdm)

        return self._turns.run(run)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or a list of them, by the tokenizer's template."""
        conversations: list[Any] = check_list("messages", messages)
        if conversations and isinstance(conversations[0], dict):
            conversations = [conversations]

        def run() -> list[RequestOutput]:
            parsed = [self._render(conversation) for conversation in conversations]
            return self._run(parsed, sampling_params, adapter, use_tqdm)

        return self._turns.run(run)

    def load_adapter(self, name: str, path: str | None = None, **options: Any) -> AdapterInfo:
        """Load an adapter under a name, from a folder or from memory.

        Options: `tensors` (name -> tensor, as in adapter_model.safetensors) with `config` (the
        fields of adapter_config.json) instead of `path`; lora_B_layout; load_inplace; pinned.
        """
        return self.engine.load_adapter(name, path, **options)

    def register_adapter(self, name: str, path: str, **options: Any) -> AdapterInfo:
        """As `load_adapter` from a folder, which is read when a request first needs it."""
        return self.engine.register_adapter(name, path, **options)

    def unload_adapter(self, name: str, *, drain_seconds: float | None = None) -> None:
        """Forget an adapter; see `Engine.unload_adapter`."""
        self.engine.unload_adapter(name, drain_seconds=drain_seconds)

    def adapters(self) -> list[AdapterInfo]:
        """All loaded adapters."""
        return self.engine.adapters()

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return self.engine.tokenizer

    def _parse(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if not isinstance(prompt, dict) or prompt.keys() not in ({"prompt"}, {"prompt_token_ids"}):
            raise RequestError(
                f"prompt {shown(prompt)}: give a string or {{'prompt_token_ids': [...]}}", "prompt"
            )
        if "prompt_token_ids" in prompt:
            return None, prompt["prompt_token_ids"]
        text = check_text("prompt", prompt["prompt"])
        return text, self.engine.tokenizer.encode(text)

    def _render(self, conversation: Any) -> tuple[str, list[int]]:
        tokenizer = self.engine.tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            raise RequestError("the tokenizer has no chat template: use generate()", "messages")
        conversation = check_conversation(conversation)
        try:
            text = tokenizer.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=False
            )
        except TEMPLATE_ERRORS as error:
            raise RequestError(
                f"the chat template refuses the messages: {error}", "messages"
            ) from error
        check_text("messages", text)
        return text, tokenizer.encode(text, add_special_tokens=False)

    def _run(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if adapter is None or isinstance(adapter, str):
            adapter = [adapter] * len(prompts)
        all_params = _one_each(sampling_params, len(prompts), "sampling_params", (SamplingParams,))
        names = _one_each(adapter, len(prompts), "adapter", (str, NoneType))
        ids: list[str] = []
        try:
            for (text, tokens), params, name in zip(prompts, all_params, names, strict=True):
                request_id = f"llm-{next(self._ids)}"
                self.engine.add_request(request_id, text, tokens, params, name)
                ids.append(request_id)
            finished = self._finish(len(ids), use_tqdm)
        finally:  # a refused prompt, an error or Ctrl-C leaves nothing behind
            for request_id in ids:
                self.engine.abort(request_id)
        return [finished[request_id] for request_id in ids]

    def _finish(self, count: int, use_tqdm: bool) -> dict[str, RequestOutput]:
        bar = _progress_bar(count) if use_tqdm else None
        finished: dict[str, RequestOutput] = {}
        try:
            while len(finished) < count:
                new = {out.request_id: out for out in self.engine.step() if out.finished}
                for output in new.values():
                    if (failure := output.failure) is not None:
                        raise failure
                finished |= new
                if bar is not None:
                    bar.update(len(new))
        finally:
            if bar is not None:
                bar.close()
        return finished


def _one_each(values: Sequence[T], count: int, name: str, kinds: tuple[type, ...]) -> list[T]:
    checked: list[T] = check_list(name, values)
    if len(checked) != count:
        raise RequestError(f"{name}: {len(checked)} for {count} prompts; give one, or one each")
    for value in checked:
        if not isinstance(value, kinds):
            raise RequestError(f"{name}: {shown(value)} is no {kinds[0].__name__}", name)
    return checked


def _progress_bar(total: int) -> Any:
    from tqdm.auto import tqdm  # not transformers' own: that one may be switched off for log files

    return tqdm(total=total, desc="requests", unit="req")
