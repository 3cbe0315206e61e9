"""Every option, drawn from the dataclasses: what says nothing or cannot be is refused everywhere.

From Python, from the command line, and from a YAML file. Each refusal stands beside a value that
passes, so that it is the value which is refused.
"""

import dataclasses
import json
import typing
from argparse import Namespace
from pathlib import Path
from types import NoneType
from typing import Any

import pytest

from vexpert.cli import serve
from vexpert.cli.config_file import read_defaults
from vexpert.cli.parser import Field, Parser, dest_of
from vexpert.cli.serve_options import CommandOptions, server_fields
from vexpert.config import EngineConfig
from vexpert.errors import ConfigError
from vexpert.server.options import ServerOptions

KINDS = (EngineConfig, ServerOptions, CommandOptions)
FIELDS = [(kind, spec) for kind in KINDS for spec in dataclasses.fields(kind)]
# What users may leave empty, and what it then means. All else that is empty says nothing.
MAY_BE_EMPTY = {"model": "the bundled demo"}
# Neither has bounds of its own in the table: only 1 is served; 0 of a device's memory is none.
GOOD = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.5}
NO_NUMBERS = (float("nan"), float("inf"), float("-inf"))
HUGE = 10**400


def types_of(spec: Field) -> tuple[Any, ...]:
    """Of `int | None`: int and NoneType; of a tuple or a dict, that."""
    origin = typing.get_origin(spec.type)
    if origin in (tuple, dict):
        return (origin,)
    return typing.get_args(spec.type) or (spec.type,)


def kind_of(spec: Field) -> Any:
    (kind,) = set(types_of(spec)) - {NoneType}
    return kind


def bounds_of(spec: Field) -> tuple[Any, Any]:
    bounds = spec.metadata.get("bounds")
    assert bounds is not None, f"{spec.name} is a number without bounds"
    low, high = bounds
    assert low < high
    return low, high


def good(spec: Field) -> list[Any]:
    """Values that pass, not the default alone."""
    if spec.name in GOOD:
        return [GOOD[spec.name]]
    kind = kind_of(spec)
    if kind in (int, float):
        return [kind(bound) for bound in bounds_of(spec)]
    if kind is bool:
        return [True, False]
    if kind is dict:
        return [{}]
    if kind is tuple:
        return [("a",), ("a", "0123")]
    return [*(spec.metadata.get("choices") or ("x",))]


def bad(spec: Field) -> list[Any]:
    """Values that no such field may have."""
    kind = kind_of(spec)
    values: list[Any] = [[1], {1}, b"a"]
    values += [] if NoneType in types_of(spec) else [None]
    if kind in (int, float):
        low, high = bounds_of(spec)
        beyond = [low - 1, high + 1] if kind is int else [low - 1, high * 2, HUGE, -HUGE]
        return [*values, "", "x", "1", True, {}, *beyond, *NO_NUMBERS, 10**5000]
    if kind is bool:
        return [*values, 0, 1, "", "true", {}]
    if kind is dict:
        return [*values, "", "{}", ()]
    if kind is tuple:
        return [*values, "", "a", {}, [], ["a"], (1,), (None,), ("",), ("a", ""), (" ",)]
    blank = [] if spec.name in MAY_BE_EMPTY else ["", " ", "\n", "a\0b"]
    return [*values, *blank, 1, True, {}, *(["nonsense"] if spec.metadata.get("choices") else [])]


def ids(values: Any) -> str | None:
    return values.__name__ if isinstance(values, type) else getattr(values, "name", None)


@pytest.mark.parametrize(("kind", "spec"), FIELDS, ids=ids)
def test_from_python(kind: type, spec: Field) -> None:
    for value in good(spec):
        made = kind(**{spec.name: value})
        assert getattr(made, spec.name) == value
    if NoneType in types_of(spec):
        assert getattr(kind(**{spec.name: None}), spec.name) is None
    for value in bad(spec):
        with pytest.raises(ConfigError, match=r"^(api_key: a key|\w+=)") as caught:
            kind(**{spec.name: value})
        told = str(caught.value)
        assert told.startswith((f"{spec.name}=", f"{spec.name.removesuffix('s')}: ")), (value, told)
        assert len(told) < 400, told


def test_an_empty_text_means_what_is_written_here() -> None:
    empty = {spec.name for _, spec in FIELDS if spec.metadata.get("may_be_empty")}
    assert empty == MAY_BE_EMPTY.keys()
    assert all("empty: " in s.metadata["help"] for _, s in FIELDS if s.name in MAY_BE_EMPTY)


@pytest.mark.parametrize("wrong", [["key"], ("key", ""), ("key", "a key"), ("key", "a\0b"), "key"])
def test_no_message_shows_a_key(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="api_key") as caught:
        ServerOptions(api_keys=wrong)
    assert "'key'" not in str(caught.value)


# ---- the command line and the file

OPTIONS = [
    *[spec for spec in dataclasses.fields(EngineConfig) if spec.metadata["group"]],
    *[spec for spec, _ in server_fields()],
]
assert len({dest_of(spec) for spec in OPTIONS}) == len(OPTIONS)


def new_parser() -> Parser:
    parser = Parser(prog="vexpert serve")
    serve.add_arguments(parser)
    return parser


PARSER = new_parser()  # --config would change its defaults


def check(parser: Parser, *words: str) -> Any:
    """What `vexpert serve` does with `words` before anything is imported or bound."""
    args = parser.parse_args(words)
    serve._check(args)
    return args


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that refuses `words`."""
    with pytest.raises((ConfigError, SystemExit)) as caught:
        check(PARSER, *words)
    if isinstance(caught.value, SystemExit):
        told = capsys.readouterr().err
        assert caught.value.code == 2
        assert told.startswith("error: ")
    else:
        told = f"{caught.value}\n"
    assert told.count("\n") == 1
    return told


def check_file(file: Path) -> None:
    defaults = vars(PARSER.parse_args([]))
    serve._check(Namespace(**defaults | read_defaults(str(file), PARSER._actions)))


def refusal_of(file: Path) -> str:
    """The error that refuses a file: when it is read, or as the command line would be."""
    with pytest.raises(ConfigError) as caught:
        check_file(file)
    return str(caught.value)


def is_switch(spec: Field) -> bool:
    return "switch" in spec.metadata or kind_of(spec) is bool


def wrong_words(spec: Field) -> list[str]:
    """What no such option may be given, in words."""
    kind = kind_of(spec)
    if kind in (int, float):
        low, high = bounds_of(spec)
        numbers = ["", " ", "x", "1.5.1", "nan", "inf", "-inf", "1e999", str(low - 1), "1" * 5000]
        return [*numbers, *([str(high + 1), "1.5"] if kind is int else [str(high * 2)])]
    blank = [] if spec.name in MAY_BE_EMPTY else ["", " ", "\t"]
    return [*blank, *(["nonsense"] if spec.metadata.get("choices") else [])]


@pytest.fixture
def fitting(tmp_path: Path) -> dict[str, list[str]]:
    """Words that an option takes, where an example of its type is not enough."""
    return {"allowed_adapter_roots": [str(tmp_path)]}


def good_words(spec: Field, fitting: dict[str, list[str]]) -> list[str]:
    value = good(spec)[0]
    words = list(value) if isinstance(value, tuple) else [str(value)]
    return fitting.get(spec.name, words)


@pytest.mark.parametrize("spec", OPTIONS, ids=ids)
def test_from_the_command_line(
    spec: Field, fitting: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    flag = f"--{dest_of(spec).replace('_', '-')}"
    if is_switch(spec):
        assert getattr(check(PARSER, flag), dest_of(spec)) is True
        assert flag in refusal(capsys, f"{flag}=")
        return
    before = [] if spec.name == "model" else [flag]
    fit = good_words(spec, fitting)
    check(PARSER, *before, *fit)
    for word in wrong_words(spec):
        told = refusal(capsys, f"{flag}={word}")
        assert flag in told or spec.name.removesuffix("s") in told, told
        if kind_of(spec) is tuple:
            refusal(capsys, flag, fit[0], word)
    if before:
        assert flag in refusal(capsys, flag)


@pytest.mark.parametrize("spec", OPTIONS, ids=ids)
def test_from_a_file(
    spec: Field,
    fitting: dict[str, list[str]],
    tmp_path: Path,
) -> None:
    name, file = dest_of(spec).replace("_", "-"), tmp_path / "serve.yaml"

    def written(value: str) -> tuple[str, str]:
        file.write_text(f"{name}: {value}\n")
        return "--config", str(file)

    def passes(value: str) -> Any:
        return getattr(check(new_parser(), *written(value)), dest_of(spec))

    if is_switch(spec):
        assert passes("true") is True
        assert passes("false") is False
        wrong = ["'true'", "''", "1", "x"]
    else:
        fit = json.dumps(good_words(spec, fitting))
        passes(fit if kind_of(spec) is tuple else fit[1:-1])
        wrong = [json.dumps(word) for word in wrong_words(spec)]
        blank = spec.name not in MAY_BE_EMPTY and "choices" not in spec.metadata
        wrong += ['"\\0"', '"a\\0b"'] if blank else []
        wrong += ["[[a]]", "[{a: b}]", "[null]", "[x, '']"]
    if spec.name == "lora_weights":  # a mapping of none is one
        assert passes("{}") == "{}"
    wrong += [] if spec.name == "lora_weights" else ["{}"]
    for value in ("", "null", "~", "[]", "[a, [b]]", "{a: }", *wrong):
        written(value)
        told = refusal_of(file)
        assert name in told or spec.name.removesuffix("s") in told, told
        assert len(told) < 700
