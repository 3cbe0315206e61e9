"""Loading and unloading adapters while serving, in vLLM's shapes."""

from pathlib import Path

import pytest
from helpers_server import BASE, FakeEngine, RunningServer

from vexpert.errors import ConfigError
from vexpert.server.app import create_app

pytest_plugins = ["helpers_server_fixtures"]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "adapter_config.json").write_text("{}")
    return str(tmp_path)


def load(server: RunningServer, **body: object) -> tuple[int, str]:
    response = server.post("/v1/load_lora_adapter", json=body)
    return response.status_code, response.text


def test_load_use_unload(fake_server: RunningServer, folder: str) -> None:
    told = load(fake_server, lora_name="new", lora_path=folder)
    assert told == (200, "Success: LoRA adapter 'new' added successfully.")
    entry = fake_server.get("/v1/models/new").json()
    assert (entry["root"], entry["parent"]) == (folder, BASE)
    assert fake_server.ask("new", "hello") == "hello"
    response = fake_server.post("/v1/unload_lora_adapter", json={"lora_name": "new"})
    assert (response.status_code, response.text) == (
        200,
        "Success: LoRA adapter 'new' removed successfully.",
    )
    assert fake_server.get("/v1/models/new").status_code == 404
    body = {"model": "new", "prompt": "x"}
    assert fake_server.post("/v1/completions", json=body).status_code == 404


def test_a_loaded_name_needs_load_inplace(fake_server: RunningServer, folder: str) -> None:
    status, text = load(fake_server, lora_name="upper", lora_path=folder)
    assert status == 400
    assert "load_inplace" in text
    assert load(fake_server, lora_name="upper", lora_path=folder, load_inplace=True)[0] == 200
    assert fake_server.get("/v1/models/upper").json()["root"] == folder


def test_a_name_with_a_slash_is_a_model(fake_server: RunningServer, folder: str) -> None:
    assert load(fake_server, lora_name="team/legal", lora_path=folder)[0] == 200
    assert fake_server.get("/v1/models/team/legal").json()["id"] == "team/legal"


def test_an_adapter_may_not_take_the_base_models_name(fake: FakeEngine) -> None:
    fake.load_adapter(BASE, "bundled")
    with pytest.raises(ConfigError, match="rename"):
        create_app(fake)


def test_version_and_ping(fake_server: RunningServer) -> None:
    assert set(fake_server.get("/version").json()) == {"version"}
    assert fake_server.get("/ping").status_code == 200
    assert fake_server.post("/ping").status_code == 200
