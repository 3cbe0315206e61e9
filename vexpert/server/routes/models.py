"""GET /v1/models: the base model under its names, and the adapters."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from vexpert.server.service import Service, allowed_models, service_of

router = APIRouter()


async def _entries(service: Service) -> list[dict[str, Any]]:
    common = {"object": "model", "created": service.created, "owned_by": "vexpert"}
    limits = {"max_model_len": service.facts.max_model_len, "vocab_size": service.facts.vocab_size}
    root = service.facts.model or service.facts.name
    bases = [
        {"id": name, **common, "root": root, "parent": None, **limits}
        for name in service.base_names
    ]
    adapters = [
        {"id": info.name, **common, "root": info.path, "parent": service.base_names[0], **limits}
        for info in await service.engine.adapters()
    ]
    return bases + adapters


async def _entries_for(request: Request) -> list[dict[str, Any]]:
    """The entries that the request's API key is for."""
    allowed = allowed_models(request)
    entries = await _entries(service_of(request))
    return [entry for entry in entries if allowed is None or entry["id"] in allowed]


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Every name that a request's `model` field may hold."""
    return {"object": "list", "data": await _entries_for(request)}


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> dict[str, Any]:
    """One of them; 404 if nobody has this name."""
    service = service_of(request)
    for entry in await _entries_for(request):
        if entry["id"] == model:
            return entry
    raise await service.unknown_model(request, model)
