"""Every refusal as an OpenAI error object, and the handlers that make it so."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from vexpert.config import cut
from vexpert.errors import (
    AdapterGoneError,
    AdapterNameError,
    AdapterNotFoundError,
    AdapterReplacedError,
    RequestError,
    VexpertError,
)
from vexpert.log import get_logger
from vexpert.server.progress import (
    EngineCallError,
    EngineFailedError,
    OverloadedError,
    RequestTimeoutError,
    ShuttingDownError,
    SlowReaderError,
)
from vexpert.server.unreadable import explain_unreadable
from vexpert.server.unserved import no_such_method, no_such_route
from vexpert.server.validation import explain

logger = get_logger(__name__)
MOST_CHARACTERS = 2**15  # of a message: the keys of a refused adapter fit, a client's megabytes not
MOST_PARAM = 1000
MOST_PATH = 200

SERVER_ERRORS = (
    EngineFailedError,
    OverloadedError,
    RequestTimeoutError,
    ShuttingDownError,
    SlowReaderError,
)


class ApiError(Exception):
    """An answer with an error status: message, HTTP status, and the OpenAI `param` and `code`."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,  # seconds
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.message, self.status, self.param, self.code = message, status, param, code

    def as_http(self) -> HTTPException:
        """The same as starlette's exception, which passes through FastAPI's body reader."""
        return HTTPException(self.status, self.message)


def error_object(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The OpenAI error object.

    A user's text in it may hold lone surrogates: they become "?". What is very long is cut.
    """
    kind = "invalid_request_error" if status < 500 else "server_error"
    kind = "rate_limit_error" if status == 429 else kind
    clean = cut(message, MOST_CHARACTERS).encode("utf-8", "replace").decode()
    param = param and cut(param, MOST_PARAM).encode("utf-8", "replace").decode()
    return {"error": {"message": clean, "type": kind, "param": param, "code": code}}


def api_error(error: Exception) -> ApiError:
    """How an exception is told to a client."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(str(error), 400, error.param)
        case AdapterNameError():
            return ApiError(str(error), 400, "lora_name")
        case AdapterNotFoundError():
            return ApiError(str(error), 404, code="adapter_not_found")
        case AdapterGoneError():
            return ApiError(str(error), 503, code="adapter_gone")
        case AdapterReplacedError():
            return ApiError(str(error), 503, code="adapter_replaced", retry_after=1)
        case OverloadedError():
            return ApiError(str(error), 429, code="queue_full", retry_after=1)
        case ShuttingDownError():
            return ApiError(str(error), 503, code="shutting_down", retry_after=5)
        case RequestTimeoutError():
            return ApiError(str(error), 504, code="timeout")
        case SlowReaderError():
            return ApiError(str(error), 408, code="slow_reader")
        case VexpertError():
            return ApiError(str(error), 400)
        case EngineFailedError():
            return ApiError(str(error), 503, code="engine_failed", retry_after=5)
        case EngineCallError():
            return ApiError(f"internal error: {error.kind}", 500)
        case HTTPException():
            return ApiError(str(error.detail), error.status_code)
    return ApiError(f"internal error: {type(error).__name__}", 500)


def error_response(error: Exception) -> JSONResponse:
    """The response for an exception."""
    told = api_error(error)
    body = error_object(told.message, told.status, told.param, told.code)
    headers = {"WWW-Authenticate": "Bearer"} if told.status == 401 else {}
    if told.status == 408:  # more of the request may come: it is not waited for
        headers["Connection"] = "close"
    if isinstance(error, HTTPException):
        headers |= dict(error.headers or {})
    if told.retry_after is not None:
        headers["Retry-After"] = str(told.retry_after)
    return JSONResponse(body, told.status, headers)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    return error_response(error)


async def _refuse_http(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: of a path or a method that no route has, in more words."""
    assert isinstance(error, HTTPException)
    method, path = request.method, cut(request.url.path, MOST_PATH)
    if error.status_code == 404 and "endpoint" not in request.scope:
        return error_response(ApiError(no_such_route(method, path), 404, code="not_served"))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        detail = no_such_method(method, path, allowed)
        return error_response(HTTPException(405, detail, error.headers))
    if isinstance(error.__cause__, ClientDisconnect):  # amid the body
        return Response(status_code=499)  # nobody reads it
    if error.status_code == 400 and error.__cause__ is not None:  # of the parser: all was read
        told = explain_unreadable(error.__cause__, await request.body())
        return error_response(error if told is None else ApiError(told, 400))
    return error_response(error)


async def _refuse_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    message, param = explain(error.errors())
    return error_response(ApiError(message, 400, param))


def install_error_handlers(app: FastAPI) -> None:
    """Answer every expected error of `app` with an OpenAI error object."""
    for kind in (ApiError, VexpertError, *SERVER_ERRORS):
        app.add_exception_handler(kind, _refuse)
    app.add_exception_handler(HTTPException, _refuse_http)
    app.add_exception_handler(RequestValidationError, _refuse_invalid)
