"""Bodies of POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from typing import Annotated

from pydantic import Field

from vexpert.server.protocol.fields import StrictModel

NonEmpty = Annotated[str, Field(min_length=1)]


class LoadLoraAdapterRequest(StrictModel):
    """Load the adapter in folder `lora_path` of the server's machine under `lora_name`."""

    lora_name: NonEmpty
    lora_path: NonEmpty
    load_inplace: bool = False
    lora_B_layout: str | None = None


class UnloadLoraAdapterRequest(StrictModel):
    """Forget the adapter `lora_name`."""

    lora_name: NonEmpty
