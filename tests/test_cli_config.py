"""`vexpert serve --config FILE`: options from YAML, checked as the command line's are."""

from pathlib import Path

import pytest

from vexpert.cli.main import build_parser, main
from vexpert.engine.admission import parse_weights
from vexpert.server.interface import LoraModule


def config(tmp_path: Path, text: str) -> str:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    return str(file)


def test_a_file_sets_options_and_the_command_line_wins(tmp_path: Path) -> None:
    file = config(
        tmp_path,
        """
        model: folder
        port: 8123
        max_loras: 3
        dtype: bfloat16
        gpu-memory-utilization: 0.5
        enable-prefix-caching: false
        no-web: true
        api-key: [one, two]
        lora-modules:
          a: x/y
          c: {path: v/w, pinned: true}
        """,
    )
    args = build_parser().parse_args(
        ["serve", "--max-loras", "8", "--config", file, "--lora-modules", "b=z"]
    )
    assert (args.model, args.port, args.max_loras, args.dtype) == ("folder", 8123, 8, "bfloat16")
    assert (args.gpu_memory_utilization, args.enable_prefix_caching) == (0.5, False)
    assert (args.no_web, args.api_key) == (True, ["one", "two"])
    assert args.lora_modules == [
        LoraModule("a", "x/y"),
        LoraModule("c", "v/w", pinned=True),
        LoraModule("b", "z"),
    ]
    assert build_parser().parse_args(["serve"]).port == 8000


@pytest.mark.parametrize(
    "word", ["0123", "yes", "1e5", "1_000", "0x1F", "2026-01-02", "1:30", "=", "+.inf", "true"]
)
def test_a_text_is_what_is_written(tmp_path: Path, word: str) -> None:
    text = f"""
    api-key: {word}
    served-model-name: [{word}]
    lora-dir: {word}
    lora-weights: {{{word}: 2}}
    lora-modules: [{{name: {word}, path: {word}, lazy: true}}]
    """
    args = build_parser().parse_args(["serve", "--config", config(tmp_path, text)])
    assert (args.api_key, args.served_model_name, args.lora_dir) == ([word], [word], word)
    assert args.lora_modules == [LoraModule(word, word, lazy=True)]
    assert parse_weights(args.lora_weights) == {word: 2.0}


def test_lists_that_two_options_share(tmp_path: Path) -> None:
    text = "allowed-origins: &list [a, 0123]\napi-key: *list\nserved-model-name: *list"
    args = build_parser().parse_args(["serve", "--config", config(tmp_path, text)])
    assert args.allowed_origins == args.api_key == args.served_model_name == ["a", "0123"]


def test_a_positional_model_wins(tmp_path: Path) -> None:
    file = config(tmp_path, "model: folder\nlora-modules: [{name: a, path: x}, b=y]")
    args = build_parser().parse_args(["serve", "other", f"--config={file}"])
    assert args.model == "other"
    assert args.lora_modules == [LoraModule("a", "x"), LoraModule("b", "y")]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max-lora: 3", "no option 'max-lora'; did you mean max-loras?"),
        ("port: many", "port='many'"),
        ("port: [1, 2]", "use one value"),
        ("port:", "use one value"),
        ("dtype: int3", "use one of auto, float32"),
        ("no-web: 1", "use true or false"),
        ("enable-lora: maybe", "use true or false"),
        ("lora-modules: [x]", "NAME=PATH"),
        ("lora-modules: {x: {pinned: true}}", "the field 'path' is missing"),
        ("lora-modules: {a: null}", "'a' is null, which is no value: give its path"),
        ("lora-modules: {a: x, b: }", "'b' is null, which is no value: give its path"),
        ("lora-modules: {a: [x]}", "'a' has a list: give its path"),
        ("lora-modules: [null]", "use one value, or leave it out"),
        ("api-key: {a: b}", "use one value"),
        ("config: other.yaml", "no option 'config'"),
        ("- port", "must hold `option: value` lines"),
        ("a: [", "cannot be read"),
        ("port: 1\nport: 2", "'port' is given twice"),
        ("max-loras: 1\nmax_loras: 2", "max-loras is given twice"),
        ("lora-modules: {a: x, a: y}", "'a' is given twice"),
        ("lora-weights: {team: many}", "'many': use numbers"),
        ("lora-weights: {team: [1]}", "use numbers"),
        ("lora-weights: [team]", "use one value"),
        ("port: 0x10", "port='0x10'"),
        ("no-web: 'true'", "use true or false"),
        ("no-web: !!bool maybe", "use true or false"),
        ("api-key: []", "give one value at least"),
        ("lora-modules: {}", "give one value at least"),
        ("served-model-name: []", "give one value at least"),
        ("api-key: &x [*x]", "recursive"),
        ("lora-weights: &x {a: *x}", "recursive"),
        ("api-key: " + "[" * 5000, "cannot be read"),
    ],
)
def test_mistakes_name_the_file_and_the_option(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(tmp_path, text)
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--config", file])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: config {file}: ")
    assert told in error
    assert error.count("\n") == 1


def test_a_name_of_the_base_model_is_given_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(tmp_path, "served-model-name: [a, b, a]")
    for words in (["--config", file], ["--served-model-name", "a", "b", "a"]):
        assert main(["serve", "--port", "0", *words]) == 2
        shown = capsys.readouterr()
        assert shown.err == "error: served_model_name='a' is given twice; keep one\n"
        assert shown.out == ""


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--config", "/no/such.yaml"])
    assert "/no/such.yaml: cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--config"])
    assert "expected one argument" in capsys.readouterr().err
