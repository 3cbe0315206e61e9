"""What shapes the HTTP server, beside the engine's own options.

Fields with metadata are options of `vexpert serve`, made from it (vexpert/cli/serve_options.py).
"""

from dataclasses import dataclass, field
from typing import Any

from vexpert.config import option
from vexpert.errors import ConfigError
from vexpert.server.keys import check_keys, read_keys

TOOL_FORMATS = ("hermes", "llama3_json", "mistral")


@dataclass(frozen=True)
class ServerOptions:
    """Options of `create_app`. Empty `served_model_names`: the engine's name of the model."""

    served_model_names: tuple[str, ...] = option(
        (), "the base model's names", "server", flag="--served-model-name", metavar="NAME"
    )
    web: bool = option(True, "no page at /", "server", flag="--no-web", switch=False)

    api_keys: tuple[str, ...] = option(  # with no other key either: open to all
        *((), "keys that requests must carry, those for /metrics too", "access"),
        flag="--api-key",
        metavar="API_KEY",
    )
    api_key_file: str | None = option(
        None,
        "a key a line, then the models it is for, or /metrics, by white space; none: all",
        "access",
        metavar="FILE",
    )
    restricted_keys: dict[str, frozenset[str]] = field(default_factory=dict)  # key: model names
    allowed_adapter_roots: tuple[str, ...] = option(
        *((), "where adapters may be loaded from over HTTP; default: anywhere", "access"),
        metavar="FOLDER",
    )
    allowed_origins: tuple[str, ...] = option(  # empty: pages of other origins may do nothing
        (), "CORS; *: all of them", "access", metavar="URL"
    )
    allowed_methods: tuple[str, ...] = option(("*",), "CORS methods", "access", metavar="NAME")
    allowed_headers: tuple[str, ...] = option(("*",), "CORS headers", "access", metavar="NAME")
    allow_credentials: bool = option(False, "CORS with credentials", "access", switch=True)

    max_body_bytes: int = option(16 * 2**20, "largest request body", "limits")
    max_queue_len: int | None = option(  # None: any number
        4096, "completions accepted beyond --max-num-seqs; more get 429", "limits"
    )
    max_connections: int | None = option(
        *(None, "connections at once; default: what the limit of open files leaves", "limits")
    )
    request_timeout: float = option(0.0, "seconds to answer in; 0: any time", "limits")
    write_timeout: float = option(
        30.0, "seconds that a client may read nothing of its answer; then it is cut off", "limits"
    )
    engine_step_timeout: float | None = option(  # None: never looked at
        300.0,
        "longest step of the engine, in seconds; a longer one hangs, and the engine is started "
        "again; 0: any time",
        "limits",
    )
    shutdown_timeout: float = option(
        30.0, "seconds that accepted requests have after a signal", "limits"
    )
    engine_restarts: int = option(
        3,
        "most restarts of a failed engine in 10 minutes; one more, and the server ends",
        "limits",
    )
    body_timeout: float = 60.0  # seconds to receive a body in
    keep_alive: float = 15.0  # seconds without an event after which a stream gets a comment

    sampling_defaults: dict[str, Any] = field(default_factory=dict)  # of generation_config.json
    chat_template: str | None = None  # in place of the tokenizer's own
    tool_call_parser: str | None = option(
        None,
        "how the model writes tool calls; without it tools are refused, but by the demo",
        "chat",
        TOOL_FORMATS,
    )

    access_log: bool = option(
        *(True, "no log line per request", "logs"),
        flag="--disable-uvicorn-access-log",
        switch=False,
    )
    status_interval: float | None = option(  # seconds between status lines; None: none
        10.0, "no periodic status line", "logs", flag="--disable-log-stats", switch=None
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "OpenTelemetry collector for a span a request; needs vexpert[tracing]",
        "logs",
        metavar="URL",
    )

    def __post_init__(self) -> None:
        """Raises ConfigError for keys that anybody has, and for no time to answer in."""
        check_keys((*self.api_keys, *self.restricted_keys))
        if self.request_timeout < 0:
            raise ConfigError(f"request_timeout={self.request_timeout}: must be at least 0")

    @property
    def time_limit(self) -> float | None:
        """Seconds to answer a request in; None: any time."""
        return self.request_timeout or None

    @property
    def step_timeout(self) -> float | None:
        """Seconds that a step may take, any time is infinite; None: steps are not looked at."""
        return float("inf") if self.engine_step_timeout == 0 else self.engine_step_timeout

    def keys(self) -> dict[str, frozenset[str] | None]:
        """All keys with the models that each is for, None: all. Raises ConfigError."""
        in_file = {} if self.api_key_file is None else read_keys(self.api_key_file)
        limited = self.restricted_keys | {key: names for key, names in in_file.items() if names}
        return limited | dict.fromkeys([*(in_file.keys() - limited.keys()), *self.api_keys])
