"""Signals in the first moments of a command: an exit code, and never a traceback."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vexpert import early

ROOT = str(Path(__file__).parent.parent)

# Sends itself a signal as a module is about to be imported, wherever in the program that is.
AT_IMPORT = """
import os, runpy, sys
wanted, number = sys.argv[1], int(sys.argv[2])
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            sys.meta_path.remove(self)
            print("reached", flush=True)
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Finder())
sys.argv = ["vexpert", *sys.argv[3:]]
runpy.run_module("vexpert", run_name="__main__", alter_sys=True)
"""
BEGUN = """
import runpy, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "vexpert.cli":
            print("begun", flush=True)
sys.meta_path.insert(0, Finder())
sys.argv = ["vexpert", *sys.argv[1:]]
runpy.run_module("vexpert", run_name="__main__", alter_sys=True)
"""
CHAT = ["chat", "--url", "http://127.0.0.1:9", "--once", "x"]
SERVE = ["serve", "--port", "0"]
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def start(script: str, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", script, *words],
        env=os.environ | {"PYTHONPATH": ROOT},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("vexpert.cli", CHAT),
        ("argparse", CHAT),
        ("vexpert.cli.serve", SERVE),
        ("vexpert.cli.completion", SERVE),  # the last one
    ],
)
def test_a_signal_while_the_command_is_imported(module: str, words: list[str], number: int) -> None:
    with start(AT_IMPORT, module, str(number), *words) as process:
        out, err = process.communicate(timeout=120)
    assert (out, err) == ("reached\n", "")
    assert process.returncode == 128 + number


def test_a_signal_while_the_server_is_imported() -> None:
    with start(AT_IMPORT, "vexpert.server.listen", str(signal.SIGINT), *SERVE) as process:
        out, err = process.communicate(timeout=120)
    assert out == "reached\n"
    assert "Traceback" not in err
    assert process.returncode == 0


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_the_client_is_imported(number: int) -> None:
    with start(AT_IMPORT, "httpx", str(number), *CHAT) as process:
        out, err = process.communicate(timeout=120)
    assert (out, err) == ("reached\n", "")
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGTERM)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("words", [CHAT, SERVE], ids=["chat", "serve"])
@pytest.mark.parametrize("delay", [0.0, 0.05, 0.2])
def test_a_signal_after_a_while(words: list[str], number: int, delay: float) -> None:
    """Whatever the command does then: it takes a signal, or has ended by itself."""
    with start(BEGUN, *words) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        _, err = process.communicate(timeout=120)
    assert "Traceback" not in err
    ended = (2,) if words is CHAT else (0,)  # nobody listens there; before it was ready
    assert process.returncode in (128 + number, -signal.SIGTERM, *ended), err


HELD = """
import multiprocessing.resource_tracker as tracker, os, signal
from vexpert.server.engine_process import _signals_held
signal.signal(signal.SIGTERM, lambda number, frame: print("signal", flush=True))
with _signals_held():
    os.kill(os.getpid(), signal.SIGTERM)
    tracker.ensure_running()
    print("started", flush=True)
"""


def test_no_signal_comes_amid_the_start_of_the_engine() -> None:
    """Python starts a helper with the first process, and lets signals in again behind it."""
    with start(HELD) as process:
        out, err = process.communicate(timeout=120)
    assert (out, err, process.returncode) == ("started\nsignal\n", "", 0)


def test_handlers_are_given_back_and_others_kept() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as nohup does
        signal.signal(signal.SIGINT, signal.default_int_handler)
        early.guard()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        early.release()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        early.release()
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


AT_END = """
import atexit, os, signal, sys
from vexpert import __main__
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
sys.argv = ["vexpert", "completion", "bash"]
sys.exit(__main__.main())
"""


def test_a_signal_while_the_interpreter_ends() -> None:
    with start(AT_END) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert "complete" in out.splitlines()[-1]
