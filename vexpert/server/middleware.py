"""ASGI layers before the routes: API keys, draining, limits of the body, errors of our own."""

import asyncio
import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vexpert.log import get_logger
from vexpert.server.errors import ApiError, error_response
from vexpert.server.progress import ShuttingDownError
from vexpert.server.service import Service
from vexpert.server.structure import excess

logger = get_logger(__name__)

OPEN_PATHS = ("/health", "/ready", "/ping")  # probes have no key
MOST_HEAD_BYTES = 2**14  # of a path and headers; the parser bounds only what comes in pieces
AROUND = 4  # bytes of a header beside its name and value: a colon, a space, the end of the line


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


class ApiKeyMiddleware:
    """Answer 401 unless `Authorization: Bearer KEY` holds one of the keys.

    `keys`: the models that each is for, None for all; handed on as `vexpert_models` in the scope.
    `open_paths` need none.
    """

    def __init__(
        self, app: ASGIApp, keys: dict[str, frozenset[str] | None], open_paths: tuple[str, ...]
    ) -> None:
        self.app = app
        self.open_paths = open_paths
        self.keys = [(key.encode(), models) for key, models in keys.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in self.open_paths
        if is_open or self._knows(scope):
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
        given = given.strip()
        matches = [models for key, models in self.keys if hmac.compare_digest(given, key)]
        if kind.lower() != b"bearer" or not matches:
            return False
        scope["vexpert_models"] = matches[0]
        return True


class DrainMiddleware:
    """Counts the requests for work, and answers 503 to new ones once the service drains."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        if self.service.is_draining:
            response = error_response(ShuttingDownError("the server is shutting down"))
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        self.service.active += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.service.active -= 1


class BodyLimitMiddleware:
    """Answer 413 to a body of more than `limit` bytes before it is all read, 408 to a slow one.

    And 413 to one of too many values for the parser, whose turn comes when it is complete.
    """

    def __init__(self, app: ASGIApp, limit: int, seconds: float) -> None:
        self.app = app
        self.limit = limit
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refused = self._refusal(scope)
        if refused is not None:
            response = error_response(refused)
            response.headers["Connection"] = "close"  # where the next request begins is unknown
            await response(scope, receive, send)
            return
        seen, is_complete, chunks = 0, False, list[bytes]()
        end = asyncio.get_running_loop().time() + self.seconds

        async def limited() -> Message:
            nonlocal seen, is_complete
            try:
                async with asyncio.timeout_at(None if is_complete else end):
                    message = await receive()
            except TimeoutError:
                late = f"the body did not arrive within {self.seconds} seconds"
                raise ApiError(late, 408).as_http() from None
            is_complete = not message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > self.limit:
                raise self._error().as_http()
            if message["type"] == "http.request":
                chunks.append(message.get("body", b""))
                _check_structure(chunks, is_complete)
            return message

        await self.app(scope, limited, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """What the head alone tells."""
        size = sum(len(name) + len(value) + AROUND for name, value in scope["headers"])
        size += len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if size > MOST_HEAD_BYTES:
            return ApiError(f"the path and headers have more than {MOST_HEAD_BYTES} bytes", 431)
        length = _header(scope, b"content-length")
        if length.isdigit() and int(length) > self.limit:
            return self._error()
        if length and _header(scope, b"transfer-encoding"):
            both = "Content-Length and Transfer-Encoding together: send one of them"
            return ApiError(both, 400)
        coding = _header(scope, b"content-encoding").strip().lower()
        if coding not in (b"", b"identity"):
            return ApiError("Content-Encoding: bodies are read as they are; send no other", 415)
        return None

    def _error(self) -> ApiError:
        return ApiError(f"the body has more than {self.limit} bytes; send less at once", 413)


def _check_structure(chunks: list[bytes], is_complete: bool) -> None:
    """Once all `chunks` of a body are there; they are dropped then. Raises HTTPException."""
    if not is_complete:
        return
    too_much = excess(chunks)
    chunks.clear()
    if too_much is not None:
        raise ApiError(f"the body has more than {too_much}; send less at once", 413).as_http()


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
        except Exception as error:  # nobody else answers it
            if begun or scope["type"] != "http":
                raise
            logger.exception("unexpected error on %s", scope["path"])
            await error_response(error)(scope, receive, send)
