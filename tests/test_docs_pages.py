"""quickstart, python, migrating, troubleshooting: what they show runs, what they name exists."""

import doctest
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers_messages import messages

from vexpert import LLM, SamplingParams
from vexpert.cli.completion import walk
from vexpert.cli.main import build_parser
from vexpert.cli.other_flags import BY_COMMAND

pytest_plugins = ["helpers_demo_server"]
ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
QUICKSTART, PYTHON, MIGRATING, TROUBLE = (
    (DOCS / f"{name}.md").read_text()
    for name in ("quickstart", "python", "migrating", "troubleshooting")
)
ADDRESS = "http://127.0.0.1:8000"
COMMANDS = {command.path: command for command in walk(build_parser())}
SERVE_FLAGS = set(COMMANDS["serve",].flags)


def steps(text: str) -> list[tuple[str, str]]:
    """Each command of the console blocks, and the lines shown below it."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            found.append((command, shown))
    return found


def test_the_quickstart(url: str) -> None:
    commands = steps(QUICKSTART)
    assert len(commands) == 7
    program = f"{sys.executable} -m vexpert"
    for command, shown in commands:
        shell = re.sub(r"^vexpert (chat|bench serve)", rf"{program} \1 --url {url}", command)
        shell = re.sub(r"\| python ", f"| {sys.executable} ", shell.replace(ADDRESS, url))
        done = subprocess.run(
            shell, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, f"{shell}\n{done.stdout}{done.stderr}"
        if shown:
            assert done.stdout.strip() == shown.strip()
        else:
            assert "Serving Benchmark Result" in done.stdout


def test_the_quickstarts_client(url: str) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", QUICKSTART, re.DOTALL)
    printed = StringIO()
    names: dict[str, object] = {}
    with redirect_stdout(printed):
        exec(block.replace(ADDRESS, url), names)
    names["client"].close()  # type: ignore[attr-defined]
    lines = printed.getvalue().splitlines()
    assert lines == ["vexpert-demo hello", "upper HELLO"]
    assert all(f"`{line}`" in QUICKSTART for line in lines)


def test_the_python_page() -> None:
    pytest.importorskip("xgrammar")
    test = doctest.DocTestParser().get_doctest(PYTHON, {}, "python.md", str(DOCS / "python.md"), 0)
    assert len(test.examples) > 20
    told: list[str] = []
    result = doctest.DocTestRunner().run(test, out=told.append)
    assert result.failed == 0, "".join(told)


def test_every_sampling_option_is_told() -> None:
    assert set(SamplingParams.__dataclass_fields__) <= set(re.findall(r"`(\w+)`", PYTHON))


def rows(text: str) -> list[list[str]]:
    """Cells of the tables, without their headings."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_flags_to_migrate_to_exist() -> None:
    found = rows(MIGRATING)
    assert len(found) > 40
    for _, ours, note in found:
        flags = set(re.findall(r"`(--[a-z-]+)`", ours)) | set(re.findall(r"`(--[a-z-]+)`", note))
        assert flags - {"--enable-auto-tool-choice", "--enable-chunked-prefill"} <= SERVE_FLAGS
        assert ours or note


def test_flags_without_a_counterpart_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    lists = re.findall(r"^None: (.*?)\n\n", MIGRATING, re.MULTILINE | re.DOTALL)
    assert len(lists) == 2
    for text in lists:
        flags = re.findall(r"`(--[a-z-]+)`", text)
        assert len(flags) > 5
        for flag in flags:
            with pytest.raises(SystemExit):
                build_parser().parse_args(["serve", flag, "1"])
            assert f"unrecognized arguments: {flag}" in capsys.readouterr().err


def test_flags_of_others_get_a_pointer_to_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    (bench,) = re.findall(r"^`vllm bench serve`: .*?\n\n", MIGRATING, re.MULTILINE | re.DOTALL)
    for command, text in (("serve",), MIGRATING.replace(bench, "")), (("bench", "serve"), bench):
        known = set(COMMANDS[command].flags) | {"--url"}
        flags = set(re.findall(r"`(-?-[a-z-]+)`", text)) - known
        assert flags == BY_COMMAND[" ".join(("vexpert", *command))]
        assert len(flags) > 15
        for flag in flags:
            with pytest.raises(SystemExit):
                build_parser().parse_args([*command, flag, "1"])
            error = capsys.readouterr().err
            if flag not in ("--port", "--host"):
                assert "; docs/migrating.md says what there is instead; see" in error
            assert "did you mean --" not in error or flag in ("--port", "--host")


def names_after(words: str) -> list[str]:
    """What is in backquotes in one sentence of the migration page."""
    (text,) = re.findall(rf"^{words}: (.*?)\.\n", MIGRATING, re.MULTILINE | re.DOTALL)
    return re.findall(r"`([\w:]+)`", re.sub(r"\([^)]*\)", "", text))


def test_fields_and_metrics_that_are_said_to_be_missing_are(url: str) -> None:
    fields = names_after("Refused fields")
    assert len(fields) > 20
    body = {"model": "upper", "messages": [{"role": "user", "content": "x"}]}
    for field in fields:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body | {field: 1}, timeout=60)
        assert answer.status_code == 400
        assert f"unknown field '{field}'" in answer.text
    missing = names_after("Missing metrics")
    assert len(missing) > 10
    page = httpx.get(f"{url}/metrics", timeout=60).text
    assert not [name for name in missing if f"{name}{{" in page or f"{name}_bucket" in page]


def test_the_python_of_migrating() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", MIGRATING, re.DOTALL)
    names: dict[str, object] = {}
    exec(block, names)
    upper, base = names["outputs"]  # type: ignore[misc]
    assert (upper.adapter, base.adapter) == ("upper", None)  # type: ignore[has-type]
    methods, arguments = (
        names_after(f"No {words}")
        for words in ("methods of `LLM`", "arguments of `SamplingParams`")
    )
    assert len(methods) > 5
    assert len(arguments) > 5
    assert not [name for name in methods if hasattr(LLM, name)]
    assert not set(arguments) & set(SamplingParams.__dataclass_fields__)


def test_the_python_of_adapters() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "adapters.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["report"].error is None
    assert names["checked"].is_right
    assert names["weights"].modules


# The yardstick names files of other projects; its links are tested as every page's are.
PAGES = sorted(path.name for path in DOCS.glob("*.md") if path.name != "yardstick.md")
QUOTED = [line[2:] for line in TROUBLE.splitlines() if line.startswith("> ")]


@pytest.mark.parametrize("message", QUOTED)
def test_messages_are_the_sources_own(message: str) -> None:
    text = message.removesuffix(": …").removesuffix(" …")
    assert any(text in found for found in messages())


def test_a_message_nobody_prints_would_be_seen() -> None:
    assert len(QUOTED) > 20
    assert not any("the KV cache has … bytes too many" in found for found in messages())


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_flags_and_links_of_every_page(page: str) -> None:
    text = (DOCS / page).read_text()
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert os.path.exists(DOCS / link), link
    for words, flags in re.findall(r"vexpert ((?:bench )?[a-z-]+)\b([^`\n]*)", text):
        command = COMMANDS.get(tuple(words.split()))
        if command is not None and not command.commands:
            used = set(re.findall(r"(?<!\S)(--[a-z][\w-]*)", flags.split("#")[0]))
            assert used <= set(command.flags), f"{words}: {used - set(command.flags)}"


FILE = re.compile(r"(?<![\w/.{-])(?:[\w.-]+/)*[\w-]+\.(?:py|md|json|js|yaml|csv|toml)\b")
OTHERS = {
    "out.json",
    "plans.json",
    "automodel_peft_config.json",
}  # what a command writes; a trainer's file
PLACES = [ROOT / name for name in ("docs", "vexpert", "tests", "bench", "scripts", "deploy")]
KNOWN = [f"/{path.relative_to(ROOT)}" for place in PLACES for path in place.rglob("*")]
KNOWN += [f"/{path.name}" for path in ROOT.iterdir()]


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page}" for page in PAGES)])
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = {name for name in FILE.findall(text) if not name.startswith("../")} - OTHERS
    lost = {name for name in named if not any(path.endswith(f"/{name}") for path in KNOWN)}
    assert not lost
    tests = set(re.findall(r"`(test_\w+?)(?:::\w+)?`", text))
    functions = "".join(file.read_text() for file in (ROOT / "tests").glob("test_*.py"))
    for name in tests:
        assert f"/tests/{name}.py" in KNOWN or f"def {name}(" in functions, name
