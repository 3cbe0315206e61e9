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

from vexpert.cli.boot import Boot, EngineEnded, Stopped
from vexpert.cli.config_file import add_config
from vexpert.cli.parser import add_engine_options, engine_config
from vexpert.cli.serve_options import (
    add_server_options,
    command_options,
    server_options,
    shown_options,
)
from vexpert.cli.threads import limit_spinning
from vexpert.config import EngineConfig
from vexpert.demo import TOOL_FORMAT, is_demo
from vexpert.errors import ConfigError
from vexpert.log import get_logger, set_up_logging
from vexpert.lora.adapter_name import check_name
from vexpert.lora.watched_folder import check_lora_dir
from vexpert.models.source import check_model
from vexpert.server.interface import LoraModule

if TYPE_CHECKING:
    from vexpert.server.engine_process import EngineProcess
    from vexpert.server.options import ServerOptions

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
    add_server_options(parser)
    groups = add_engine_options(parser)
    add_lora_modules(groups["lora"])


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


def lora_module(text: str) -> LoraModule:
    """Parse NAME=PATH or a JSON object. Raises ArgumentTypeError."""
    if text.lstrip().startswith("{"):
        try:
            return _module_of(json.loads(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r}: use NAME=PATH or a JSON object")
    return LoraModule(name, path)


def _module_of(fields: dict[str, Any]) -> LoraModule:
    """Raises ValueError."""
    fields = {name: value for name, value in fields.items() if value is not None}
    kinds = {"name": str, "path": str, "lora_B_layout": str, "pinned": bool, "lazy": bool}
    for name, value in fields.items():
        if name not in kinds:
            raise ValueError(f"no field {name!r}; known: {', '.join(kinds)}")
        if type(value) is not kinds[name]:
            words = "true or false" if kinds[name] is bool else "a text"
            raise ValueError(f"{name}={value!r}: use {words}")
    for name in ("name", "path"):
        if not fields.get(name):
            raise ValueError(f"the field {name!r} is missing")
    return LoraModule(**fields)


def run(args: argparse.Namespace) -> int:
    """Boot and serve until a signal; the exit code."""
    config = _check(args)
    try:
        with Boot() as boot:
            return _bind_and_serve(args, config, boot)
    except Stopped:
        logger.info("a signal ended the server before it was ready")
        return 0


def _bind_and_serve(args: argparse.Namespace, config: EngineConfig, boot: Boot) -> int:
    limit_spinning()

    from vexpert.server.listen import allow_many_files, bind, most_connections
    from vexpert.server.tracing import check_endpoint

    check_endpoint(args.otlp_traces_endpoint)
    allow_many_files()
    most_connections(args.max_connections)  # refused before anything heavy begins
    try:
        bound = bind(args.host, args.port)
    except OSError as error:
        return _say_cannot_bind(args, error)
    # asyncio warns of every write to a client that left; the line of its request says that.
    uvicorn_level = args.uvicorn_log_level.upper()
    for tree, level in (("vexpert", "INFO"), ("uvicorn", uvicorn_level), ("asyncio", "ERROR")):
        set_up_logging(tree, level, args.log_format)
    with bound:
        return _serve(args, config, bound, boot)


def _check(args: argparse.Namespace) -> EngineConfig:
    """The engine's options, once all options were looked at. Raises ConfigError."""
    command_options(args)
    server_options(args)
    for root in args.allowed_adapter_roots:
        if not Path(root).is_dir():
            raise ConfigError(f"allowed_adapter_roots: {root}: no such folder")
    return engine_config(args)


def _say_cannot_bind(args: argparse.Namespace, error: OSError) -> int:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        remedy = "give an address of this machine with --host, or --host 0.0.0.0 for all of them"
    else:
        remedy = "choose another with --port, or --port 0 for a free one"
    print(f"error: {args.host}:{args.port}: {error.strerror}; {remedy}", file=sys.stderr)
    return 1


def _serve(args: argparse.Namespace, config: EngineConfig, bound: socket.socket, boot: Boot) -> int:
    config, modules, names = resolve_model(config, args.lora_modules, args.served_model_name)
    if modules and not config.enable_lora:
        raise ConfigError("lora_modules are given with no-enable-lora; leave one of them out")
    check_modules(modules, names or (config.model,))
    check_lora_dir(config)
    check_model(config)
    config = dataclasses.replace(config, reserved_names=names)
    if args.tool_call_parser is None and is_demo(config.model):
        args.tool_call_parser = TOOL_FORMAT
    _print_config(config, args)
    options = _server_options(args, config, names)  # before the model loads: it may be refused
    from vexpert.server.progress import EngineFailedError

    engine = engine_process(config, args.log_format)
    try:
        engine.launch(modules)
        return _serve_engine(args, engine, options, bound, boot)
    except EngineEnded:
        return _say_why(engine)
    except EngineFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        engine.close()
        gc.unfreeze()


def engine_process(config: EngineConfig, log_format: str) -> "EngineProcess":
    """The engine of `config`, not launched yet."""
    from vexpert.server.engine_boot import build_engine, read_tokenizer
    from vexpert.server.engine_process import EngineProcess

    return EngineProcess(config, build_engine, read_tokenizer, log_format)


def _say_why(engine: "EngineProcess") -> int:
    """Tell why the engine did not start; the exit code. Raises what it refused to start with."""
    from vexpert.server.progress import EngineFailedError

    try:
        engine.connect()
    except EngineFailedError as error:
        print(f"error: {error}", file=sys.stderr)
    return 1


def _serve_engine(
    args: argparse.Namespace,
    engine: "EngineProcess",
    options: "ServerOptions",
    bound: socket.socket,
    boot: Boot,
) -> int:
    """Serve an engine that is starting; what is imported here loads beside it."""
    with boot.watching(engine):
        from vexpert.server.app import create_app
        from vexpert.server.engine_boot import settle
        from vexpert.server.listen import url_of
        from vexpert.server.run import run as run_server

        engine.connect()
    app = create_app(engine, options)
    settle()
    boot.check()
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
            what = "not a folder" if folder.exists() else "no such folder"
            raise ConfigError(f"{folder}: {what}; give an adapter's folder {where}")
        if not (folder / "adapter_config.json").is_file():
            raise ConfigError(f"{folder}: no adapter_config.json in it; not an adapter {where}")
        check_name(module.name, frozenset(base_names))
        if module.name in seen:
            raise ConfigError(f"adapter {module.name!r} is given twice; rename one of them")
        seen.add(module.name)


def _server_options(
    args: argparse.Namespace, config: EngineConfig, names: tuple[str, ...]
) -> "ServerOptions":
    """Raises ConfigError, also for what the options name: the file of keys, the template."""
    from vexpert.server.defaults import sampling_defaults

    options = dataclasses.replace(
        server_options(args),
        served_model_names=names,
        chat_template=_read_template(args.chat_template),
        sampling_defaults=sampling_defaults(config.model),
    )
    options.keys()
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

    shown = {**dataclasses.asdict(config), **shown_options(args)}
    logger.info("vexpert %s", __version__)
    logger.info("config: %s", " ".join(f"{name}={value}" for name, value in shown.items()))
