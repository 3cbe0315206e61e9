"""POST /v1/chat/completions."""

import contextlib
from collections.abc import Iterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from vexpert.engine.structured_outputs import StructuredOutputs
from vexpert.errors import AdapterNotFoundError, AdapterReplacedError, RequestError
from vexpert.server.answer import Head, answer, new_id
from vexpert.server.events import Json
from vexpert.server.generation import Job
from vexpert.server.logprobs import chat_logprobs, prompt_logprobs
from vexpert.server.progress import Delta, Update
from vexpert.server.prompts import output_room
from vexpert.server.protocol.chat import ChatCompletionRequest
from vexpert.server.service import service_of
from vexpert.server.tools.answer import ToolAnswer
from vexpert.server.tools.plan import ToolPlan, plan_tools

router = APIRouter()
MOST_TRIES = 3  # to have an adapter's prompt ready before the adapter is loaded anew


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation with the base model or with the adapter that `model` names.

    Sampling defaults are those of the model's generation_config.json, else OpenAI's: temperature 1.
    For the likeliest answer send temperature 0. Without a limit the answer may fill the context.
    """
    service = service_of(request)
    body.check()
    service.admit(request, body.model)
    plan = plan_tools(body, service.tool_format())
    for _ in range(MOST_TRIES - 1):
        with contextlib.suppress(AdapterReplacedError):
            return await _answer(request, body, plan)
    return await _answer(request, body, plan)


async def _answer(request: Request, body: ChatCompletionRequest, plan: ToolPlan | None) -> Response:
    """Raises AdapterReplacedError if the prompt is not of the adapter's newest version any more."""
    service = service_of(request)
    job = await _job(request, body, plan)
    formatter = ChatFormatter(body, job.request_id, plan)
    try:
        return await answer(request, service, job, formatter, body.model)
    except AdapterNotFoundError as error:
        raise await service.unknown_model(request, body.model) from error


def _constraint(body: ChatCompletionRequest, plan: ToolPlan | None) -> StructuredOutputs | None:
    """Of the answer's text. Raises RequestError where tools and another constraint meet."""
    wanted = body.constraint()
    if plan is None:
        return wanted
    if wanted is not None:
        message = f"{wanted.param}: not together with tools, which decide the form of the answer"
        raise RequestError(message, wanted.param)
    return plan.constraint()


async def _job(request: Request, body: ChatCompletionRequest, plan: ToolPlan | None) -> Job:
    service = service_of(request)
    constraint = _constraint(body, plan)
    adapter = service.adapter_of(body.model)
    restarts = service.engine.restarts
    own = await service.own_template(request, adapter)
    tools, opening = ([], "") if plan is None else (plan.for_template(), plan.opening)
    prompt = await service.prompts.chat(body, own, tools, opening)
    if own is not None and service.engine.restarts != restarts:  # it numbers versions anew
        raise AdapterReplacedError("the engine was started again meanwhile; send it again")
    room = output_room(prompt, body.output_limit, service.facts.max_model_len, "messages")
    params = body.build_params(
        service.options.sampling_defaults,
        service.facts.vocab_size,
        max_tokens=room,
        logprobs=body.wanted_logprobs,
        structured_outputs=constraint,
        # The marks of calls may be special tokens.
        **({} if plan is None else {"skip_special_tokens": False}),
    )
    return Job(
        new_id("chatcmpl"),
        [prompt],
        [params],
        adapter,
        stream=bool(body.stream),
        timeout=service.options.time_limit,
        version=None if own is None else own.template.version,
    )


class ChatFormatter:
    """Chat completions, whole and in chunks."""

    def __init__(self, body: ChatCompletionRequest, id: str, plan: ToolPlan | None = None) -> None:
        self._plan = plan
        self._choices: dict[int, ToolAnswer] = {}
        self.include_usage = body.include_usage
        self._head = Head(id, body.model)
        self._count = body.wanted_logprobs
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._begun: set[int] = set()  # choices whose role was sent

    def whole(self, updates: dict[int, Update]) -> Json:
        update = updates[0]
        choices = [
            {
                "index": delta.index,
                "message": self._message(delta),
                **self._ending(delta),
            }
            for delta in update.deltas
        ]
        result = self._head.fields("chat.completion") | {"choices": choices}
        if self._wants_prompt_logprobs:
            result["prompt_logprobs"] = prompt_logprobs(update.prompt_logprobs or ())
        return result

    def chunks(self, i: int, update: Update) -> Iterator[Json]:
        for delta in update.deltas:
            if delta.index not in self._begun:
                self._begun.add(delta.index)
                role = {"role": "assistant", "content": ""}
                begin = {"index": delta.index, "delta": role, "logprobs": None}
                yield self._chunk(begin | {"finish_reason": None})
            yield from self._parts(delta)

    def choice_of_text(self, i: int, delta: Delta) -> int | None:
        is_plain = self._plan is None and self._count is None and delta.finish_reason is None
        return delta.index if is_plain and delta.index in self._begun else None

    def _parts(self, delta: Delta) -> Iterator[Json]:
        """Chunks of what is new; the last one tells log-probabilities and the end."""
        parts = self._new_words(delta)
        for part in parts[:-1]:
            still = {"logprobs": None, "finish_reason": None}
            yield self._chunk({"index": delta.index, "delta": part, **still})
        if parts or delta.finish_reason or self._count is not None:
            last = parts[-1] if parts else {}
            yield self._chunk({"index": delta.index, "delta": last, **self._ending(delta)})

    def _new_words(self, delta: Delta) -> list[Json]:
        tools = self._tools(delta.index)
        if tools is None:
            return [{"content": delta.text}] if delta.text else []
        return tools.deltas(delta.text, delta.finish_reason is not None)

    def _message(self, delta: Delta) -> Json:
        tools = self._tools(delta.index)
        if tools is None:
            return {"role": "assistant", "content": delta.text, "refusal": None}
        return tools.message(delta.text)

    def _tools(self, index: int) -> "ToolAnswer | None":
        if self._plan is not None and index not in self._choices:
            self._choices[index] = ToolAnswer(self._plan)
        return self._choices.get(index)

    def last_chunk(self) -> Json:
        return self._head.fields("chat.completion.chunk") | {"choices": []}

    def _chunk(self, choice: Json) -> Json:
        return self._head.fields("chat.completion.chunk") | {"choices": [choice]}

    def _ending(self, delta: Delta) -> Json:
        rows = delta.logprobs
        wanted = self._count is not None and rows is not None
        tools = self._choices.get(delta.index)
        called = tools is not None and tools.is_whole and delta.finish_reason == "stop"
        return {
            "logprobs": chat_logprobs(delta.token_ids, rows, self._count or 0) if wanted else None,
            "finish_reason": "tool_calls" if called else delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
