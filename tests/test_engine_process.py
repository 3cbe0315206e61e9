"""`vexpert serve` and its engine's process: kills, orphans, restarts, and what cannot start."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers_demo import expected
from helpers_serve_held import HELD_TOKENS
from helpers_serve_process import GATE
from helpers_wait import wait_for

import vexpert
from vexpert.demo import adapter_paths

ROOT = str(Path(vexpert.__file__).parents[1])
SCRIPT = str(Path(__file__).with_name("helpers_serve_process.py"))
HELD_SCRIPT = str(Path(__file__).with_name("helpers_serve_held.py"))
FAKE, SLOW, HELD = [SCRIPT], [HELD_SCRIPT, "slow"], [HELD_SCRIPT, "real"]
BASE = "vexpert-demo"
LONG = {
    "model": BASE,
    "prompt": "x",
    "ignore_eos": True,
    "max_tokens": HELD_TOKENS,
    "temperature": 0,
}


@dataclass
class Server:
    """A running `vexpert serve`."""

    process: "subprocess.Popen[str]"
    url: str = ""
    log: list[str] = field(default_factory=list)

    def read_log(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)  # as lines come

    def engine(self) -> int:
        """The process of its only engine, once the log has told it."""
        wait_for(lambda: bool(self.engines()))
        [engine] = self.engines()
        return engine

    def engines(self) -> list[int]:
        """Processes of its engines that the log has told, in the order of their starts."""
        found = re.findall(r"the engine runs in process (\d+)", "".join(list(self.log)))
        return [int(pid) for pid in found]

    def ask(self, model: str, word: str) -> str:
        body = {"model": model, "messages": [{"role": "user", "content": word}], "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)


@contextmanager
def serving(program: list[str], *words: str) -> Iterator[Server]:
    """A server that is ready; it may have ended when the block does."""
    process = subprocess.Popen(
        [sys.executable, *program, "serve", "--port", "0", *words],
        env=os.environ | {"PYTHONPATH": ROOT},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    server = Server(process)
    reading = threading.Thread(target=server.read_log)
    reading.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("vexpert ready: "), "".join(server.log)
        server.url = line.split()[2]
        yield server
    finally:
        process.kill()
        process.wait()
        reading.join()  # it alone reads the log, to its end: that of the engines too
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for counts."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return shown.stdout.strip()[:1] in ("", "Z")


def running(server: Server) -> float:
    """Sequences that the engine computes."""
    page = server.get("/metrics").text
    return sum(map(float, re.findall(r"^vllm:num_requests_running\{.*\} (.*)$", page, re.M)))


def test_a_killed_engine_fails_its_requests_at_once_and_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GATE, str(tmp_path / "gate"))
    with serving(HELD, "--max-num-seqs", "16") as server:
        path = str(adapter_paths()["reverse"])
        server.post("/v1/load_lora_adapter", {"lora_name": "back", "lora_path": path})
        server.post("/v1/unload_lora_adapter", {"lora_name": "shift"})
        assert server.ask("back", "hello") == "olleh"
        whole: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: whole.append(server.post("/v1/completions", LONG | {"n": 8}))
        )
        asking.start()
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}, timeout=60
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            wait_for(lambda: running(server) == 9)
            engine = server.engine()
            os.kill(engine, signal.SIGKILL)
            events = [line.removeprefix("data: ") for line in lines if line]
            asking.join()
        error = json.loads(events[-2])["error"]
        assert (error["code"], events[-1]) == ("engine_failed", "[DONE]")
        assert "signal 9 (SIGKILL); it is started again" in error["message"]
        assert whole[0].status_code == 503
        assert whole[0].headers["retry-after"]
        assert "SIGKILL" in whole[0].json()["error"]["message"]
        assert server.get("/ready").status_code == 503  # they did not wait for the next one
        assert server.get("/health").status_code == 200  # but alive
        for path in ("/v1/models", "/v1/adapters"):
            assert server.get(path).status_code == 503
        page = server.get("/metrics").text
        assert "vexpert:engine_answers 0.0" in page
        assert "vexpert:engine_restarts_total 1.0" in page
        (tmp_path / "gate").touch()
        wait_for(lambda: server.get("/ready").status_code == 200, 240)  # it boots
        names = [entry["id"] for entry in server.get("/v1/models").json()["data"]]
        assert names == [BASE, "back", "reverse", "sort", "upper"]
        for name in ("upper", "reverse", "sort"):
            assert server.ask(name, "hello") == expected(name, "hello")
        assert server.ask("back", "hello") == "olleh"
        assert "vexpert:engine_restarts_total 1.0" in server.get("/metrics").text
        wait_for(lambda: len(server.engines()) == 2)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        wait_for(lambda: all(map(is_gone, server.engines())))
    assert "Traceback" not in "".join(server.log)


def test_without_restarts_a_kill_ends_the_server_with_the_reason() -> None:
    with serving(FAKE, "--engine-restarts", "0") as server:
        engine = server.engine()
        os.kill(engine, signal.SIGKILL)
        assert server.process.wait(60) == 1
    assert "ended by signal 9 (SIGKILL); the server ends" in "".join(server.log)
    assert "Traceback" not in "".join(server.log)


def test_a_killed_server_leaves_no_engine() -> None:
    with serving(FAKE) as server:
        engine = server.engine()
        assert not is_gone(engine)
        server.process.kill()
        wait_for(lambda: is_gone(engine))


def test_a_signal_to_all_processes_is_the_servers_to_obey() -> None:
    with serving(FAKE, "--shutdown-timeout", "200") as server:
        body = LONG | {"stream": True, "max_tokens": 200}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.killpg(server.process.pid, signal.SIGINT)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert '"error"' not in "".join(events)
        assert server.process.wait(60) == 0
        wait_for(lambda: is_gone(server.engine()))


def test_at_the_deadline_what_runs_in_the_process_is_cut() -> None:
    with serving(SLOW, "--shutdown-timeout", "0.2") as server:
        body = LONG | {"stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            events = [line.removeprefix("data: ") for line in lines if line]
        assert json.loads(events[-2])["error"]["code"] == "shutting_down"
        assert server.process.wait(60) == 0
        wait_for(lambda: is_gone(server.engine()))


def test_the_engine_ignores_signals() -> None:
    with serving(FAKE) as server:
        engine = server.engine()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine, number)
        assert server.ask("upper", "hello") == "HELLO"
    assert server.engines() == [engine]  # the whole log is read


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["/no/such/folder"], "/no/such/folder"),
        (["--kv-cache-memory", str(2**60)], "bytes are free; use less"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(words: list[str], told: str) -> None:
    command = [sys.executable, "-m", "vexpert", "serve", "--port", "0", *words]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": ROOT}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert told in error
