"""What shapes the HTTP server, beside the engine's own options."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ServerOptions:
    """Options of `create_app`. Empty `served_model_names`: the engine's name of the model."""

    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()  # empty: open to all
    max_body_bytes: int = 16 * 2**20
    sampling_defaults: dict[str, Any] = field(default_factory=dict)  # of generation_config.json
    status_interval: float | None = 10.0  # seconds between status lines; None: none
