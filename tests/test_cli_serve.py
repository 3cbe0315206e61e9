"""`vexpert serve` as a process: the ready line, signals, and a port in use."""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

import vexpert
from vexpert.cli import serve
from vexpert.cli.main import main
from vexpert.config import EngineConfig
from vexpert.demo import adapter_paths
from vexpert.errors import ModelError, RequestError
from vexpert.server.defaults import sampling_defaults
from vexpert.server.interface import LoraModule
from vexpert.server.tools.formats import FORMATS

UPPER = str(adapter_paths()["upper"])
SCRIPT = Path(__file__).with_name("helpers_serve_process.py")
# The tests' own copy of the package, installed or not.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(vexpert.__file__).parents[1])}
READY = re.compile(r"vexpert ready: (http://127\.0\.0\.1:\d+) \(model (\S+), (\d+) adapters?\)\n")
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes and leaves none behind."""
    running: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> "subprocess.Popen[str]":
        command = [sys.executable, str(SCRIPT), "serve", *words]
        process = subprocess.Popen(
            command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def ready(process: "subprocess.Popen[str]") -> tuple[str, str, str]:
    """URL, model and number of adapters, as the ready line says."""
    assert process.stdout is not None
    line = process.stdout.readline()
    match = READY.fullmatch(line)
    assert match, (line, process.communicate()[1])
    return match[1], match[2], match[3]


def test_ready_answers_and_ends_on_a_signal(start: Start) -> None:
    process = start("--port", "0", "--api-key", "secret", "--lora-modules", f"more={UPPER}")
    url, model, adapters = ready(process)
    assert (model, adapters) == ("vexpert-demo", "5")
    headers = {"Authorization": "Bearer secret"}
    models = httpx.get(f"{url}/v1/models", headers=headers, timeout=60).json()["data"]
    assert len(models) == 6
    process.send_signal(signal.SIGINT)
    out, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    assert out == ""  # stdout holds the ready line alone
    assert "Traceback" not in log
    assert log.count("config: ") == 1
    assert "secret" not in log
    assert "max_loras=None" in log
    assert "GET /v1/models" in log


def test_a_signal_ends_a_running_stream(start: Start) -> None:
    process = start("--port", "0", "--disable-uvicorn-access-log", "--served-model-name", "me")
    url, model, _ = ready(process)
    assert model == "me"
    body = {"model": "me", "prompt": "x" * 200, "max_tokens": 40, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait(60) == 0
    assert "POST" not in process.communicate()[1]


def test_options_reach_the_server(start: Start, tmp_path: Path) -> None:
    keys, template = tmp_path / "keys", tmp_path / "template.jinja"
    keys.write_text("all\nsome upper\n")
    template.write_text("{{ messages[0].content }}{{ tools }}")
    words = ["--api-key-file", str(keys), "--log-format", "json", "--chat-template", str(template)]
    words += ["--allowed-adapter-roots", str(tmp_path), "--allowed-origins", "https://a.example"]
    words += ["--max-queue-len", "7", "--tool-call-parser", "mistral", "--request-timeout", "60"]
    process = start("--port", "0", *words)
    url, _, _ = ready(process)
    some, origin = {"Authorization": "Bearer some"}, {"Origin": "https://a.example"}
    models = httpx.get(f"{url}/v1/models", headers=some | origin, timeout=60)
    assert [entry["id"] for entry in models.json()["data"]] == ["upper"]
    assert models.headers["access-control-allow-origin"] == "https://a.example"
    body = {"lora_name": "x", "lora_path": UPPER}
    everything = {"Authorization": "Bearer all"}
    refused = httpx.post(f"{url}/v1/load_lora_adapter", json=body, headers=everything, timeout=60)
    assert refused.status_code == 403
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    lines = [json.loads(line) for line in log.splitlines()]
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    assert [line["status"] for line in lines if line.get("path") == "/v1/models"] == [200]


def refuse_before_the_model(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """`vexpert serve` with `words` ends with 2, and no model is loaded."""
    monkeypatch.setattr(serve, "engine_process", lambda *_: pytest.fail("the model is loaded"))
    monkeypatch.setattr(serve, "set_up_logging", lambda *_: None)
    assert main(["serve", "--port", "0", *words]) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--max-queue-len", "-1"], "max_queue_len"),
        (["--shutdown-timeout", "nan"], "shutdown_timeout"),
        (["--allowed-adapter-roots", "/no/such"], "/no/such"),
        (["--api-key-file", "/no/such"], "api_key_file"),
        (["--api-key", ""], "api_key: a key is empty"),
        (["--request-timeout", "-1"], "request_timeout"),
        (["--chat-template", "/no/such"], "chat_template"),
    ],
)
def test_bad_options_end_the_boot(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    told: str,
) -> None:
    refuse_before_the_model(monkeypatch, words)
    assert told in capsys.readouterr().err


def test_a_port_in_use_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: 127.0.0.1:")
    assert "--port" in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_told(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--host", host, "--port", "0"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {host}:0: ")
    assert "--host" in shown
    assert "--port" not in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "words", "told"),
    [
        ("folder", ["x=/no/such/folder"], "/no/such/folder: no such folder"),
        ("folder", ["x=/dev/null"], "/dev/null: not a folder; give an adapter's folder"),
        ("folder", [f"x={Path(__file__).parent}"], f"{Path(__file__).parent}: no adapter_config"),
        ("folder", [f"x={UPPER}", f"x={UPPER}"], "adapter 'x' is given twice"),
        ("folder", [f"folder={UPPER}"], "adapter name 'folder' is the base model's"),
        ("", [f"vexpert-demo={UPPER}"], "adapter name 'vexpert-demo' is the base model's"),
        ("", [f"me={UPPER}", "--served-model-name", "you", "me"], "adapter name 'me' is the"),
        ("", [f"vexpert-demo:x={UPPER}"], "adapter name 'vexpert-demo:x': the base model"),
        ("", [f"/metrics={UPPER}"], "adapter name '/metrics': must not begin with"),
    ],
)
def test_bad_lora_modules_end_the_boot_before_the_model_loads(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    words: list[str],
    told: str,
) -> None:
    monkeypatch.setattr(serve, "engine_process", lambda *_: pytest.fail("the model is loaded"))
    monkeypatch.setattr(serve, "set_up_logging", lambda *_: None)
    assert main(["serve", model, "--port", "0", "--lora-modules", *words]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {told}")
    assert (shown.out, shown.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--lora-dir", "/nope"], "lora_dir='/nope': no such folder; create it first"),
        (["--lora-dir", __file__], f"lora_dir='{__file__}': no such folder; create it first"),
        (["--lora-dir", "/tmp", "--no-enable-lora"], "lora_dir is given with enable_lora=False"),
    ],
)
def test_a_lora_dir_is_checked_before_the_model_loads(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    told: str,
) -> None:
    refuse_before_the_model(monkeypatch, words)
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {told}")
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def test_every_tool_format_can_be_chosen() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    [action] = [a for a in parser._actions if a.dest == "tool_call_parser"]
    assert sorted(action.choices or ()) == sorted(FORMATS)


def test_a_bundled_adapter_may_be_given_anew() -> None:
    modules = [LoraModule("sort", UPPER)]
    _, modules, names = serve.resolve_model(EngineConfig(), modules, [])
    serve.check_modules(modules, names)
    assert [module.path for module in modules if module.name == "sort"] == [UPPER]
    assert names == ("vexpert-demo",)


def test_adapters_without_lora_are_a_contradiction(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "engine_process", lambda *_: pytest.fail("the model is loaded"))
    monkeypatch.setattr(serve, "set_up_logging", lambda *_: None)
    words = ["--no-enable-lora", "--lora-modules", f"x={UPPER}"]
    assert main(["serve", "folder", "--port", "0", *words]) == 2
    assert "no-enable-lora" in capsys.readouterr().err


def test_sampling_defaults_of_a_model(tmp_path: Path) -> None:
    assert sampling_defaults(str(tmp_path)) == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": 5, "top_p": null}')
    assert sampling_defaults(str(tmp_path)) == {"temperature": 0.6, "top_k": 20}
    file.write_text('{"do_sample": false, "temperature": 0.6}')
    assert sampling_defaults(str(tmp_path)) == {"temperature": 0.0}
    file.write_text('{"top_p": 7}')
    with pytest.raises(RequestError, match="top_p"):
        sampling_defaults(str(tmp_path))
    file.write_text("[]")
    with pytest.raises(ModelError, match="JSON object"):
        sampling_defaults(str(tmp_path))
