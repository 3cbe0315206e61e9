"""`--config FILE`: options from a YAML file, under their own names; the command line wins."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vexpert.errors import ConfigError, nearest

NOT_IN_FILES = ("help", "config")


def add_config(parser: argparse.ArgumentParser) -> None:
    """The option --config."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; see below")


def file_in(args: list[str]) -> str | None:
    """The value of --config among a command's words, if it is there."""
    scout = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    scout.add_argument("--config")
    try:
        found: str | None = scout.parse_known_args(args)[0].config
    except argparse.ArgumentError:  # --config without a value: the whole parser says so
        return None
    return found


def read_defaults(file: str, actions: list[argparse.Action]) -> dict[str, Any]:
    """What `file` sets, by dest, checked as the command line would be. Raises ConfigError."""
    known = {_name(action): action for action in actions if action.dest not in NOT_IN_FILES}
    values: dict[str, Any] = {}
    for key, value in _read(file).items():
        name = str(key).replace("_", "-")
        action = known.get(name)
        if action is None:
            near = nearest(name, known)
            hint = f"; did you mean {near}?" if near else ""
            raise ConfigError(f"config {file}: no option {key!r}{hint}")
        try:
            values[action.dest] = _value(action, value)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ConfigError(f"config {file}: {key}={value!r}: {error}") from error
    return values


def _read(file: str) -> dict[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config {file}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"config {file}: must hold `option: value` lines")
    return content


def _name(action: argparse.Action) -> str:
    """The option's long name without dashes, of `--x/--no-x` the first; a positional's own."""
    return action.option_strings[0].removeprefix("--") if action.option_strings else action.dest


def _value(action: argparse.Action, value: Any) -> Any:
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError("use true or false")
        return value
    if action.nargs == "+":
        return [_one(action, item) for item in _items(action, value)]
    return _one(action, value)


def _items(action: argparse.Action, value: Any) -> list[Any]:
    """Values of an option that takes several.

    lora-modules may be a mapping: `name: path`, or `name: {path: ..., pinned: ...}`.
    """
    if isinstance(value, dict) and action.dest == "lora_modules":
        return [
            {"name": name, **given} if isinstance(given, dict) else f"{name}={given}"
            for name, given in value.items()
        ]
    return value if isinstance(value, list) else [value]


def _one(action: argparse.Action, value: Any) -> Any:
    if (isinstance(value, dict | list) and action.dest != "lora_modules") or value is None:
        raise ValueError("use one value")
    convert: Callable[[Any], Any] = action.type if callable(action.type) else str
    converted = convert(_word(value))
    if action.choices is not None and converted not in action.choices:
        raise ValueError(f"use one of {', '.join(map(str, action.choices))}")
    return converted


def _word(value: Any) -> str:
    """As one would write it on the command line."""
    import json

    return json.dumps(value) if isinstance(value, dict) else str(value)
