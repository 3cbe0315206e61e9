"""Options of `vexpert serve` that shape the HTTP server, made from dataclasses."""

import argparse
import dataclasses
import typing
from dataclasses import dataclass
from typing import Any

from vexpert.cli.parser import Field, add_option, dest_of
from vexpert.config import option
from vexpert.server.options import ServerOptions

LOG_LEVELS = ("debug", "info", "warning", "error")
GROUPS = ("server", "access", "limits", "chat", "logs")


@dataclass(frozen=True)
class CommandOptions:
    """What the command itself needs: where it listens, what it reads, how it logs."""

    host: str = option("127.0.0.1", "address to listen on", "server", metavar="HOST")
    port: int = option(8000, "0: a free one", "server")
    chat_template: str | None = option(
        None, "Jinja template in place of the model's own", "chat", metavar="FILE"
    )
    log_format: str = option("text", "json: an object a line", "logs", ("text", "json"))
    uvicorn_log_level: str = option("info", "of HTTP's lines", "logs", LOG_LEVELS)


def server_fields() -> list[tuple[Field, Any]]:
    """Fields of both dataclasses that are options, with their types, by group."""
    found: list[tuple[Field, Any]] = []
    for kind in (CommandOptions, ServerOptions):
        hints = typing.get_type_hints(kind)
        found += [(each, hints[each.name]) for each in dataclasses.fields(kind) if each.metadata]
    return sorted(found, key=lambda pair: GROUPS.index(pair[0].metadata["group"]))


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """The options of the HTTP server, in groups."""
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for spec, hint in server_fields():
        add_option(groups[spec.metadata["group"]], spec, hint)


def server_options(args: argparse.Namespace) -> ServerOptions:
    """The ServerOptions that parsed options describe. Raises ConfigError."""
    given: dict[str, Any] = {}
    for spec in dataclasses.fields(ServerOptions):
        if spec.metadata:
            value = getattr(args, dest_of(spec))
            if "switch" in spec.metadata:
                value = spec.metadata["switch"] if value else spec.default
            given[spec.name] = tuple(value) if isinstance(value, list) else value
    return ServerOptions(**given)


def shown_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the HTTP server as they were given, but no keys, for the log."""
    shown = {dest_of(spec): getattr(args, dest_of(spec)) for spec, _ in server_fields()}
    return shown | {"api_key": f"{len(args.api_key)} set" if args.api_key else None}
