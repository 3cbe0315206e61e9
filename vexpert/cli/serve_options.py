"""Options of `vexpert serve` that shape the HTTP server."""

import argparse
from typing import Any

LOG_LEVELS = ("debug", "info", "warning", "error")


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """The options of the HTTP server, in groups."""
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="0: a free one")
    group.add_argument(
        "--served-model-name", nargs="+", default=[], metavar="NAME", help="the base model's names"
    )
    group.add_argument("--no-web", action="store_true", help="no page at /")
    _add_access_options(parser.add_argument_group("access"))
    _add_limits(parser.add_argument_group("limits"))
    _add_chat_options(parser.add_argument_group("chat"))
    _add_log_options(parser.add_argument_group("logs"))


def _add_access_options(group: Any) -> None:
    group.add_argument(
        "--api-key",
        nargs="+",
        default=[],
        help="keys that requests must carry, those for /metrics too",
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="a key a line, then the models it is for, or /metrics, by white space; none: all",
    )
    group.add_argument(
        "--allowed-adapter-roots",
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="where adapters may be loaded from over HTTP; default: anywhere",
    )
    group.add_argument(
        "--allowed-origins", nargs="+", default=[], metavar="URL", help="CORS; *: all of them"
    )
    for name in ("methods", "headers"):
        group.add_argument(
            f"--allowed-{name}", nargs="+", default=["*"], metavar="NAME", help=f"CORS {name}"
        )
    group.add_argument("--allow-credentials", action="store_true", help="CORS with credentials")


def _add_limits(group: Any) -> None:
    group.add_argument(
        "--max-body-bytes", type=int, default=16 * 2**20, metavar="N", help="largest request body"
    )
    group.add_argument(
        "--max-queue-len",
        type=int,
        default=4096,
        metavar="N",
        help="completions accepted beyond --max-num-seqs; more get 429",
    )
    group.add_argument(
        "--request-timeout",
        type=float,
        default=0.0,
        metavar="X",
        help="seconds to answer in; 0: any time",
    )
    group.add_argument(
        "--write-timeout",
        type=float,
        default=30.0,
        metavar="X",
        help="seconds that a client may read nothing of its answer; then it is cut off",
    )
    group.add_argument(
        "--engine-step-timeout",
        type=float,
        default=300.0,
        metavar="X",
        help="longest step of the engine, in seconds; a longer one hangs, and the engine is "
        "started again; 0: any time",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="X",
        help="seconds that accepted requests have after a signal",
    )
    group.add_argument(
        "--engine-restarts",
        type=int,
        default=3,
        metavar="N",
        help="most restarts of a failed engine in 10 minutes; one more, and the server ends",
    )


def _add_chat_options(group: Any) -> None:
    group.add_argument(
        "--chat-template", metavar="FILE", help="Jinja template in place of the model's own"
    )
    group.add_argument(
        "--tool-call-parser",
        choices=("hermes", "llama3_json", "mistral"),
        help="how the model writes tool calls; without it tools are refused, but by the demo",
    )


def _add_log_options(group: Any) -> None:
    group.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="json: an object a line"
    )
    group.add_argument(
        "--uvicorn-log-level", choices=LOG_LEVELS, default="info", help="of HTTP's lines"
    )
    group.add_argument(
        "--disable-uvicorn-access-log", action="store_true", help="no log line per request"
    )
    group.add_argument("--disable-log-stats", action="store_true", help="no periodic status line")
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="OpenTelemetry collector for a span a request; needs vexpert[tracing]",
    )
