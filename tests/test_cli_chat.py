"""`vexpert chat` and `vexpert bench serve` against a running server."""

import asyncio
import json
import os
import re
import select
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from helpers_server import (
    BASE,
    NAMES,
    RunningServer,
    make_fake_engine,
    right_answer,
    serving,
    wait_for,
)

from vexpert.cli.bench.report import percentile
from vexpert.cli.client import Client, Reply, base_url
from vexpert.cli.main import main
from vexpert.server.options import ServerOptions

pytest_plugins = ["helpers_server_fixtures"]


def test_compare_prints_a_line_for_each_name(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--url", server.url, "--compare", "hello"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{name}\t{right_answer(name, 'hello')}" for name in [BASE, *sorted(NAMES)]]


def test_compare_asks_with_the_system_message(
    monkeypatch: pytest.MonkeyPatch, server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[dict[str, str]]] = []

    async def chat(
        self: Client, name: str, messages: list[dict[str, str]], *_: Any
    ) -> SimpleNamespace:
        asked.append(messages)
        return SimpleNamespace(text=name)

    monkeypatch.setattr(Client, "chat", chat)
    words = ["--compare", "hello", "--system", "be brief"]
    assert main(["chat", "--url", server.url, *words]) == 0
    turns = [("system", "be brief"), ("user", "hello")]
    assert [[(m["role"], m["content"]) for m in each] for each in asked] == [turns] * 5
    assert capsys.readouterr().out.count("\n") == 5


def test_compare_takes_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--compare", "hello", "--model", "upper"]) != 0
    assert "model='upper' with compare, which asks all names" in capsys.readouterr().err


@pytest.mark.parametrize(("model", "answer"), [([], "hello"), (["--model", "reverse"], "olleh")])
def test_once_prints_the_answer(
    server: RunningServer, capsys: pytest.CaptureFixture[str], model: list[str], answer: str
) -> None:
    assert main(["chat", "--url", server.url, "--once", "hello", *model]) == 0
    assert capsys.readouterr().out == f"{answer}\n"


@pytest.mark.parametrize(
    "text", ["127.0.0.1:8123", "http://127.0.0.1:8123/", "127.0.0.1:8123/v1", "127.0.0.1:8123/v1/"]
)
def test_addresses_as_people_write_them(text: str) -> None:
    assert base_url(text) == "http://127.0.0.1:8123"
    assert base_url(f"https://{text.removeprefix('http://')}") == "https://127.0.0.1:8123"


def test_an_address_without_a_scheme_is_reached(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.url.removeprefix("http://") + "/v1"
    assert main(["chat", "--url", url, "--once", "hello"]) == 0
    assert main(["bench", "serve", "--url", url, "--num-prompts", "1"]) == 0
    assert capsys.readouterr().out.startswith("hello\n")


def test_the_key_of_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(make_fake_engine(), ServerOptions((BASE,), api_keys=("secret",))) as server:
        words = ["chat", "--url", server.url, "--once", "hello"]
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        assert main(words) == 2
        assert "401" in (told := capsys.readouterr().err)
        assert "give --api-key or set OPENAI_API_KEY" in told
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert main(words) == 0
        assert main([*words, "--api-key", "wrong"]) == 2  # the option comes first


def test_an_unknown_model_is_told(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--url", server.url, "--once", "hello", "--model", "nobody"]) == 2
    assert "404" in capsys.readouterr().err


def test_the_figures_of_a_turn_fit_in_a_line() -> None:
    reply = Reply(1.0, "x", [1.05], "stop", prompt_tokens=120, cached_tokens=96)
    reply.completion_tokens, reply.ended = 24, 1.25
    assert reply.stats_line() == (
        "24 tokens in 0.25 s (96/s), first at 50 ms; prompt 120, cached 96; finished: stop"
    )


def test_a_conversation(
    server: RunningServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(
        [
            "",
            "hello",
            "/adapter upper",
            "hello",
            "/adapter nobody",
            "/models",
            "/compare abc",
            "/adapter",
            "hi",
            "/compare ",
            "/fly",
            "/new",
        ]
    )

    def typed(prompt: str) -> str:
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["chat", "--url", server.url]) == 0
    shown = capsys.readouterr().out
    assert f"Talking to {BASE}" in shown
    assert shown.index("hello\n") < shown.index("HELLO\n")
    figures = [line for line in shown.splitlines() if "finished: stop" in line]
    assert len(figures) == 3
    assert all(" tokens in " in line for line in figures)  # whole, in a narrow terminal too
    assert "error: no model 'nobody'; known:" in shown
    assert f"  {BASE}  base model" in shown
    assert "* upper  adapter" in shown
    assert "bcd" in shown  # shift's cell of the table
    assert "hi\n" in shown  # by the base model again
    assert "usage: /compare WORDS" in shown
    assert "no command /fly" in shown
    assert shown.count("/quit ") == 1  # the commands, after /fly alone


def test_a_name_is_no_markup(
    fake: Any, fake_server: RunningServer, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    fake.load_adapter("[/b]", "bundled")
    lines = iter(["hello", "/models", "/compare hi", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert main(["chat", "--url", fake_server.url, "--model", "[/b]"]) == 0
    shown = capsys.readouterr().out
    assert "Talking to [/b]." in shown
    assert "* [/b]  adapter" in shown


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "warm"])
@pytest.mark.parametrize(
    "words",
    [["chat", "--temperature"], ["bench", "tune", "--minutes"], ["bench", "kernel", "--bandwidth"]],
)
def test_numbers_are_finite(
    words: list[str], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words[:-1], f"{words[-1]}={value}"])
    assert ended.value.code == 2
    assert f"argument {words[-1]}: {value!r}: use a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--once", "\udcff"], "the text is not valid Unicode"),
        (["--once", "x", "--api-key", "\u00e9\u20ac"], "api_key: has characters"),
        (["--once", "x", "--url", "http://[::1"], "url='http://[::1'"),
    ],
)
def test_words_that_cannot_be_sent(
    server: RunningServer, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(["chat", "--url", server.url, *words]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert told in shown


def test_input_that_is_no_text(server: RunningServer) -> None:
    command = [sys.executable, "-m", "vexpert", "chat", "--url", server.url]
    ended = subprocess.run(
        command,
        input=b"hello\n\xff\xfe\n",
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
    )
    told = ended.stderr.decode()
    assert ended.returncode == 2
    assert told.startswith("error: the input is not UTF-8 text")
    assert told.count("\n") == 1


def test_history_is_sent(fake: Any, fake_server: RunningServer, monkeypatch: Any) -> None:
    lines = iter(["one", "two", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert main(["chat", "--url", fake_server.url, "--system", "be"]) == 0
    expected = "<system>be\n<user>one\n<assistant>one\n<user>two\n<assistant>"
    assert fake.prompts[-1] == expected


def read_until(terminal: int, wanted: str) -> None:
    """Read what a program writes to its terminal until the expression `wanted` is in it."""
    seen = ""
    while not re.search(wanted, seen, re.DOTALL):
        ready, _, _ = select.select([terminal], [], [], 60)
        assert ready, seen
        seen += os.read(terminal, 4096).decode()


def code_after(program: subprocess.Popen[bytes], terminal: int, key: bytes) -> int:
    """The exit code of a program, which shows its prompt, whose user presses `key`.

    A signal between the prompt and the call that waits for keys is noted by CPython's reader of
    lines, and seen only when the next key ends that call; so the key is pressed once it sleeps.
    """
    wait_for(lambda: state(program.pid) == "S")
    os.write(terminal, key)
    return program.wait(60)


def state(pid: int) -> str:
    """Of a process, as `ps` tells it: R where it runs or would, S where it sleeps."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return shown.stdout.strip()[:1]


IN_A_TERMINAL = """
import os, sys
os.login_tty(os.dup(0))
from vexpert.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("key", "code"), [(b"\x03", 130), (b"\x04", 0)])
def test_ctrl_c_and_ctrl_d_leave_at_once(server: RunningServer, key: bytes, code: int) -> None:
    ours, theirs = os.openpty()
    words = [sys.executable, "-c", IN_A_TERMINAL, "chat", "--url", server.url]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs) as chat:
        try:
            read_until(ours, f"{BASE}> ")
            os.write(ours, b"hello\r")
            read_until(ours, f"finished: stop.*{BASE}> ")
            assert code_after(chat, ours, key) == code  # no Enter is needed
        finally:
            chat.kill()
            os.close(ours)
            os.close(theirs)


def test_bench_serve_counts_every_token(
    fake: Any,
    fake_server: RunningServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = fake.step

    def step_in_turn() -> Any:
        """A server behind its engine would send tokens of several steps at once."""
        fake_server.run(asyncio.sleep(0.002))
        return step()

    monkeypatch.setattr(fake, "step", step_in_turn)
    words = [
        "--num-prompts",
        "12",
        "--input-len",
        "5",
        "--output-len",
        "7",
        "--request-rate",
        "200",
    ]
    assert main(["bench", "serve", "--url", fake_server.url, *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Serving Benchmark Result" in lines[0]
    result = json.loads(lines[-1])
    assert (result["completed"], result["failed"]) == (12, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (60, 84)
    assert 0 < result["median_ttft_ms"] <= result["p99_ttft_ms"] <= result["p99_e2el_ms"]
    assert result["mean_itl_ms"] > 0


def test_bench_serve_fails_when_nothing_is_answered(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--num-prompts", "2", "--output-len", "1000000"]
    assert main(["bench", "serve", "--url", server.url, *words]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "the server answers 400" in lines[-2]
    assert json.loads(lines[-1])["failed"] == 2


def test_percentiles_interpolate() -> None:
    assert percentile([], 0.5) == 0.0
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile(list(range(101)), 0.99) == 99.0
