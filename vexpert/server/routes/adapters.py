"""GET /v1/adapters, and POST /v1/load_lora_adapter and /v1/unload_lora_adapter in vLLM's shapes."""

from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from vexpert.config import cut, first_line, shown
from vexpert.errors import AdapterError, AdapterNameError
from vexpert.log import get_logger
from vexpert.lora.info import UNUSABLE, USABLE
from vexpert.server.errors import ApiError
from vexpert.server.listing import Page, Wanted, fill
from vexpert.server.protocol.adapter import LoadLoraAdapterRequest, UnloadLoraAdapterRequest
from vexpert.server.query import PAGE, STATE, only
from vexpert.server.routes.models import After, Limit, Part
from vexpert.server.service import Service, allowed_models, service_of

MOST_SHOWN = 300  # characters of an error that names the path once more
router = APIRouter()
logger = get_logger(__name__)


# mypy knows no members that are not written out.
State = StrEnum("State", [(state, state) for state in (*USABLE, *UNUSABLE)])  # type: ignore[misc]
States = Annotated[list[State], Query(description="wanted ones; may be repeated")]


@router.get(
    "/v1/adapters",
    response_model=dict[str, Any],
    dependencies=[Depends(only(*PAGE, STATE))],
)
async def list_adapters(
    request: Request,
    limit: Limit = None,
    after: After = None,
    name: Part = "",
    state: States = [],  # noqa: B006 - read only
) -> Response:
    """Every version of every adapter, errored and draining ones too, with its state and tier."""
    states = tuple(each.value for each in state)
    wanted = Wanted(allowed_models(request), limit, after, states, name)
    return await fill(Page(limit), service_of(request).engine, wanted, vars)


@router.get("/v1/adapters/{name:path}")
async def retrieve_adapter(name: str, request: Request) -> dict[str, Any]:
    """The versions of one adapter; 404 if there is none."""
    service, allowed = service_of(request), allowed_models(request)
    adapter = service.adapter_of(name)
    is_told = adapter is not None and (allowed is None or adapter in allowed)
    infos = await service.engine.adapters_named([adapter or ""]) if is_told else ()
    if infos:
        return {"object": "list", "data": [vars(info) for info in infos]}
    raise await service.unknown_model(request, name)


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadLoraAdapterRequest, request: Request) -> PlainTextResponse:
    """Load an adapter from a folder of this machine; running requests go on meanwhile."""
    service = service_of(request)
    service.check_may_change_adapters(request)
    try:
        await _load(body, service)
    except (ApiError, AdapterError) as error:
        name = body.lora_name
        reason = first_line(error).removeprefix(f"adapter {name!r}: ")
        logger.warning("adapter %s is not loaded: %s", shown(name), reason)
        raise
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def _load(body: LoadLoraAdapterRequest, service: Service) -> None:
    """Raises AdapterError, or ApiError where that names the field at fault."""
    path = await service.adapter_path(body.lora_path)
    service.check_name(body.lora_name)
    try:
        await service.engine.load_adapter(
            body.lora_name,
            path,
            lora_B_layout=body.lora_B_layout,
            load_inplace=body.load_inplace,
            lazy=body.lazy,
            pinned=body.pinned,
        )
    except AdapterNameError:
        raise
    except AdapterError as error:
        await service.check_folder(body.lora_path, error)
        raise
    except OSError as error:
        message = (
            f"lora_path={shown(body.lora_path)}: cannot be read: {cut(str(error), MOST_SHOWN)}"
        )
        raise ApiError(message, 400, "lora_path") from error


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(
    body: UnloadLoraAdapterRequest, request: Request
) -> PlainTextResponse:
    """Forget an adapter; requests that use it finish first, for `drain_seconds` at most."""
    service = service_of(request)
    service.check_may_change_adapters(request)
    await service.engine.unload_adapter(body.lora_name, drain_seconds=body.drain_seconds)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
