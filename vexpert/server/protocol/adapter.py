"""Bodies of POST /v1/load_lora_adapter and /v1/unload_lora_adapter, and what /v1/adapters says."""

from typing import Annotated, ClassVar

from pydantic import Field

from vexpert.server.protocol.fields import StrictModel

NonEmpty = Annotated[str, Field(min_length=1)]


class LoadLoraAdapterRequest(StrictModel):
    """Load the adapter in folder `lora_path` of the server's machine under `lora_name`.

    `lazy`: read it when a request first needs it. `pinned`: never evict it from the device.
    """

    route: ClassVar = "/v1/load_lora_adapter"

    lora_name: NonEmpty
    lora_path: NonEmpty
    load_inplace: bool = False
    lora_B_layout: str | None = None
    lazy: bool = False
    pinned: bool = False


class UnloadLoraAdapterRequest(StrictModel):
    """Forget the adapter `lora_name`; its requests finish, or end after `drain_seconds`.

    `lora_int_id`, which clients of vLLM may send, says nothing here: names are unique.
    """

    route: ClassVar = "/v1/unload_lora_adapter"

    lora_name: NonEmpty
    drain_seconds: Annotated[float, Field(ge=0, le=86_400)] | None = None
    lora_int_id: int | None = None
