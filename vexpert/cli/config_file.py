"""`--config FILE`: options from a YAML file, under their own names; the command line wins."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vexpert.config import shown
from vexpert.errors import ConfigError, nearest

NOT_IN_FILES = ("help", "config")
SWITCHES = {"pinned", "lazy"}  # of an entry of lora-modules


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
            raise ConfigError(f"config {file}: no option {str(key)!r}{hint}")
        if action.dest in values:
            raise ConfigError(f"config {file}: {name} is given twice; keep one")
        try:
            values[action.dest] = _value(action, value)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ConfigError(f"config {file}: {key}={shown(_plain(value))}: {error}") from error
    return values


class Word(str):
    """A scalar as it is written, and what YAML would make of it without quotes."""

    tag: str

    @property
    def truth(self) -> bool | None:
        """Of a switch; None: it says neither true nor false."""
        import yaml

        is_bool = self.tag == "tag:yaml.org,2002:bool"
        return yaml.SafeLoader.bool_values.get(self.lower()) if is_bool else None

    @property
    def is_null(self) -> bool:
        return self.tag == "tag:yaml.org,2002:null"


def _read(file: str) -> dict[Any, Any]:
    import yaml

    try:
        content = yaml.load(Path(file).read_text(encoding="utf-8"), _loader())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"config {file}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"config {file}: must hold `option: value` lines")
    return content


def _loader() -> Any:
    """YAML's safe loader, but scalars stay words, and a key may be there once.

    It would read the key `0123` as 83, `yes` as true and `1e5` as a text.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
        def construct_document(self, node: Any) -> Any:
            self.deep_construct = True  # a list that holds itself is then refused
            return super().construct_document(node)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set[str]()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    fault = f"{key.value!r} is given twice; keep one"
                    raise yaml.constructor.ConstructorError(None, None, fault, key.start_mark)
                seen |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
            made: dict[Any, Any] = super().construct_mapping(node, deep)
            return made

    def word(loader: Any, node: Any) -> Word:
        made = Word(loader.construct_scalar(node))
        made.tag = node.tag
        return made

    for kind in ("bool", "int", "float", "null", "timestamp", "str", "value"):
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", word)
    return Loader


def _name(action: argparse.Action) -> str:
    """The option's long name without dashes, of `--x/--no-x` the first; a positional's own."""
    return action.option_strings[0].removeprefix("--") if action.option_strings else action.dest


def _value(action: argparse.Action, value: Any) -> Any:
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        truth = value.truth if isinstance(value, Word) else None
        if truth is None:
            raise ValueError("use true or false")
        return truth
    if action.nargs == "+":
        items = _items(action, value)
        if not items:
            raise ValueError("give one value at least, or leave it out")
        return [_one(action, item) for item in items]
    if action.dest == "lora_weights" and isinstance(value, dict):
        return json.dumps({str(name): _number(weight) for name, weight in value.items()})
    return _one(action, value)


def _items(action: argparse.Action, value: Any) -> list[Any]:
    """Values of an option that takes several.

    lora-modules may be a mapping: `name: path`, or `name: {path: ..., pinned: ...}`.
    """
    if isinstance(value, dict) and action.dest == "lora_modules":
        return [_named_module(name, given) for name, given in value.items()]
    return value if isinstance(value, list) else [value]


def _named_module(name: Any, given: Any) -> Any:
    """An entry of lora-modules from `name: path`, or `name: {...}`. Raises ValueError."""
    if isinstance(given, dict):
        return {"name": name, **given}
    if isinstance(given, Word) and not given.is_null:
        return f"{name}={given}"
    what = "has a list" if isinstance(given, list) else "is null, which is no value"
    raise ValueError(f"{_plain(name)!r} {what}: give its path, or leave it out")


def _one(action: argparse.Action, value: Any) -> Any:
    is_module = action.dest == "lora_modules" and isinstance(value, dict)
    if not (is_module or isinstance(value, str)) or (isinstance(value, Word) and value.is_null):
        raise ValueError("use one value, or leave it out")
    convert: Callable[[Any], Any] = action.type if callable(action.type) else str
    converted = convert(json.dumps(_module(value)) if is_module else str(value))
    if action.choices is not None and converted not in action.choices:
        raise ValueError(f"use one of {', '.join(map(str, action.choices))}")
    return converted


def _module(fields: dict[Any, Any]) -> dict[str, Any]:
    """An entry of lora-modules, as its JSON form has it: switches are no words."""
    found = {str(name): _plain(value) for name, value in fields.items()}
    for name in SWITCHES & found.keys():
        word = fields[name]
        truth = word.truth if isinstance(word, Word) else None
        found[name] = found[name] if truth is None else truth
    return found


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{_plain(value)!r}: use numbers") from None


def _plain(value: Any) -> Any:
    """Without what this file knows of words."""
    if isinstance(value, Word):
        return None if value.is_null else str(value)
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
