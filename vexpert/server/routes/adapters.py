"""GET /v1/adapters, and POST /v1/load_lora_adapter and /v1/unload_lora_adapter in vLLM's shapes."""

import dataclasses
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from vexpert.config import shown
from vexpert.errors import AdapterError
from vexpert.server.errors import ApiError
from vexpert.server.protocol.adapter import LoadLoraAdapterRequest, UnloadLoraAdapterRequest
from vexpert.server.service import allowed_models, service_of

MOST_SHOWN = 300  # characters of an error that names the path once more
router = APIRouter()


async def _entries(request: Request) -> list[dict[str, Any]]:
    """The versions that the request's API key is for."""
    allowed = allowed_models(request)
    infos = await service_of(request).engine.versions()
    return [dataclasses.asdict(i) for i in infos if allowed is None or i.name in allowed]


@router.get("/v1/adapters")
async def list_adapters(request: Request) -> dict[str, Any]:
    """Every version of every adapter, errored and draining ones too, with its state and tier."""
    return {"object": "list", "data": await _entries(request)}


@router.get("/v1/adapters/{name:path}")
async def retrieve_adapter(name: str, request: Request) -> dict[str, Any]:
    """The versions of one adapter; 404 if there is none."""
    entries = [entry for entry in await _entries(request) if entry["name"] == name]
    if not entries:
        raise await service_of(request).unknown_model(request, name)
    return {"object": "list", "data": entries}


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadLoraAdapterRequest, request: Request) -> PlainTextResponse:
    """Load an adapter from a folder of this machine; running requests go on meanwhile."""
    service = service_of(request)
    service.check_may_change_adapters(request)
    path = await service.adapter_path(body.lora_path)
    try:
        service.check_name(body.lora_name)
    except AdapterError as error:
        raise ApiError(str(error), 400, "lora_name") from error
    try:
        await service.engine.load_adapter(
            body.lora_name,
            path,
            lora_B_layout=body.lora_B_layout,
            load_inplace=body.load_inplace,
            lazy=body.lazy,
            pinned=body.pinned,
        )
    except AdapterError as error:
        await service.check_relative_path(body.lora_path, error)
        raise
    except OSError as error:
        message = f"lora_path={shown(body.lora_path)}: cannot be read: {str(error)[:MOST_SHOWN]}"
        raise ApiError(message, 400, "lora_path") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(
    body: UnloadLoraAdapterRequest, request: Request
) -> PlainTextResponse:
    """Forget an adapter; requests that use it finish first, for `drain_seconds` at most."""
    service = service_of(request)
    service.check_may_change_adapters(request)
    await service.engine.unload_adapter(body.lora_name, drain_seconds=body.drain_seconds)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
