"""An adapter whose files are gone or broken: one status and code, whenever a request comes."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_server import BASE, RunningServer, serving

from vexpert.config import EngineConfig
from vexpert.demo import adapter_paths
from vexpert.engine.engine import Engine
from vexpert.lora.source import AdapterLoader

Ask = Callable[[RunningServer, str], tuple[int, str | None, str]]
GONE = (503, "adapter_gone")
FINE = (200, None)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = Engine(EngineConfig(model=BASE, device="cpu", dtype="float32"))
    with serving(engine) as running:
        yield running


def told(response: Any) -> tuple[int, str | None, str]:
    error = response.json().get("error") or {"code": None, "message": ""}
    return response.status_code, error["code"], error["message"]


def text(server: RunningServer, name: str) -> tuple[int, str | None, str]:
    body = {"model": name, "prompt": "ab", "max_tokens": 2}
    return told(server.post("/v1/completions", json=body))


def chat(server: RunningServer, name: str) -> tuple[int, str | None, str]:
    body = {"model": name, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}
    return told(server.post("/v1/chat/completions", json=body))


def streamed(server: RunningServer, name: str) -> tuple[int, str | None, str]:
    """The error is an event where the answer had begun."""
    body = {"model": name, "prompt": "ab", "max_tokens": 2, "stream": True}
    response = server.post("/v1/completions", json=body)
    if response.headers["content-type"].startswith("application/json"):
        return told(response)
    return GONE[0] if '"adapter_gone"' in response.text else 200, None, response.text


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def without_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def half_written(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def broken_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


FAULTS = [removed, without_weights, half_written, broken_config, empty]


def copy(tmp_path: Path, name: str) -> Path:
    return shutil.copytree(adapter_paths()["upper"], tmp_path / name, dirs_exist_ok=True)


def register(server: RunningServer, folder: Path, **more: Any) -> str:
    body = {"lora_name": folder.name, "lora_path": str(folder), "lazy": True, **more}
    response = server.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 200, response.text
    return folder.name


def state(server: RunningServer, name: str) -> tuple[str, str]:
    """State and error at /v1/adapters, once nothing is read any more."""
    for _ in range(1000):
        [entry] = server.get(f"/v1/adapters/{name}").json()["data"]
        if entry["state"] != "loading":
            break
        time.sleep(0.01)
    return entry["state"], entry["error"] or ""


@pytest.mark.parametrize("first", [text, chat])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_has_one_status_at_every_moment(
    server: RunningServer,
    tmp_path: Path,
    fault: Callable[[Path], None],
    first: Ask,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = register(server, folder := copy(tmp_path, f"{fault.__name__}_{first.__name__}"))
    fault(folder)
    status, code, message = first(server, name)
    assert (status, code) == GONE, message
    assert f"adapter {name!r}: " in message
    assert "load it again" in message
    was, reason = state(server, name)
    assert was == "errored"
    assert message.startswith(reason)
    for ask in (text, chat, text):  # later requests: the same in all
        assert ask(server, name) == (*GONE, message)
    assert streamed(server, name)[0] == GONE[0]
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warned == [reason]
    copy(tmp_path, name)  # mended, and not loaded again
    assert text(server, name) == chat(server, name) == (*GONE, message)
    for model in (name, f"vexpert-demo:{name}"):
        assert told(server.get(f"/v1/models/{model}")) == (*GONE, message)
    assert name not in [each["id"] for each in server.get("/v1/models").json()["data"]]
    register(server, folder, load_inplace=True)
    assert text(server, name)[:2] == chat(server, name)[:2] == FINE
    assert state(server, name)[0] in ("host", "device")
    assert server.ask("vexpert-demo", "hello") == "hello"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_version_that_was_read_needs_no_files(
    server: RunningServer, tmp_path: Path, fault: Callable[[Path], None]
) -> None:
    name = register(server, folder := copy(tmp_path, f"{fault.__name__}_read"))
    assert text(server, name)[:2] == FINE
    fault(folder)
    assert text(server, name)[:2] == chat(server, name)[:2] == FINE


def test_requests_that_come_while_it_is_read(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first starts the read, the others find it under way: they end alike."""
    load = AdapterLoader.load

    def slow(self: AdapterLoader, *arguments: Any) -> Any:
        time.sleep(0.5)
        return load(self, *arguments)

    monkeypatch.setattr(AdapterLoader, "load", slow)
    name = register(server, folder := copy(tmp_path, "while_read"))
    half_written(folder)
    body = {"model": name, "prompt": ["ab", "cd", "ef"], "max_tokens": 2}
    assert told(server.post("/v1/completions", json=body))[:2] == GONE
    assert text(server, name)[:2] == GONE


@pytest.mark.parametrize("fault", FAULTS)
def test_a_load_that_is_refused_is_the_callers_fault(
    server: RunningServer, tmp_path: Path, fault: Callable[[Path], None]
) -> None:
    """400 to whoever named the folder; the name is none then."""
    fault(folder := copy(tmp_path, f"{fault.__name__}_load"))
    body = {"lora_name": folder.name, "lora_path": str(folder)}
    assert told(server.post("/v1/load_lora_adapter", json=body))[:2] == (400, None)
    assert text(server, folder.name)[:2] == (404, "model_not_found")
