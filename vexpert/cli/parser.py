"""The argument parser of every command: one-line errors, and options made from EngineConfig."""

import argparse
import dataclasses
import math
import re
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

from vexpert.cli.config_file import file_in, read_defaults
from vexpert.cli.other_flags import BY_COMMAND, PAGE
from vexpert.config import EngineConfig
from vexpert.errors import VexpertError, nearest

Field: TypeAlias = "dataclasses.Field[Any]"
GROUP_TITLES = {
    "model": "model",
    "cache": "KV cache",
    "scheduler": "scheduler",
    "lora": "adapters",
}

# Options of the server that its clients have under another name.
OTHER_FLAGS = {"--port": ("--url",), "--host": ("--url",)}


class Parser(argparse.ArgumentParser):
    """Errors are one line on stderr and exit code 2."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options = {"formatter_class": HelpFormatter, "allow_abbrev": False, **options}
        super().__init__(*args, **options)

    # argparse's overloads take namespaces of any class; ours are its own.
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does, but the parser of a subcommand refuses what it does not know.

        argparse leaves that to the outermost parser, which knows no option of the subcommand.
        """
        words = list(sys.argv[1:] if args is None else args)
        self._read_config(words)
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def _read_config(self, words: list[str]) -> None:
        """Make what a --config file says the defaults, where this command has that option."""
        if "--config" not in self._option_string_actions or (file := file_in(words)) is None:
            return
        try:
            self.set_defaults(**read_defaults(file, self._actions))
        except VexpertError as error:
            self.error(" ".join(str(error).split()))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}{self._hint(message)}; see {self.prog} --help\n")

    def _hint(self, message: str) -> str:
        if message.startswith("unrecognized arguments: "):
            given = message.removeprefix("unrecognized arguments: ").split()[0].split("=")[0]
            known = list(self._option_string_actions)
            near = [flag for flag in OTHER_FLAGS.get(given, ()) if flag in known]
            if not near and given in BY_COMMAND.get(self.prog, ()):
                return f"; {PAGE} says what there is instead"
            guess = near[0] if near else nearest(given, known if given.startswith("-") else [])
        elif wrong := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            guess = nearest(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
        else:
            guess = None
        return f"; did you mean {guess}?" if guess else ""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Keep the lines of examples. Show defaults that say something.

    None, an empty string and a switch's False do not.
    """

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=34, **options)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("examples:") else super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default in ("", []):
            return action.help
        return super()._get_help_string(action)


def add_client_options(parser: argparse.ArgumentParser, purpose: str) -> None:
    """The options --url and --api-key of a server's client."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help=f"server to {purpose}")
    # Not argparse's default, which --help would print.
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="key of the server; default: OPENAI_API_KEY of the environment",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """One option for each field of EngineConfig but `model`; their groups, by name."""
    hints = typing.get_type_hints(EngineConfig)
    groups = {name: parser.add_argument_group(title) for name, title in GROUP_TITLES.items()}
    for spec in dataclasses.fields(EngineConfig):
        if spec.metadata["group"] in groups and spec.name != "model":
            add_option(groups[spec.metadata["group"]], spec, hints[spec.name])
    return groups


def _flag(spec: Field) -> str:
    given: str | None = spec.metadata.get("flag")
    return given or "--" + spec.name.replace("_", "-")


def dest_of(spec: Field) -> str:
    """Where the parser leaves the value of a field's option."""
    return _flag(spec).removeprefix("--").replace("-", "_")


def add_option(group: Any, spec: Field, hint: Any) -> None:
    """The option of a dataclass's field, whose metadata `vexpert.config.option` made."""
    help = spec.metadata["help"].replace("%", "%%")  # argparse formats it
    if "switch" in spec.metadata:
        group.add_argument(_flag(spec), action="store_true", help=help)
        return
    default = list(spec.default) if isinstance(spec.default, tuple) else spec.default
    shared = {"dest": dest_of(spec), "default": default, "help": help}
    if hint is bool:
        group.add_argument(_flag(spec), action=argparse.BooleanOptionalAction, **shared)
        return
    kind = _plain_type(hint)
    choices = spec.metadata["choices"]
    usual = None if choices else {int: "N", float: "X"}.get(kind, "TEXT")
    shared |= {"nargs": "+"} if isinstance(spec.default, tuple) else {}
    metavar = spec.metadata.get("metavar", usual)
    group.add_argument(_flag(spec), type=kind, choices=choices, metavar=metavar, **shared)


def finite(text: str) -> float:
    """A number that JSON can hold. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r}: use a number")
    return value


def _plain_type(hint: Any) -> type:
    """The type of a value given in words: `int | None` is int, of several `tuple[str, ...]` str."""
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    assert isinstance(hint, type)
    return hint


def engine_config(args: argparse.Namespace, **overrides: Any) -> EngineConfig:
    """The EngineConfig that parsed options describe. Raises ConfigError."""
    names = {spec.name for spec in dataclasses.fields(EngineConfig)}
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if name in names
    }
    return EngineConfig.from_options(**{**given, **overrides})
