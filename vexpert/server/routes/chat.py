"""POST /v1/chat/completions."""

from collections.abc import Iterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from vexpert.errors import AdapterNotFoundError
from vexpert.server.answer import Head, Json, answer, new_id
from vexpert.server.generation import Job
from vexpert.server.logprobs import chat_logprobs, prompt_logprobs
from vexpert.server.progress import Delta, Update
from vexpert.server.prompts import output_room
from vexpert.server.protocol.chat import ChatCompletionRequest
from vexpert.server.service import Service, service_of

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation with the base model or with the adapter that `model` names.

    Sampling defaults are those of the model's generation_config.json, else OpenAI's: temperature 1.
    For the likeliest answer send temperature 0. Without a limit the answer may fill the context.
    """
    service = service_of(request)
    body.check()
    job = await _job(service, body)
    try:
        return await answer(request, service.engine, job, ChatFormatter(body, job.request_id))
    except AdapterNotFoundError as error:
        raise service.unknown_model(body.model) from error


async def _job(service: Service, body: ChatCompletionRequest) -> Job:
    prompt = await service.prompts.chat(body)
    room = output_room(prompt, body.output_limit, service.max_model_len, "messages")
    params = body.build_params(
        service.options.sampling_defaults,
        service.info.vocab_size,
        max_tokens=room,
        logprobs=body.wanted_logprobs,
    )
    adapter = service.adapter_of(body.model)
    return Job(new_id("chatcmpl"), [prompt], [params], adapter, bool(body.stream))


class ChatFormatter:
    """Chat completions, whole and in chunks."""

    def __init__(self, body: ChatCompletionRequest, id: str) -> None:
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
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                **self._ending(delta),
            }
            for delta in update.deltas
        ]
        result = self._head.fields("chat.completion") | {"choices": choices}
        if self._wants_prompt_logprobs:
            result["prompt_logprobs"] = prompt_logprobs(update.prompt_logprobs or [])
        return result

    def chunks(self, i: int, update: Update) -> Iterator[Json]:
        for delta in update.deltas:
            if delta.index not in self._begun:
                self._begun.add(delta.index)
                role = {"role": "assistant", "content": ""}
                begin = {"index": delta.index, "delta": role, "logprobs": None}
                yield self._chunk(begin | {"finish_reason": None})
            if delta.text or delta.finish_reason or self._count is not None:
                words = {"content": delta.text} if delta.text else {}
                yield self._chunk({"index": delta.index, "delta": words, **self._ending(delta)})

    def last_chunk(self) -> Json:
        return self._head.fields("chat.completion.chunk") | {"choices": []}

    def _chunk(self, choice: Json) -> Json:
        return self._head.fields("chat.completion.chunk") | {"choices": [choice]}

    def _ending(self, delta: Delta) -> Json:
        rows = delta.logprobs
        wanted = self._count is not None and rows is not None
        return {
            "logprobs": chat_logprobs(delta.token_ids, rows, self._count or 0) if wanted else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
