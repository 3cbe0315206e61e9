"""ASGI layers before the routes: the API key, the largest body, and errors of our own."""

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vexpert.log import get_logger
from vexpert.server.errors import ApiError, error_response

logger = get_logger(__name__)

OPEN_PATHS = ("/health", "/ping")  # probes have no key


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


class ApiKeyMiddleware:
    """Answer 401 unless `Authorization: Bearer KEY` holds one of the keys."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self.app = app
        self.keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(scope):
            await self.app(scope, receive, send)
            return
        error = ApiError(
            "no valid API key: send the header Authorization: Bearer KEY",
            status=401,
            code="invalid_api_key",
        )
        await error_response(error)(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        kind, _, given = _header(scope, b"authorization").partition(b" ")
        # Every key is compared in full, so that the time taken tells nothing about them.
        matches = [hmac.compare_digest(given.strip(), key) for key in self.keys]
        return kind.lower() == b"bearer" and any(matches)


class BodyLimitMiddleware:
    """Answer 413 to a body of more than `limit` bytes, before it is all read."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = _header(scope, b"content-length")
        if length.isdigit() and int(length) > self.limit:
            await error_response(self._error())(scope, receive, send)
            return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.limit:
                raise self._error().as_http()
            return message

        await self.app(scope, limited, send)

    def _error(self) -> ApiError:
        return ApiError(f"the body has more than {self.limit} bytes; send less at once", 413)


class UnexpectedErrorMiddleware:
    """Log an error that nobody expected and answer 500.

    Starlette's own layer raises it again after the answer; the connection is then closed under
    the client's next request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            logger.exception("unexpected error on %s", scope["path"])
            await error_response(error)(scope, receive, send)
