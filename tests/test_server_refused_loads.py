"""Loads over HTTP that are refused: the field at fault, the words, and the line in the log."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_server import BASE, RunningServer, serving

from vexpert.config import EngineConfig
from vexpert.demo import adapter_paths
from vexpert.engine.engine import Engine

UPPER = adapter_paths()["upper"]
LOAD = "/v1/load_lora_adapter"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = Engine(EngineConfig(model=BASE, device="cpu", dtype="float32"))
    engine.load_adapter("upper", str(UPPER))
    with serving(engine) as running:
        yield running


def refusal(server: RunningServer, **body: object) -> dict[str, Any]:
    answer = server.post(LOAD, json=body)
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/nowhere", "no such folder"),
        ("nowhere", "no such folder"),
        ("/dev/null", "not a folder"),
        (f"{UPPER}/adapter_config.json", "not a folder"),
        (os.path.relpath(UPPER / "adapter_config.json"), "not a folder"),
    ],
)
def test_what_is_no_folder(server: RunningServer, path: str, what: str) -> None:
    error = refusal(server, lora_name="x", lora_path=path)
    assert f": {what}; give an adapter's folder" in error["message"]
    assert (error["param"], error["code"]) == ("lora_path", None)


def test_a_path_with_a_zero_byte(server: RunningServer) -> None:
    for path in ("a\0b", "/a\0b"):
        assert refusal(server, lora_name="x", lora_path=path)["param"] == "lora_path"


@pytest.mark.parametrize("path", [str(UPPER), "/nowhere", "nowhere"])
def test_a_name_that_is_loaded(server: RunningServer, path: str) -> None:
    error = refusal(server, lora_name="upper", lora_path=path)
    assert error["message"].endswith("unload it first, or pass load_inplace to replace it")
    assert (error["param"], error["code"]) == ("lora_name", None)


def test_each_is_one_line_of_the_log(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vexpert")
    for name, path, reason in (
        ("x", "/nowhere", "'/nowhere': no such folder; give"),
        ("upper", str(UPPER), "adapter 'upper' is already loaded from"),
        (BASE, str(UPPER), f"adapter name '{BASE}' is the base model's"),
        ("two\nlines", str(UPPER), "adapter name 'two\\nlines': must have no control"),
    ):
        caplog.clear()
        refusal(server, lora_name=name, lora_path=path)
        lines = [record for record in caplog.records if record.levelno == logging.WARNING]
        told = [record.getMessage() for record in lines]
        assert len(told) == 1
        assert told[0].startswith(f"adapter {name!r} is not loaded: {reason}")
        assert "\n" not in told[0]


def test_an_unload_of_nobody_is_no_line(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vexpert")
    answer = server.post("/v1/unload_lora_adapter", json={"lora_name": "nobody"})
    assert answer.status_code == 404
    assert not [r for r in caplog.records if r.name != "vexpert.access"]


def test_a_relative_path_is_told_in_full(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(UPPER)
    monkeypatch.chdir(tmp_path)
    for lazy in (False, True):
        body = {"lora_name": "here", "lora_path": "link", "lazy": lazy}
        assert server.post(LOAD, json=body).status_code == 200
        (entry,) = server.get("/v1/adapters/here").json()["data"]
        assert entry["path"] == str(link)
        assert server.get("/v1/models/here").json()["root"] == str(link)
        assert f"already loaded from '{link}'" in refusal(server, **body)["message"]
        server.post("/v1/unload_lora_adapter", json={"lora_name": "here"})
