"""Before a server is ready: signals end it with 0, and the end of its engine is told at once."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers_wait import wait_for
from test_engine_process import ROOT, SCRIPT, is_gone

from vexpert.cli.boot import Boot, EngineEnded, Stopped

SECONDS = 240  # that the fake engine takes to start
SLOW = ["--max-loras", str(SECONDS)]


@contextmanager
def booting(log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, SCRIPT, "serve", "--port", "0", *SLOW],
            env=os.environ | {"PYTHONPATH": ROOT},
            stderr=file,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def engine_of(log: Path) -> int:
    found: list[str] = []

    def has_begun() -> bool:
        found[:] = re.findall(r"the engine runs in process (\d+)", log.read_text())
        return bool(found)

    wait_for(has_begun)
    return int(found[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("delay", [0.0, 1.5])
def test_a_signal_ends_a_boot_well(tmp_path: Path, number: int, delay: float) -> None:
    log = tmp_path / "log"
    with booting(log) as process:
        engine = engine_of(log)
        time.sleep(delay)  # amid imports, or waiting for the engine
        process.send_signal(number)
        assert process.wait(SECONDS / 2) == 0, log.read_text()
        wait_for(lambda: is_gone(engine))
    assert "before it was ready" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("delay", [0.0, 1.5])
def test_an_engine_killed_in_a_boot_is_told_at_once(tmp_path: Path, delay: float) -> None:
    log = tmp_path / "log"
    with booting(log) as process:
        engine = engine_of(log)
        time.sleep(delay)
        os.kill(engine, signal.SIGKILL)
        assert process.wait(SECONDS / 2) == 1
    [error] = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert "signal 9 (SIGKILL)" in error
    assert "Traceback" not in log.read_text()


class Waited:
    """Stands for an engine's process."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def wait(self) -> str:
        self.ended.wait()
        return ""


def swallow(kind: type[BaseException], cause: Callable[[], None]) -> None:
    """As a library does that tries an import."""
    try:
        cause()
        time.sleep(60)
    except kind:
        return
    raise AssertionError("was not interrupted")


def let_pass(boot: Boot, engine: Waited) -> None:
    with boot.watching(engine):
        swallow(EngineEnded, engine.ended.set)


def test_a_signal_that_is_swallowed_comes_again_while_an_engine_is_awaited() -> None:
    def wait(boot: Boot) -> None:
        with boot.watching(Waited()):
            swallow(Stopped, lambda: os.kill(os.getpid(), signal.SIGTERM))
            swallow(Stopped, lambda: None)
            time.sleep(60)

    before = signal.set_wakeup_fd(-1)
    with pytest.raises(Stopped), Boot() as boot:
        wait(boot)
    assert signal.set_wakeup_fd(before) == -1  # as it was


def test_a_signal_that_comes_as_a_wait_begins_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CPython looks for signals before it waits: one in between is seen once the wait is over."""

    def wait(boot: Boot) -> None:
        with boot.watching(Waited()):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    handled: list[float] = []
    handle = Boot._handle

    def late(boot: Boot, number: int, frame: object) -> None:
        handled.append(time.monotonic())
        if len(handled) > 1:  # the first does nothing, as one that ends no wait
            handle(boot, number, None)

    monkeypatch.setattr(Boot, "_handle", late)
    with pytest.raises(Stopped), Boot() as boot:
        wait(boot)
    assert len(handled) == 2


def test_what_a_library_swallows_is_raised_again() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Boot() as boot:
        with pytest.raises(EngineEnded):
            let_pass(boot, Waited())
        boot.check()  # no signal
    with Boot() as boot:
        swallow(Stopped, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Stopped):
            boot.check()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def leave_as_it_ends(engine: Waited, telling: threading.Event) -> None:
    with Boot() as boot, boot.watching(engine):
        engine.ended.set()
        assert telling.wait(60)


def test_an_engine_that_has_ended_before_is_told_once() -> None:
    engine = Waited()
    engine.ended.set()
    for _ in range(20):  # the signal meets another line each time
        with Boot() as boot:
            with pytest.raises(EngineEnded):
                let_pass(boot, engine)
            assert not boot._is_watching  # no other comes


def test_no_signal_comes_once_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the thread that sends it is held up, and the engine ends as it is ready."""
    engine, telling, stray = Waited(), threading.Event(), list[int]()
    kill, others = signal.pthread_kill, set(threading.enumerate())

    def late(*arguments: int) -> None:
        telling.set()
        time.sleep(0.3)
        kill(*arguments)

    monkeypatch.setattr(signal, "pthread_kill", late)
    before = signal.signal(signal.SIGTERM, lambda number, frame: stray.append(number))
    try:
        with pytest.raises(EngineEnded):
            leave_as_it_ends(engine, telling)
        for thread in set(threading.enumerate()) - others:
            thread.join(60)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not stray


def make_another(kind: type[BaseException], cause: Callable[[], None]) -> None:
    """As a library does whose parts are not in Python."""
    try:
        swallow(Stopped, cause)
    finally:
        raise kind("of the library")


def test_what_a_library_makes_another_error_of_is_turned_back() -> None:
    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped) as caught, Boot():
        make_another(ValueError, end)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(EngineEnded), Boot() as boot:
        make_end(boot)
    with pytest.raises(ValueError, match="by itself"), Boot():
        raise ValueError("by itself")


def make_end(boot: Boot) -> None:
    engine = Waited()
    with boot.watching(engine):
        swallow(EngineEnded, engine.ended.set)
        raise ValueError("of the library")
