"""A fake engine with the real one's interface, for tests. Needs no HTTP library.

It answers a word as the demo does: base echoes it, `upper`, `reverse`, `sort` and `shift` change
it. One character is one token. Tests may make it slow, make it fail, or watch it.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jinja2 import TemplateError

from vexpert.config import EngineConfig, shown
from vexpert.engine.outputs import CompletionOutput, EngineStats, Logprob, RequestOutput
from vexpert.engine.sampling_params import SamplingParams
from vexpert.errors import (
    AdapterError,
    AdapterNameError,
    AdapterNotFoundError,
    AdapterReplacedError,
    RequestError,
)
from vexpert.lora.chat_template import ChatTemplate, read_template
from vexpert.lora.info import UNUSABLE, AdapterInfo, AdapterPage, ListedNames

BASE = "vexpert-demo"
EOS = 0
VOCAB_SIZE = 512
ANSWERS: dict[str | None, Callable[[str], str]] = {
    None: str,
    "upper": str.upper,
    "reverse": lambda word: word[::-1],
    "sort": lambda word: "".join(sorted(word)),
    "shift": lambda word: "".join(chr((ord(c) - 96) % 26 + 97) for c in word),
}
NAMES = [name for name in ANSWERS if name]


def right_answer(name: str, word: str) -> str:
    """What `name` answers to a lower-case word."""
    return ANSWERS[None if name == BASE else name](word)


class FakeTokenizer:
    """One character, one token: its code point; token 0 ends a text."""

    chat_template: str | None = "fake, with tools"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokens = [ord(c) if ord(c) < VOCAB_SIZE else ord("?") for c in text]
        return [1, *tokens] if add_special_tokens else tokens

    def decode(self, token_ids: Any, **options: Any) -> str:
        return "".join(chr(token) for token in token_ids if token > 1)

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        note: str = "",
        tools: Any = (),
        chat_template: str | None = None,
        **options: Any,
    ) -> str:
        assert not tokenize
        if conversation[0]["role"] == "assistant":
            raise TemplateError("the first message must not be the assistant's")
        turns = "".join(f"<{m['role']}>{m['content']}\n" for m in conversation)
        note += f"[{chat_template}]" if chat_template else ""
        note += f"<tools>{json.dumps(tools)}\n" if tools else ""
        return note + turns + ("<assistant>" if add_generation_prompt else "")


def word_of(prompt: str) -> str:
    """The last user message of a chat prompt; a plain prompt is its own word."""
    return prompt.rpartition("<user>")[2].partition("\n")[0]


class FakeListing:
    """The adapters of a fake engine in parts; `looks` counts infos that were given away."""

    def __init__(self) -> None:
        self.adapters: dict[str, AdapterInfo] = {}
        self.looks = 0

    def page(
        self, after: str | None, most: int, states: frozenset[str] = frozenset(), part: str = ""
    ) -> AdapterPage:
        found = [
            self.adapters[name]
            for name in sorted(self.adapters)
            if part in name.lower() and (after is None or name > after)
            if not states or self.adapters[name].state in states
        ]
        self.looks += len(found[:most])
        return AdapterPage(found[:most], found[most - 1].name if len(found) > most else None)

    def named(self, names: Sequence[str]) -> Sequence[AdapterInfo]:
        found = [self.adapters[name] for name in names if name in self.adapters]
        self.looks += len(found)
        return found

    def some_names(self, most: int) -> ListedNames:
        names = [name for name, info in self.adapters.items() if info.state not in UNUSABLE]
        self.looks += most
        return ListedNames(sorted(names)[:most], len(names) - most)


@dataclass
class FakeRequest:
    """A request the fake engine runs."""

    request_id: str
    prompt: str
    token_ids: list[int]
    params: SamplingParams
    adapter: str | None
    answer: str
    outputs: list[CompletionOutput] = field(default_factory=list)

    def is_held(self, at: int | None) -> bool:
        return at is not None and max(len(each.token_ids) for each in self.outputs) >= at


class FakeEngine:
    """Answers one character of each running request per step; outputs are live, not copies."""

    def __init__(self, config: EngineConfig | None = None, max_model_len: int = 256) -> None:
        self.config = config or EngineConfig(model="fake-model", max_num_seqs=64)
        self.tokenizer = FakeTokenizer()
        # Of a ModelInfo what the server asks for. Without torch a process starts in half a second.
        self.model_info: Any = SimpleNamespace(name=BASE, vocab_size=VOCAB_SIZE)
        self.max_model_len = max_model_len
        self.step_seconds = 0.0
        self.held_at: int | None = None  # tokens at which a request gains no more; None: at none
        self.load_seconds = 0.0
        self.integrity_checks = 0
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        self.before_load: dict[str, Callable[[], Any]] = {}
        self.failure: Exception | None = None  # raised by the next step
        self.submitted: list[SamplingParams] = []
        self.prompts: list[str | None] = []
        self.aborted: list[str] = []
        self.requests: dict[str, FakeRequest] = {}
        self.step_thread: int | None = None
        self.adapter_listing = FakeListing()
        self._adapters = self.adapter_listing.adapters
        self._templates: dict[str, ChatTemplate] = {}
        self._versions: Counter[str] = Counter()
        self._prompt_tokens = self._tokens = self._steps = 0

    def is_quick(self, params: SamplingParams) -> bool:
        return True

    def prepare(self, params: SamplingParams, is_wanted: Callable[[], bool]) -> None:
        """Nothing to compile: the fake engine constrains no text."""

    def adapter_folder(self, name: str) -> str | None:
        return self._adapters[name].path if name in self._adapters else None

    def adapter_template(self, name: str, may_read: bool = True) -> ChatTemplate | None:
        if name not in self._adapters:
            return ChatTemplate()
        return replace(self._templates[name], version=self._adapters[name].version)

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        adapter: str | None = None,
        version: int | None = None,
    ) -> None:
        if adapter is not None and adapter not in self._adapters:
            raise AdapterNotFoundError(f"no adapter {shown(adapter)}")
        if adapter is not None and version not in (None, self._adapters[adapter].version):
            raise AdapterReplacedError(f"adapter {adapter!r} is another now")
        if params.seed == 13:
            raise RequestError("seed=13: the fake engine is superstitious", "seed")
        text = self.tokenizer.decode(prompt_token_ids) if prompt is None else prompt
        answer = ANSWERS.get(adapter, str)(word_of(text))
        request = FakeRequest(request_id, text, prompt_token_ids, params, adapter, answer)
        request.outputs = [
            CompletionOutput(i, logprobs=None if params.logprobs is None else [])
            for i in range(params.n)
        ]
        self.submitted.append(params)
        self.prompts.append(prompt)
        self.requests[request_id] = request

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return self.requests.pop(request_id, None) is not None

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[RequestOutput]:
        self.step_thread = threading.get_ident()
        time.sleep(self.step_seconds)
        if self.failure is not None:
            raise self.failure
        held_at = self.held_at
        moving = [each for each in self._running() if not each.is_held(held_at)]
        if not moving:
            time.sleep(0.002)  # all stand still
        self._steps += 1
        return [self._advance(request) for request in moving]

    def _running(self) -> list[FakeRequest]:
        return list(self.requests.values())[: self.config.max_num_seqs]

    def _advance(self, request: FakeRequest) -> RequestOutput:
        if not request.outputs[0].token_ids:
            self._prompt_tokens += len(request.token_ids)
        for output in request.outputs:
            if output.finish_reason is None:
                self._append(request, output)
        finished = all(output.finish_reason for output in request.outputs)
        if finished:
            del self.requests[request.request_id]
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.token_ids,
            request.outputs,
            finished,
            request.adapter,
            prompt_logprobs=self._prompt_rows(request),
            num_cached_tokens=3,
        )

    def _append(self, request: FakeRequest, output: CompletionOutput) -> None:
        params, place = request.params, len(output.token_ids)
        token = ord(request.answer[place]) if place < len(request.answer) else EOS
        if token == EOS and (params.ignore_eos or place < params.min_tokens):
            token = ord(".")
        output.token_ids.append(token)
        self._tokens += 1
        if output.logprobs is not None:
            output.logprobs.append(row(token, params.logprobs or 0))
        if token == EOS:
            output.finish_reason = "stop"
            return
        output.text += chr(token)
        self._check_stops(params, output, token)

    def _check_stops(self, params: SamplingParams, output: CompletionOutput, token: int) -> None:
        if token in params.stop_token_ids:
            output.finish_reason, output.stop_reason = "stop", token
        for stop in params.stop:
            if output.text.endswith(stop):
                output.finish_reason, output.stop_reason = "stop", stop
                if not params.include_stop_str_in_output:
                    output.text = output.text.removesuffix(stop)
        if output.finish_reason is None and len(output.token_ids) == params.max_tokens:
            output.finish_reason = "length"

    def _prompt_rows(self, request: FakeRequest) -> Any:
        count = request.params.prompt_logprobs
        if count is None:
            return None
        return [None, *(row(token, count) for token in request.token_ids[1:])]

    def load_adapter(
        self, name: str, path: str, *, load_inplace: bool = False, **options: Any
    ) -> AdapterInfo:
        self.calls.append(("load", name, {"load_inplace": load_inplace, **options}))
        self.before_load.get(name, lambda: None)()
        time.sleep(self.load_seconds)
        if name in self._adapters and not load_inplace:
            raise AdapterNameError(f"adapter {name!r} is loaded already; set load_inplace")
        if not (Path(path) / "adapter_config.json").is_file() and path != "bundled":
            raise AdapterError(f"{path}: no adapter_config.json there; give an adapter's folder")
        self._templates[name] = read_template(Path(path))
        self._versions[name] += 1
        version = self._versions[name]
        self._adapters[name] = AdapterInfo(name, version, path, "device", 8, 1024, 1024, 0)
        return self._adapters[name]

    def register_adapter(self, name: str, path: str, **options: Any) -> AdapterInfo:
        info = self.load_adapter(name, path, **options)
        self.calls.append(("register", name, options))
        return info

    def check_integrity(self) -> None:
        self.integrity_checks += 1

    def unload_adapter(self, name: str, *, drain_seconds: float | None = None) -> None:
        self.calls.append(("unload", name, {"drain_seconds": drain_seconds}))
        if name not in self._adapters:
            raise AdapterNotFoundError(f"no adapter {shown(name)}")
        del self._adapters[name]

    def adapters(self) -> list[AdapterInfo]:
        return list(self._adapters.values())

    def stats(self) -> EngineStats:
        running = self._running()
        waiting = list(self.requests.values())[len(running) :]
        return EngineStats(
            num_running=len(running),
            num_waiting=len(waiting),
            running_adapters=tuple(sorted({r.adapter for r in running if r.adapter})),
            waiting_adapters=tuple(sorted({r.adapter for r in waiting if r.adapter})),
            max_loras=8,
            kv_blocks_total=100,
            kv_blocks_used=len(running),
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._tokens,
            prefix_hit_tokens=0,
            prefix_query_tokens=self._prompt_tokens,
            preemptions=0,
            steps=self._steps,
        )


def row(token: int, count: int) -> dict[int, Logprob]:
    """The chosen token, likeliest of all, and the next ones."""
    tokens = [token, *(token + i for i in range(1, count))]
    return {
        t: Logprob(float("-inf") if i == 3 else -0.1 - i, i + 1, chr(t) if t > 1 else "")
        for i, t in enumerate(tokens)
    }


def make_fake_engine() -> FakeEngine:
    """A fake engine with the demo's four adapters."""
    engine = FakeEngine()
    for name in NAMES:
        engine.load_adapter(name, "bundled")
    return engine
