"""Options of `vexpert serve` that shape the HTTP server, made from dataclasses."""

import argparse
import dataclasses
import typing
from dataclasses import dataclass
from typing import Any

from vexpert.cli.parser import Field, add_option, dest_of
from vexpert.config import check_options, option
from vexpert.server.options import ServerOptions

LOG_LEVELS = ("debug", "info", "warning", "error")
GROUPS = ("server", "access", "limits", "chat", "logs")


@dataclass(frozen=True)
class CommandOptions:
    """What the command itself needs: where it listens, what it reads, how it logs."""

    host: str = option("127.0.0.1", "address to listen on", "server", metavar="HOST")
    port: int = option(8000, "0: a free one", "server", bounds=(0, 65535))
    chat_template: str | None = option(
        None, "Jinja template in place of the model's own", "chat", metavar="FILE"
    )
    log_format: str = option("text", "json: an object a line", "logs", ("text", "json"))
    uvicorn_log_level: str = option("info", "of HTTP's lines", "logs", LOG_LEVELS)

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        check_options(self)


def server_fields() -> list[tuple[Field, Any]]:
    """Fields of both dataclasses that are options, with their types, by group."""
    found: list[tuple[Field, Any]] = []
    for kind in (CommandOptions, ServerOptions):
        hints = typing.get_type_hints(kind)
        found += [(each, hints[each.name]) for each in dataclasses.fields(kind) if _group(each)]
    return sorted(found, key=lambda pair: GROUPS.index(_group(pair[0])))


def _group(spec: Field) -> str:
    """Where --help shows the option; empty: it is none of the command line's."""
    return spec.metadata.get("group") or ""


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """The options of the HTTP server, in groups."""
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for spec, hint in server_fields():
        add_option(groups[_group(spec)], spec, hint)


def server_options(args: argparse.Namespace) -> ServerOptions:
    """The ServerOptions that parsed options describe. Raises ConfigError."""
    given: dict[str, Any] = {}
    for spec in dataclasses.fields(ServerOptions):
        if _group(spec):
            value = getattr(args, dest_of(spec))
            if "switch" in spec.metadata:
                value = spec.metadata["switch"] if value else spec.default
            given[spec.name] = tuple(value) if isinstance(value, list) else value
    return ServerOptions(**given)


def command_options(args: argparse.Namespace) -> CommandOptions:
    """The CommandOptions that parsed options describe. Raises ConfigError."""
    return CommandOptions(*(getattr(args, s.name) for s in dataclasses.fields(CommandOptions)))


def shown_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the HTTP server as they were given, but no keys, for the log."""
    shown = {dest_of(spec): getattr(args, dest_of(spec)) for spec, _ in server_fields()}
    return shown | {"api_key": f"{len(args.api_key)} set" if args.api_key else None}
