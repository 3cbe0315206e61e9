"""GET /health, /ready, /ping, /version and /metrics."""

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from vexpert import __version__
from vexpert.server.errors import error_response
from vexpert.server.progress import ShuttingDownError
from vexpert.server.service import service_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine runs, 503 after it failed."""
    failure = service_of(request).engine.failure
    if failure is None:
        return Response(status_code=200)
    response = error_response(failure)
    response.status_code = 503
    return response


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while new requests are taken, 503 once the server drains or the engine has failed."""
    if service_of(request).is_draining:
        return error_response(ShuttingDownError("the server is shutting down"))
    return await health(request)


@router.get("/ping")
@router.post("/ping", include_in_schema=False)
async def ping(request: Request) -> Response:
    """The same, under the name that SageMaker asks for."""
    return await health(request)


@router.get("/version")
async def version() -> dict[str, Any]:
    """The version of vexpert."""
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Numbers for Prometheus."""
    page = await service_of(request).metrics_page()
    return Response(page, media_type=CONTENT_TYPE_LATEST)
