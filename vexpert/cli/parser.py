"""The argument parser of every command: one-line errors, and options made from EngineConfig."""

import argparse
import dataclasses
import types
import typing
from difflib import get_close_matches
from typing import Any, NoReturn

from vexpert.config import EngineConfig

GROUP_TITLES = {
    "model": "model",
    "cache": "KV cache",
    "scheduler": "scheduler",
    "lora": "adapters",
}


class Parser(argparse.ArgumentParser):
    """Errors are one line on stderr and exit code 2."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options = {"formatter_class": HelpFormatter, "allow_abbrev": False, **options}
        super().__init__(*args, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}{self._hint(message)}; see {self.prog} --help\n")

    def _hint(self, message: str) -> str:
        if not message.startswith("unrecognized arguments: "):
            return ""
        given = message.removeprefix("unrecognized arguments: ").split()[0].split("=")[0]
        near = get_close_matches(given, _all_options(self), 1)
        return f"; did you mean {near[0]}?" if near else ""


def _all_options(parser: argparse.ArgumentParser) -> list[str]:
    """Options of a parser and of its commands."""
    options = list(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            options += [name for sub in action.choices.values() for name in _all_options(sub)]
    return options


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Show defaults that say something: not None, not an empty string, not a switch's False."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=34, **options)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default in ("", []):
            return action.help
        return super()._get_help_string(action)


def add_engine_options(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """One option for each field of EngineConfig but `model`; their groups, by name."""
    hints = typing.get_type_hints(EngineConfig)
    groups = {name: parser.add_argument_group(title) for name, title in GROUP_TITLES.items()}
    for spec in dataclasses.fields(EngineConfig):
        if spec.name != "model":
            _add_option(groups[spec.metadata["group"]], spec, hints[spec.name])
    return groups


def _add_option(group: Any, spec: "dataclasses.Field[Any]", hint: Any) -> None:
    flag = "--" + spec.name.replace("_", "-")
    help = spec.metadata["help"].replace("%", "%%")  # argparse formats it
    shared = {"dest": spec.name, "default": spec.default, "help": help}
    if hint is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **shared)
        return
    kind = _plain_type(hint)
    choices = spec.metadata["choices"]
    group.add_argument(
        flag,
        type=kind,
        choices=choices,
        metavar=None if choices else {int: "N", float: "X"}.get(kind, "TEXT"),
        **shared,
    )


def _plain_type(hint: Any) -> type:
    """The type of a value given in words: `int | None` is int."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    assert isinstance(hint, type)
    return hint


def engine_config(args: argparse.Namespace, **overrides: Any) -> EngineConfig:
    """The EngineConfig that parsed options describe. Raises ConfigError."""
    names = {spec.name for spec in dataclasses.fields(EngineConfig)}
    given = {name: value for name, value in vars(args).items() if name in names}
    return EngineConfig.from_options(**{**given, **overrides})
