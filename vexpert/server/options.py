"""What shapes the HTTP server, beside the engine's own options.

Fields with a group are options of `vexpert serve` (vexpert/cli/serve_options.py).
"""

from dataclasses import dataclass, field
from typing import Any

from vexpert.config import COUNT, COUNT_OR_NONE, check_options, option, shown
from vexpert.errors import ConfigError
from vexpert.server.keys import check_keys, read_keys

INTERVAL = (1e-3, 1e9)
SECONDS = (0.0, 1e9)  # no wait of Python's takes more than nine times that
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
        secret=True,
    )
    api_key_file: str | None = option(
        None,
        "a key a line, then the models it is for, or /metrics, by white space; none: all",
        "access",
        metavar="FILE",
    )
    restricted_keys: dict[str, frozenset[str]] = field(  # key: model names
        default_factory=dict, metadata={"secret": True}
    )
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

    max_body_bytes: int = option(
        16 * 2**20, "largest request body", "limits", bounds=(1, 2**63 - 1)
    )
    max_queue_len: int | None = option(  # None: any number
        4096,
        "completions accepted beyond --max-num-seqs; more get 429",
        "limits",
        bounds=COUNT_OR_NONE,
    )
    request_timeout: float = option(
        0.0, "seconds to answer in; 0: any time", "limits", bounds=SECONDS
    )
    max_connections: int | None = option(
        None,
        "connections at once; default: what the limit of open files leaves",
        "limits",
        bounds=COUNT,
    )
    write_timeout: float = option(
        30.0,
        "seconds that a client may read nothing of its answer; then it is cut off",
        "limits",
        bounds=(1.0, SECONDS[1]),
    )
    engine_step_timeout: float | None = option(  # None: never looked at
        300.0,
        "longest step of the engine, in seconds; a longer one hangs, and the engine is started "
        "again; 0: any time",
        "limits",
        bounds=SECONDS,
    )
    shutdown_timeout: float = option(
        30.0, "seconds that accepted requests have after a signal", "limits", bounds=SECONDS
    )
    engine_restarts: int = option(
        3,
        "most restarts of a failed engine in 10 minutes; one more, and the server ends",
        "limits",
        bounds=COUNT_OR_NONE,
    )
    body_timeout: float = option(60.0, "seconds to receive a body in", None, bounds=INTERVAL)
    keep_alive: float = option(
        15.0, "seconds without an event after which a stream gets a comment", None, bounds=INTERVAL
    )

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
        *(10.0, "no periodic status line", "logs"),
        flag="--disable-log-stats",
        switch=None,
        bounds=INTERVAL,
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "OpenTelemetry collector for a span a request; needs vexpert[tracing]",
        "logs",
        metavar="URL",
    )

    def __post_init__(self) -> None:
        """Raises ConfigError for what says nothing, and for keys that anybody has."""
        check_options(self)
        check_keys((*self.api_keys, *self.restricted_keys))
        _check_once(self.served_model_names)

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


def _check_once(names: tuple[str, ...]) -> None:
    """Raise ConfigError for a name that is given twice: lists would show it twice."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"served_model_name={shown(name)} is given twice; keep one")
