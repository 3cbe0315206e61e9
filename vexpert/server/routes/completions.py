"""POST /v1/completions."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from vexpert.engine.outputs import LogprobRow
from vexpert.errors import AdapterNotFoundError
from vexpert.server.answer import Head, answer, new_id
from vexpert.server.events import Json
from vexpert.server.generation import Job
from vexpert.server.logprobs import completion_logprobs, prompt_logprobs
from vexpert.server.places import Places
from vexpert.server.progress import Delta, Update
from vexpert.server.prompts import Prompt, PromptBuilder, output_room
from vexpert.server.protocol.completion import DEFAULT_MAX_TOKENS, CompletionRequest
from vexpert.server.service import Service, service_of

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one or many prompts with the base model or with the adapter that `model` names."""
    service = service_of(request)
    body.check()
    service.admit(request, body.model, len(body.prompts) * (body.n or 1))
    job = await _job(service, body)
    formatter = CompletionFormatter(body, job, service.prompts)
    try:
        return await answer(request, service, job, formatter, body.model)
    except AdapterNotFoundError as error:
        raise await service.unknown_model(request, body.model) from error


async def _job(service: Service, body: CompletionRequest) -> Job:
    special = True if body.add_special_tokens is None else body.add_special_tokens
    tells_offsets = bool(body.echo) and body.logprobs is not None
    prompts = await service.prompts.plain(body.prompts, special, tells_offsets)
    # An echo of the prompt alone still takes one step, which gives its log-probabilities.
    wanted = 1 if body.max_tokens == 0 else body.max_tokens
    limits = [_limit(prompt, wanted, service.facts.max_model_len) for prompt in prompts]
    asked: dict[str, Any] = {"logprobs": body.logprobs, "structured_outputs": body.constraint()}
    if body.echo and body.logprobs is not None:
        asked["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    params = [
        body.build_params(
            service.options.sampling_defaults, service.facts.vocab_size, max_tokens=limit, **asked
        )
        for limit in limits
    ]
    return Job(
        new_id("cmpl"),
        prompts,
        params,
        service.adapter_of(body.model),
        stream=bool(body.stream),
        timeout=service.options.time_limit,
        prompt_only=body.max_tokens == 0,
    )


def _limit(prompt: Prompt, wanted: int | None, max_model_len: int) -> int:
    room = output_room(prompt, wanted, max_model_len, "prompt")
    return min(room, DEFAULT_MAX_TOKENS) if wanted is None else room


class CompletionFormatter:
    """Text completions, whole and in chunks. Choice i * n + k is completion k of prompt i."""

    def __init__(self, body: CompletionRequest, job: Job, prompts: PromptBuilder) -> None:
        self.include_usage = body.include_usage
        self._head = Head(job.request_id, body.model)
        self._n = body.n or 1
        self._count = body.logprobs
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._echo = bool(body.echo)
        self._prompts = job.prompts
        self._decode = prompts.decode
        self._skips = job.params[0].skip_special_tokens
        self._new_places = prompts.places
        self._begun: set[int] = set()  # choices
        self._places: dict[int, Places] = {}  # of choices

    def whole(self, updates: dict[int, Update]) -> Json:
        choices = [
            self._choice(i, delta, updates[i])
            for i in sorted(updates)
            for delta in updates[i].deltas
        ]
        return self._head.fields("text_completion") | {"choices": choices}

    def chunks(self, i: int, update: Update) -> Iterator[Json]:
        for delta in update.deltas:
            choice = self._choice(i, delta, update)
            if choice["text"] or choice["finish_reason"] or choice["logprobs"]:
                yield self._head.fields("text_completion") | {"choices": [choice]}

    def choice_of_text(self, i: int, delta: Delta) -> int | None:
        index = i * self._n + delta.index
        told_more = self._count is not None or self._wants_prompt_logprobs
        is_first = self._echo and index not in self._begun
        return None if told_more or is_first or delta.finish_reason is not None else index

    def last_chunk(self) -> Json:
        return self._head.fields("text_completion") | {"choices": []}

    def _choice(self, i: int, delta: Delta, update: Update) -> Json:
        index = i * self._n + delta.index
        first = index not in self._begun
        self._begun.add(index)
        text = (self._prompt_text(i) if self._echo and first else "") + delta.text
        rows = update.prompt_logprobs if self._echo and first else None
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(i, delta, rows),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._wants_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(update.prompt_logprobs or ())
        return choice

    def _prompt_text(self, i: int) -> str:
        prompt = self._prompts[i]
        return self._decode(prompt.token_ids) if prompt.text is None else prompt.text

    def _logprobs(
        self, i: int, delta: Delta, prompt_rows: Sequence[LogprobRow | None] | None
    ) -> Json | None:
        if self._count is None or (prompt_rows is None and not delta.token_ids):
            return None
        prompt = self._prompts[i].token_ids if prompt_rows else []
        tokens, rows = [*prompt, *delta.token_ids], [*(prompt_rows or ()), *(delta.logprobs or ())]
        texts = [
            self._decode([token]) if row is None else cast(LogprobRow, row)[token].decoded_token
            for token, row in zip(tokens, rows, strict=True)
        ]
        starts = self._prompts[i].starts if prompt else ()
        assert starts is not None, "not asked for"
        offsets = [*starts, *self._offsets(i, delta)]
        return completion_logprobs(tokens, rows, texts, self._count, offsets)

    def _offsets(self, i: int, delta: Delta) -> list[int]:
        """Of new tokens; what of their text is held back for a stop string counts."""
        index = i * self._n + delta.index
        if index not in self._places:
            start = len(self._prompt_text(i)) if self._echo else 0
            self._places[index] = self._new_places(self._skips, start)
        return self._places[index].append(delta.token_ids)
