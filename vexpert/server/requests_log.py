"""The id of each HTTP request, and its line in the access log."""

import re
import time
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vexpert.config import shown
from vexpert.log import get_logger

logger = get_logger("vexpert.access")
USABLE = re.compile(r"[!-~]{1,128}")  # printable ASCII without spaces: safe in headers and logs
NAME = b"x-request-id"
NOTE = "vexpert_note"  # in the scope: the request's Note


class Counts(Protocol):
    """Tokens of one answer, as far as it has come."""

    prompt_tokens: int
    completion_tokens: int


@dataclass
class Note:
    """What routes add to a request's line: the model it names, the tokens of its answer."""

    model: str | None = None
    counts: Counts | None = None

    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = {} if self.model is None else {"model": self.model[:200]}
        if self.counts is not None:
            found["prompt_tokens"] = self.counts.prompt_tokens
            found["completion_tokens"] = self.counts.completion_tokens
        return found

    def __str__(self) -> str:
        """For the end of a line; the model is a client's text."""
        model = "" if self.model is None else f" model={shown(self.model)}"
        if self.counts is None:
            return model
        return f"{model} tokens={self.counts.prompt_tokens}+{self.counts.completion_tokens}"


class RequestIdMiddleware:
    """Answers with the request's X-Request-Id, or a fresh one, and logs a line for each request."""

    def __init__(self, app: ASGIApp, access_log: bool) -> None:
        self.app = app
        self.access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if USABLE.fullmatch(given) else uuid4().hex
        scope[NOTE] = Note()
        begun, status = time.perf_counter(), 499  # the client left before the answer began

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (NAME, request_id.encode())]
            await send(message)

        try:
            await self.app(scope, receive, told)
        finally:
            if self.access_log:
                _log(scope, request_id, status, time.perf_counter() - begun)


def _log(scope: Scope, request_id: str, status: int, seconds: float) -> None:
    client = scope.get("client") or ("-", 0)
    fields = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 4),
        "client": f"{client[0]}:{client[1]}",
        "request_id": request_id,
        **scope[NOTE].fields(),
    }
    path = scope["path"].encode("unicode_escape").decode()  # one line, whatever was asked for
    line = f"{fields['client']} {scope['method']} {path} {status} {seconds:.3f}s id={request_id}"
    logger.info("%s%s", line, scope[NOTE], extra={"fields": fields})
