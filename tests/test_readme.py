"""Every command and every Python block of the README runs, and prints what the README shows."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
CONSOLE = [body for language, body in BLOCKS if language == "console"]
PYTHON = [body for language, body in BLOCKS if language == "python"]


def commands(block: str) -> list[str]:
    """The `$` lines of a console block; a trailing backslash continues a line."""
    joined = block.replace("\\\n", " ")
    return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]


ALL_COMMANDS = [command for block in CONSOLE for command in commands(block)]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """`make serve`, as the README says, on a port of the system's choice."""
    if not (ROOT / ".venv" / "bin" / "vexpert").exists():
        pytest.skip("needs `make install` in this checkout")
    process = subprocess.Popen(
        ["make", "serve", "ARGS=--port 0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    ready = next((line for line in process.stdout if line.startswith("vexpert ready: ")), "")
    try:
        found = re.match(r"vexpert ready: http://127\.0\.0\.1:(\d+) ", ready)
        assert found, "the server did not start"
        assert ready.replace(found[1], "8000") in TEXT
        yield int(found[1])
    finally:
        os.killpg(process.pid, 15)
        process.communicate(timeout=120)


def run(command: str, port: int) -> str:
    shell = command.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{port}")
    if shell.split()[:2] == [".venv/bin/vexpert", "chat"]:
        shell = shell.split("#")[0] + f" --url http://127.0.0.1:{port}"
    done = subprocess.run(
        shell, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{shell}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_first_screen_makes_the_claim_and_shows_the_contrast() -> None:
    screen = "\n".join(TEXT.splitlines()[:24])
    assert "One Mixture-of-Experts model in memory, many LoRA adapters" in screen
    assert "$ make serve" in screen
    for line in ("vexpert-demo\thello", "upper\tHELLO", "reverse\tolleh", "sort\tehllo"):
        assert line in screen
    assert "shift\tifmmp" in screen


def test_the_five_way_contrast(port: int) -> None:
    compare = next(command for command in ALL_COMMANDS if "--compare" in command)
    shown = CONSOLE[0].split("--compare hello")[1].splitlines()[1:]
    assert run(compare, port).splitlines() == [line for line in shown if line]


def test_curl_asks_one_adapter(port: int) -> None:
    ask = next(command for command in ALL_COMMANDS if '"model": "upper"' in command)
    assert '"HELLO"' in run(ask, port)


def test_python_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for block in PYTHON:
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(block, "README.md", "exec"), {})
        assert printed.getvalue() == "loud HELLO\nNone hello\n"


def test_serving_ones_own_model_and_adapters(tmp_path: Path, port: int) -> None:
    """The last block, with the demo's folders in place of `path/to/...`."""
    from helpers_serve import serve

    command = next(command for command in ALL_COMMANDS if "--lora-modules" in command)
    demo = ROOT / "vexpert" / "demo"
    for name, target in {
        "model": demo / "model",
        "adapter": demo / "adapters" / "upper",
        "other": demo / "adapters" / "reverse",
        "third": demo / "adapters" / "sort",
    }.items():
        (tmp_path / name).symlink_to(target)
    arguments = shlex.split(command.replace("path/to", str(tmp_path)))[2:]
    with serve(*arguments) as url:
        load = next(c for c in ALL_COMMANDS if "load_lora_adapter" in c)
        shell = load.replace("http://127.0.0.1:8000", url).replace("path/to", str(tmp_path))
        done = subprocess.run(
            shell, shell=True, capture_output=True, text=True, timeout=240, check=True
        )
        assert "legal" in done.stdout
        asked = [sys.executable, "-m", "vexpert", "chat", "--url", url, "--compare", "hello"]
        answers = subprocess.run(asked, capture_output=True, text=True, timeout=240, check=True)
    lines = dict(line.split("\t") for line in answers.stdout.splitlines())
    assert lines["billing"] == "HELLO"
    assert lines["support"] == "olleh"
    assert lines["legal"] == "ehllo"
