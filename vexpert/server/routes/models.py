"""GET /v1/models: the base model under its names, and the adapters."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from vexpert.errors import AdapterGoneError
from vexpert.lora.info import UNUSABLE, USABLE, with_remedy
from vexpert.server.listing import Page, Wanted, fill
from vexpert.server.query import PAGE, only
from vexpert.server.service import Service, allowed_models, service_of

router = APIRouter()
Limit = Annotated[int | None, Query(ge=1, description="most names; without it all")]
After = Annotated[str | None, Query(description="`last_id` of the page before")]
Part = Annotated[str, Query(description="a part of the names, in any case")]


def _entry(service: Service, name: str, path: str | None = None) -> dict[str, Any]:
    """`path`: an adapter's folder; None: it is the base model."""
    facts = service.facts
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "vexpert",
        "root": path if path is not None else facts.model or facts.name,
        "parent": service.base_names[0] if path is not None else None,
        "max_model_len": facts.max_model_len,
        "vocab_size": facts.vocab_size,
    }


@router.get("/v1/models", response_model=dict[str, Any], dependencies=[Depends(only(*PAGE))])
async def list_models(
    request: Request, limit: Limit = None, after: After = None, name: Part = ""
) -> Response:
    """Every name that a request's `model` field may hold: the base model's, then adapters'."""
    service = service_of(request)
    page, bases = Page(limit), service.base_names
    start = 0
    if after in bases:
        start, after = bases.index(after) + 1, None
    wanted = Wanted(allowed_models(request), limit, after, USABLE, name)
    for base in bases[start:] if after is None else ():
        if wanted.has(base):
            page.add(base, _entry(service, base))
    return await fill(
        page, service.engine, wanted, lambda info: _entry(service, info.name, info.path)
    )


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> dict[str, Any]:
    """One of them, an adapter also as BASE:ADAPTER; else what a request of this name gets."""
    service = service_of(request)
    allowed, adapter = allowed_models(request), service.adapter_of(model)
    if allowed is None or (adapter or model) in allowed:
        if adapter is None:
            return _entry(service, model)
        for info in await service.engine.adapters_named([adapter]):
            if info.state not in UNUSABLE:
                return _entry(service, model, info.path)
            if info.state == "errored" and info.error is not None:
                raise AdapterGoneError(with_remedy(info.error))
    raise await service.unknown_model(request, model)
