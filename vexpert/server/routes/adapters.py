"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's shapes."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from vexpert.server.errors import ApiError
from vexpert.server.protocol.adapter import LoadLoraAdapterRequest, UnloadLoraAdapterRequest
from vexpert.server.service import service_of

router = APIRouter()


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadLoraAdapterRequest, request: Request) -> PlainTextResponse:
    """Load an adapter from a folder of this machine; running requests go on meanwhile."""
    service = service_of(request)
    service.check_may_change_adapters(request)
    service.check_adapter_path(body.lora_path)
    if body.lora_name in service.base_names:
        message = f"lora_name={body.lora_name!r}: this is the base model's name; choose another"
        raise ApiError(message, 400, "lora_name")
    try:
        await service.engine.load_adapter(
            body.lora_name,
            body.lora_path,
            lora_B_layout=body.lora_B_layout,
            load_inplace=body.load_inplace,
        )
    except OSError as error:
        message = f"lora_path={body.lora_path!r}: cannot be read: {error}"
        raise ApiError(message, 400, "lora_path") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(
    body: UnloadLoraAdapterRequest, request: Request
) -> PlainTextResponse:
    """Forget an adapter; requests that use it finish first."""
    service_of(request).check_may_change_adapters(request)
    await service_of(request).engine.unload_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
