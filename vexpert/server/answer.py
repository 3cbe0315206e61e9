"""What all answers share: their head, their token counts, and running a job to an answer."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.responses import Response

from vexpert import __version__
from vexpert.errors import VexpertError
from vexpert.log import get_logger
from vexpert.server.deadlines import ENDS
from vexpert.server.disconnect import ClientDisconnectedError, EventStream, until_disconnect
from vexpert.server.engine_client import AsyncEngine
from vexpert.server.errors import SERVER_ERRORS, api_error, error_object
from vexpert.server.events import Chunker, EventWriter, Json, event
from vexpert.server.generation import Generation, Job
from vexpert.server.progress import Update
from vexpert.server.requests_log import NOTE
from vexpert.server.service import Service
from vexpert.server.tracing import NoTrace

logger = get_logger(__name__)


def new_id(kind: str) -> str:
    """A fresh id of an answer, e.g. "chatcmpl-..."."""
    return f"{kind}-{uuid4().hex}"


@dataclass(frozen=True)
class Head:
    """The fields every answer and every chunk of it begins with."""

    id: str
    model: str  # as the client named it
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970

    def fields(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"vexpert-{__version__}",
        }


@dataclass
class Usage:
    """Token counts of one answer: each prompt once, each generated token once."""

    prompt_tokens: int
    trace: NoTrace
    completion_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)  # by prompt

    def count(self, i: int, update: Update) -> None:
        self.trace.count(update)
        self.completion_tokens += sum(len(delta.token_ids) for delta in update.deltas)
        self.cached[i] = update.num_cached_tokens

    def as_json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


class Formatter(Chunker, Protocol):
    """The shape of one kind of answer."""

    def whole(self, updates: dict[int, Update]) -> Json:
        """The answer, but for `usage`, from one finished update per prompt."""

    def last_chunk(self) -> Json:
        """The chunk without choices that carries `usage`."""


async def answer(
    request: Request, service: Service, job: Job, formatter: Formatter, model: str
) -> Response:
    """Run `job`; a streamed or a whole response. The job is aborted if the client leaves."""
    engine = service.engine
    trace = service.traces.begin(request.headers, job, model)
    usage = Usage(sum(len(prompt.token_ids) for prompt in job.prompts), trace)
    request.scope[NOTE].counts = usage
    try:
        if job.stream:
            start = Generation.start(engine, job, request.scope[ENDS])
            generation = await until_disconnect(request.receive, start)
            events = _events(generation, formatter, usage, engine.keep_alive)

            def end() -> None:
                generation.close()
                trace.end()

            return EventStream(events, end)
        work = _whole(engine, job, formatter, usage)  # its deadline is the layer's
        whole = await until_disconnect(request.receive, work)
    except ClientDisconnectedError as error:
        trace.end(error)
        return Response(status_code=499)  # nobody reads it
    except BaseException as error:
        trace.end(error)
        raise
    trace.end()
    return JSONResponse(whole)


async def _whole(engine: AsyncEngine, job: Job, formatter: Formatter, usage: Usage) -> Json:
    generation = await Generation.start(engine, job)
    updates: dict[int, Update] = {}
    try:
        async for i, update in generation:
            usage.count(i, update)
            updates[i] = update
    finally:
        generation.close()
    return formatter.whole(updates) | {"usage": usage.as_json()}


async def _events(
    generation: Generation, formatter: Formatter, usage: Usage, keep_alive: float
) -> AsyncGenerator[bytes, None]:
    writer = EventWriter(formatter)
    try:
        async for burst in generation.bursts(keep_alive):
            if burst is None:
                yield b": keep-alive\n\n"
                continue
            written = ""
            for i, update in burst:
                usage.count(i, update)
                written += writer.write(i, update)
            if written:
                yield written.encode()
        if formatter.include_usage:
            yield event(formatter.last_chunk() | {"usage": usage.as_json()}).encode()
    except (*SERVER_ERRORS, VexpertError) as error:
        usage.trace.end(error)
        yield _error_event(error)
    except Exception as error:  # the answer has begun: only the stream itself can tell of it
        logger.exception("unexpected error in a stream")
        usage.trace.end(error)
        yield _error_event(error)
        return  # without the last event: nothing says that the answer is complete
    finally:
        generation.close()
        usage.trace.end()
    yield b"data: [DONE]\n\n"


def _error_event(error: Exception) -> bytes:
    told = api_error(error)
    return event(error_object(told.message, told.status, told.param, told.code)).encode()
