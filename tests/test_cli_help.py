"""Help with examples that parse, completion that completes, bars only in terminals."""

import shlex
import shutil
import subprocess
import sys

import pytest

from vexpert.checkout import commit
from vexpert.cli import progress
from vexpert.cli.collect_env import PACKAGES, collect
from vexpert.cli.completion import bash, fish, walk
from vexpert.cli.examples import EXAMPLES
from vexpert.cli.main import COMMANDS, build_parser, main
from vexpert.log import quiet_libraries

PATHS = {command.path: command for command in walk(build_parser())}


@pytest.mark.parametrize("command", EXAMPLES)
def test_examples_are_shown_and_parse(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("vexpert.cli.parser.file_in", lambda words: None)  # serve.yaml is not here
    words = [] if command == "vexpert" else command.split()
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    shown = capsys.readouterr().out
    for arguments, meaning in EXAMPLES[command]:
        line = " ".join(["vexpert", *words, arguments]).rstrip()
        assert f"  {line} " in shown
        assert f"# {meaning}" in shown
        if command != "bench" or arguments:
            build_parser().parse_args([*words, *shlex.split(arguments)])


def test_the_options_of_serve_are_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    titles = [line for line in capsys.readouterr().out.splitlines() if line.endswith(":")]
    wanted = ["server", "access", "limits", "chat", "logs", "model", "KV cache", "scheduler"]
    assert [title.rstrip(":") for title in titles if title[0] != " "][2:-1] == [*wanted, "adapters"]


def completed(*words: str) -> list[str]:
    """What bash offers for the last of `words`."""
    script = bash(list(PATHS.values()))
    line = " ".join(shlex.quote(word) for word in ("vexpert", *words))
    script += f"\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _vexpert; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(
        ["bash", "-u", "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("",), [*COMMANDS, "-h", "--help", "--version"]),
        (("se",), ["serve"]),
        (("serve", "--max-lo"), ["--max-loras", "--max-lora-rank"]),
        (("serve", "model", "--dtype", ""), ["auto", "float32", "bfloat16", "float16"]),
        (("serve", "--port", "1", "--no-w"), ["--no-web"]),
        (("bench", ""), ["kernel", "tune", "throughput", "serve", "-h", "--help"]),
        (("bench", "serve", "--popularity", "z"), ["zipf"]),
        (("bench", "serve", "--dty"), []),
        (("completion", "z"), ["zsh"]),
    ],
)
def test_bash_completes(words: tuple[str, ...], wanted: list[str]) -> None:
    assert completed(*words) == wanted


def test_scripts_of_all_shells(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        assert "vexpert" in capsys.readouterr().out
    lines = fish(list(PATHS.values())).splitlines()
    serve = "__fish_seen_subcommand_from serve'"
    assert any(serve in line and line.endswith("-l port") for line in lines)
    assert sum(line.endswith("-l popularity -x -a 'uniform zipf identical distinct'")
               for line in lines) == 1  # fmt: skip


def test_a_bar_shows_in_terminals_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.progress("requests", 2) as done:
        done()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress.progress("requests", 1) as done:
        done()
    assert "requests" in capsys.readouterr().err


def test_transformers_bars_are_off_in_log_files() -> None:
    from transformers.utils import logging

    logging.enable_progress_bar()
    try:
        quiet_libraries()
        assert not logging.is_progress_bar_enabled()
    finally:
        logging.enable_progress_bar()


def test_collect_env_tells_what_a_report_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("OPENAI_API_KEY", "a-secret")
    facts = collect()
    assert set(PACKAGES) < set(facts)
    assert facts["OMP_NUM_THREADS"] == "3"
    assert int(facts["cpu cores usable"]) >= 1
    assert "a-secret" not in str(facts)
    assert facts["commit"] == (commit() or "unknown: not a git checkout")
    assert {"vexpert", "python", "platform", "cpu", "cpu features", "memory"} < set(facts)
