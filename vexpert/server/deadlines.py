"""Requests whose answer has not begun end at their deadline, or when the server must end before.

Whatever they wait for, an engine that hangs too: the layer cancels them and answers itself. A
stream that has begun ends by an event, see `generation.py`.
"""

import asyncio
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vexpert.server.errors import error_response
from vexpert.server.progress import RequestTimeoutError

if TYPE_CHECKING:
    from vexpert.server.service import Service

UNLIMITED = (
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),  # as long as it takes
    "/metrics",  # has a limit of its own, and an answer then
)
UNANSWERED = "vexpert_unanswered"  # in the scope: the request's Unanswered
ENDS = "vexpert_ends"  # in the scope: the event loop's time at which the request ends, or None


class Unanswered:
    """One request whose answer has not begun."""

    def __init__(self, limit: asyncio.Timeout, error: Exception) -> None:
        self.limit = limit
        self.error = error  # told when the limit comes

    def end(self, error: Exception) -> None:
        """Answer with `error` now."""
        if not self.limit.expired():
            self.error = error
            self.limit.reschedule(asyncio.get_running_loop().time())


class DeadlineMiddleware:
    """Answers 504 to what takes more than `seconds`, and 503 to what `Service.cut` ends."""

    def __init__(self, app: ASGIApp, service: "Service", seconds: float | None) -> None:
        self.app = app
        self.service = service
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = asyncio.timeout_at(self._end(scope))
        request = scope[UNANSWERED] = Unanswered(limit, RequestTimeoutError(self.seconds))

        async def watched(message: Message) -> None:
            self.service.unanswered.discard(request)
            if not limit.expired():
                limit.reschedule(None)
            await send(message)

        try:
            async with limit:
                self.service.unanswered.add(request)
                await self.app(scope, receive, watched)
        except TimeoutError:
            if not limit.expired():
                raise
            await error_response(request.error)(scope, receive, send)
        finally:
            self.service.unanswered.discard(request)
            # Where the client left there is no answer: what ends slow bodies may still look here.
            del scope[UNANSWERED]

    def _end(self, scope: Scope) -> float | None:
        is_limited = self.seconds is not None and scope["path"] not in UNLIMITED
        end = asyncio.get_running_loop().time() + (self.seconds or 0.0) if is_limited else None
        scope[ENDS] = end
        return end
