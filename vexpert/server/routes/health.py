"""GET /health, /ready, /ping, /version and /metrics."""

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from vexpert import __version__
from vexpert.server.errors import error_response
from vexpert.server.progress import EngineFailedError, ShuttingDownError
from vexpert.server.service import service_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine runs or is started again, 503 after it failed for good."""
    engine = service_of(request).engine
    if engine.failure is None or engine.is_restarting:
        return Response(status_code=200)
    return error_response(engine.failure)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while new requests are taken; 503 in a drain, and while the engine does not answer."""
    service = service_of(request)
    if service.is_draining:
        return error_response(ShuttingDownError("the server is shutting down"))
    if service.engine.failure is not None:
        return error_response(service.engine.failure)
    if service.engine.doubt is not None:
        return error_response(EngineFailedError(service.engine.doubt))
    return Response(status_code=200)


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
    """Numbers for Prometheus; for keys of all models, and those that may read it."""
    service = service_of(request)
    service.check_may_read_metrics(request)
    page = await service.scraper.page()
    return Response(page, media_type=CONTENT_TYPE_LATEST)
