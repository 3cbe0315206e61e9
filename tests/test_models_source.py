"""A model's name that leads nowhere is refused in moments, before torch or an engine starts."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from vexpert.cli import serve
from vexpert.cli.main import main
from vexpert.config import EngineConfig
from vexpert.demo import adapter_paths, model_path
from vexpert.engine.llm import LLM
from vexpert.errors import ConfigError, ModelError
from vexpert.models import source
from vexpert.models.source import check_model, check_source

UPPER = str(adapter_paths()["upper"])


class Hub(BaseHTTPRequestHandler):
    """Knows owner/model, and is broken for owner/broken."""

    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append(self.path)
        codes = {"/api/models/owner/model": 200, "/api/models/owner/broken": 500}
        self.send_response(codes.get(self.path, 401))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(source, "HUB_SECONDS", 60)
    Hub.asked.clear()
    yield url
    server.shutdown()
    server.server_close()


def test_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("typo", "nope/model"):
        with pytest.raises(ModelError, match=f"model '{name}': no such folder, .*HF_HUB_OFFLINE"):
            check_source(name)


@pytest.mark.parametrize("name", ["path/to/model", "a b", "a..b"])
def test_no_name_of_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="no such folder, and no Hugging Face name either"):
        check_source(name)


def test_the_hub_is_asked_once(hub: str) -> None:
    check_source("owner/model")
    check_source("owner/broken")  # whoever downloads it says what is wrong
    with pytest.raises(ModelError, match=f"{hub} has none of this name"):
        check_source("owner/nothing")
    assert Hub.asked == [f"/api/models/owner/{name}" for name in ("model", "broken", "nothing")]


def test_a_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{bound.getsockname()[1]}")
        with pytest.raises(ModelError, match=r"is not reachable .*refused"):
            check_source("nope/model")
        bound.listen()
        bound.setblocking(False)
        monkeypatch.setattr(source, "HUB_SECONDS", 0.2)
        with pytest.raises(ModelError, match=r"is not reachable .*timed out"):
            check_source("nope/model")
        bound.accept()[0].close()
        with pytest.raises(BlockingIOError):  # it was asked once
            bound.accept()


def test_a_name_in_the_local_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "/a/config.json")
    check_source("nope/model")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["typo"], "model 'typo': no such folder"),
        (["./typo"], "model './typo': the folder does not exist"),
        (["path/to/model"], "no Hugging Face name"),
        (["--max-model-len", "99999999"], "max_model_len=99999999: use 2 to "),
    ],
)
def test_serve_refuses_before_the_engine(
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serve, "engine_process", lambda *_: pytest.fail("the engine starts"))
    monkeypatch.setattr(serve, "set_up_logging", lambda *_: None)
    assert main(["serve", "--port", "0", *words]) == 2
    assert told in capsys.readouterr().err


def test_python_and_inspect_refuse_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError) as caught:
        LLM(model="nope/model", device="cpu")
    assert main(["adapter", "inspect", UPPER, "--model", "nope/model"]) == 2
    assert capsys.readouterr().err == f"error: {caught.value}\n"


@pytest.mark.parametrize("nested", [False, True])
def test_lengths_of_a_config(tmp_path: Path, nested: bool) -> None:
    fields = {"max_position_embeddings": 64}
    raw = {"text_config": fields, "max_position_embeddings": 8} if nested else fields
    (tmp_path / "config.json").write_text(json.dumps(raw))
    check_model(EngineConfig(model=str(tmp_path), max_model_len=64))
    with pytest.raises(ConfigError, match="max_model_len=65: use 2 to 64"):
        check_model(EngineConfig(model=str(tmp_path), max_model_len=65))
    check_model(EngineConfig(model=str(tmp_path), max_model_len=65, trust_remote_code=True))


def test_the_demos_name_is_the_demo() -> None:
    assert source.model_source(EngineConfig(model="vexpert-demo")) == str(model_path())


def test_one_device() -> None:
    assert EngineConfig.from_options(tensor_parallel_size=1).tensor_parallel_size == 1
    with pytest.raises(ConfigError, match="tensor_parallel_size=2: one device only for now; use 1"):
        LLM(tensor_parallel_size=2)
