"""`vexpert serve [MODEL]`."""

import argparse
import dataclasses
import errno
import gc
import json
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vexpert.cli.config_file import add_config
from vexpert.cli.parser import add_engine_options, engine_config
from vexpert.cli.threads import limit_spinning
from vexpert.config import EngineConfig
from vexpert.demo import TOOL_FORMAT, is_demo
from vexpert.errors import ConfigError
from vexpert.log import get_logger, set_up_logging
from vexpert.server.interface import LoraModule

if TYPE_CHECKING:
    from vexpert.server.engine_process import EngineProcess
    from vexpert.server.options import ServerOptions

LOG_LEVELS = ("debug", "info", "warning", "error")
logger = get_logger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `vexpert serve`."""
    parser.add_argument(
        "model",
        nargs="?",
        default="",
        metavar="MODEL",
        help="folder or Hugging Face name; without it: the bundled demo and its adapters",
    )
    parser.usage = "vexpert serve [MODEL] [options]"
    add_config(parser)
    _add_server_options(parser)
    groups = add_engine_options(parser)
    add_lora_modules(groups["lora"])
    groups["model"].add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="devices; only 1 for now"
    )


def add_lora_modules(group: Any) -> None:
    """The option --lora-modules."""
    group.add_argument(
        "--lora-modules",
        nargs="+",
        action="extend",
        default=[],
        type=lora_module,
        metavar="NAME=PATH",
        help='to load at boot; or JSON: {"name": ..., "path": ..., "lora_B_layout": ..., '
        '"pinned": true, "lazy": true}',
    )


def _add_server_options(parser: argparse.ArgumentParser) -> None:
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
        help="a key a line, then the models it is for, by white space; none: all",
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
        "--request-timeout", type=float, metavar="X", help="seconds to answer in; default: any time"
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


def lora_module(text: str) -> LoraModule:
    """Parse NAME=PATH or a JSON object. Raises ArgumentTypeError."""
    if text.lstrip().startswith("{"):
        try:
            return LoraModule(**json.loads(text))
        except (json.JSONDecodeError, TypeError) as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r}: use NAME=PATH or a JSON object")
    return LoraModule(name, path)


def run(args: argparse.Namespace) -> int:
    """Boot and serve until a signal; the exit code."""
    _check(args)
    config = engine_config(args)
    limit_spinning()

    from vexpert.server.listen import bind
    from vexpert.server.tracing import check_endpoint

    check_endpoint(args.otlp_traces_endpoint)
    try:
        bound = bind(args.host, args.port)
    except OSError as error:
        return _say_cannot_bind(args, error)
    for tree, level in (("vexpert", "INFO"), ("uvicorn", args.uvicorn_log_level.upper())):
        set_up_logging(tree, level, args.log_format)
    with bound:
        return _serve(args, config, bound)


def _check(args: argparse.Namespace) -> None:
    if args.tensor_parallel_size != 1:
        value = args.tensor_parallel_size
        raise ConfigError(f"tensor_parallel_size={value}: one device only for now; use 1")
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"port={args.port}: use 1 to 65535, or 0 for a free one")
    if args.max_body_bytes < 1:
        raise ConfigError(f"max_body_bytes={args.max_body_bytes}: must be at least 1")
    for name in ("max_queue_len", "shutdown_timeout", "request_timeout", "engine_restarts"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"{name}={value}: must be at least 0, and finite")
    for root in args.allowed_adapter_roots:
        if not Path(root).is_dir():
            raise ConfigError(f"allowed_adapter_roots: {root}: no such folder")


def _say_cannot_bind(args: argparse.Namespace, error: OSError) -> int:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        remedy = "give an address of this machine with --host, or --host 0.0.0.0 for all of them"
    else:
        remedy = "choose another with --port, or --port 0 for a free one"
    print(f"error: {args.host}:{args.port}: {error.strerror}; {remedy}", file=sys.stderr)
    return 1


def _serve(args: argparse.Namespace, config: EngineConfig, bound: socket.socket) -> int:
    config, modules, names = resolve_model(config, args.lora_modules, args.served_model_name)
    if modules and not config.enable_lora:
        raise ConfigError("lora_modules are given with no-enable-lora; leave one of them out")
    check_modules(modules, names or (config.model,))
    if args.tool_call_parser is None and is_demo(config.model):
        args.tool_call_parser = TOOL_FORMAT
    _print_config(config, args)
    options = _server_options(args, config, names)  # before the model loads: it may be refused
    engine = engine_process(config, args.log_format)
    try:
        engine.launch(modules)
        return _serve_engine(args, engine, options, bound)
    finally:
        engine.close()
        gc.unfreeze()


def engine_process(config: EngineConfig, log_format: str) -> "EngineProcess":
    """The engine of `config`, not launched yet."""
    from vexpert.server.engine_boot import build_engine, read_tokenizer
    from vexpert.server.engine_process import EngineProcess

    return EngineProcess(config, build_engine, read_tokenizer, log_format)


def _serve_engine(
    args: argparse.Namespace,
    engine: "EngineProcess",
    options: "ServerOptions",
    bound: socket.socket,
) -> int:
    """Serve an engine that is starting; what is imported here loads beside it."""
    from vexpert.server.app import create_app
    from vexpert.server.engine_boot import settle
    from vexpert.server.listen import url_of
    from vexpert.server.progress import EngineFailedError
    from vexpert.server.run import run as run_server

    try:
        engine.connect()
    except EngineFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    app = create_app(engine, options)
    settle()
    service = app.state.service

    def ready() -> None:
        count = len(engine.facts.adapters)
        plural = "" if count == 1 else "s"
        words = f"(model {service.base_names[0]}, {count} adapter{plural})"
        print(f"vexpert ready: {url_of(bound, args.host)} {words}", flush=True)

    return run_server(app, bound, ready)


def resolve_model(
    config: EngineConfig, modules: list[LoraModule], names: list[str]
) -> tuple[EngineConfig, list[LoraModule], tuple[str, ...]]:
    """Fill in the demo where no model, or its name, is given: its folder, adapters and name."""
    from vexpert import demo

    if (found := demo.find_model(config.model)) == config.model:
        return config, modules, tuple(names)
    config = dataclasses.replace(config, model=found)
    given = {module.name for module in modules}
    bundled = [
        LoraModule(name, str(path))
        for name, path in demo.adapter_paths().items()
        if config.enable_lora and name not in given
    ]
    return config, [*bundled, *modules], tuple(names) or (demo.DEMO_NAME,)


def check_modules(modules: list[LoraModule], base_names: tuple[str, ...]) -> None:
    """Raise ConfigError for what would be refused once the model is loaded, minutes later."""
    seen: set[str] = set()
    for module in modules:
        folder, where = Path(module.path), f"(lora_modules: {module.name}={module.path})"
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; give an adapter's folder {where}")
        if not (folder / "adapter_config.json").is_file():
            raise ConfigError(f"{folder}: no adapter_config.json in it; not an adapter {where}")
        if module.name in base_names:
            raise ConfigError(f"adapter {module.name!r} has the base model's name; rename it")
        if module.name in seen:
            raise ConfigError(f"adapter {module.name!r} is given twice; rename one of them")
        seen.add(module.name)


def _server_options(
    args: argparse.Namespace, config: EngineConfig, names: tuple[str, ...]
) -> "ServerOptions":
    from vexpert.server.defaults import sampling_defaults
    from vexpert.server.keys import read_keys
    from vexpert.server.options import CorsOptions, ServerOptions

    keys = read_keys(args.api_key_file) if args.api_key_file else {}
    origins = tuple(args.allowed_origins)
    methods, headers = tuple(args.allowed_methods), tuple(args.allowed_headers)
    cors = CorsOptions(origins, methods, headers, args.allow_credentials) if origins else None

    options = ServerOptions(
        served_model_names=names,
        api_keys=(*args.api_key, *(key for key, models in keys.items() if not models)),
        restricted_keys={key: models for key, models in keys.items() if models},
        chat_template=_read_template(args.chat_template),
        tool_call_parser=args.tool_call_parser,
        max_queue_len=args.max_queue_len,
        request_timeout=args.request_timeout,
        shutdown_timeout=args.shutdown_timeout,
        engine_restarts=args.engine_restarts,
        adapter_roots=tuple(args.allowed_adapter_roots),
        cors=cors,
        access_log=not args.disable_uvicorn_access_log,
        max_body_bytes=args.max_body_bytes,
        web=not args.no_web,
        sampling_defaults=sampling_defaults(config.model),
        status_interval=None if args.disable_log_stats else ServerOptions.status_interval,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
    )
    if options.sampling_defaults:
        logger.info("sampling defaults of the model: %s", options.sampling_defaults)
    return options


def _read_template(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: {file} cannot be read: {error}") from error


def _print_config(config: EngineConfig, args: argparse.Namespace) -> None:
    from vexpert import __version__

    server = {
        "host": args.host,
        "port": args.port,
        "api_key": f"{len(args.api_key)} set" if args.api_key else None,
        "api_key_file": args.api_key_file,
        "max_queue_len": args.max_queue_len,
        "request_timeout": args.request_timeout,
        "shutdown_timeout": args.shutdown_timeout,
        "engine_restarts": args.engine_restarts,
        "tool_call_parser": args.tool_call_parser,
        "allowed_adapter_roots": args.allowed_adapter_roots,
        "max_body_bytes": args.max_body_bytes,
        "web": not args.no_web,
    }
    shown = {**dataclasses.asdict(config), **server}
    logger.info("vexpert %s", __version__)
    logger.info("config: %s", " ".join(f"{name}={value}" for name, value in shown.items()))
