"""What shapes the HTTP server, beside the engine's own options."""

from dataclasses import dataclass, field
from typing import Any

from vexpert.errors import ConfigError
from vexpert.server.keys import check_keys


@dataclass(frozen=True)
class CorsOptions:
    """What pages of other origins may do."""

    origins: tuple[str, ...] = ("*",)
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False


@dataclass(frozen=True)
class ServerOptions:
    """Options of `create_app`. Empty `served_model_names`: the engine's name of the model."""

    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()  # of all models; with no restricted key either: open to all
    restricted_keys: dict[str, frozenset[str]] = field(default_factory=dict)  # key: model names
    max_body_bytes: int = 16 * 2**20
    sampling_defaults: dict[str, Any] = field(default_factory=dict)  # of generation_config.json
    chat_template: str | None = None  # in place of the tokenizer's own
    tool_call_parser: str | None = None  # a name of tools.formats.FORMATS; None: no tool calls
    max_queue_len: int | None = 4096  # sequences accepted beyond max_num_seqs; None: any number
    request_timeout: float | None = None  # seconds to answer a request in; None: any time
    write_timeout: float = 30.0  # seconds that a client may read nothing of its answer
    body_timeout: float = 60.0  # seconds to receive a body in
    keep_alive: float = 15.0  # seconds without an event after which a stream gets a comment
    shutdown_timeout: float = 30.0  # seconds that accepted requests have after a signal
    engine_restarts: int = 0  # of a failed engine in 10 minutes; beyond, the server ends
    engine_step_timeout: float | None = 300.0  # seconds a step may take; None: never looked at
    adapter_roots: tuple[str, ...] = ()  # folders that adapters may be loaded from; empty: any
    cors: CorsOptions | None = None
    access_log: bool = True
    web: bool = True  # the page at /
    status_interval: float | None = 10.0  # seconds between status lines; None: none
    otlp_traces_endpoint: str | None = None  # URL of a collector for traces; None: no traces

    def __post_init__(self) -> None:
        """Raises ConfigError for keys that anybody has, and for no time to answer in."""
        check_keys((*self.api_keys, *self.restricted_keys))
        if self.request_timeout is not None and self.request_timeout <= 0:
            raise ConfigError(f"request_timeout={self.request_timeout}: must be more than 0")
