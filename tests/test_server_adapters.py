"""Loading and unloading adapters while serving, in vLLM's shapes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers_engine_thread import EngineThread
from helpers_server import BASE, FakeEngine, RunningServer, serving
from helpers_wait import wait_for

from vexpert.errors import ConfigError
from vexpert.server import engine_client, engine_loop
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
    with pytest.raises(ConfigError, match="choose another name"):
        create_app(EngineThread(fake))


def test_version_and_ping(fake_server: RunningServer) -> None:
    assert set(fake_server.get("/version").json()) == {"version"}
    assert fake_server.get("/ping").status_code == 200
    assert fake_server.post("/ping").status_code == 200


def test_the_list_of_adapters_says_state_version_bytes_and_tier(
    fake_server: RunningServer, folder: str
) -> None:
    load(fake_server, lora_name="team/new", lora_path=folder, lazy=True, pinned=True)
    listed = fake_server.get("/v1/adapters").json()
    assert listed["object"] == "list"
    entries = {entry["name"]: entry for entry in listed["data"]}
    assert {"upper", "team/new"} <= set(entries)
    wanted = {"state", "version", "device_bytes", "host_bytes", "tier", "last_use", "error"}
    assert wanted <= set(entries["upper"])
    (entry,) = fake_server.get("/v1/adapters/team/new").json()["data"]
    assert entry == entries["team/new"]
    assert fake_server.get("/v1/adapters/nobody").status_code == 404


def test_lazy_and_pinned_and_the_deadline_reach_the_engine(
    fake: FakeEngine, fake_server: RunningServer, folder: str
) -> None:
    load(fake_server, lora_name="new", lora_path=folder, lazy=True, pinned=True)
    assert fake.calls[-1] == ("register", "new", {"pinned": True, **NO_OPTIONS})
    load(fake_server, lora_name="other", lora_path=folder)
    assert fake.calls[-1] == ("load", "other", {"pinned": False, **NO_OPTIONS})
    body = {"lora_name": "new", "drain_seconds": 2.5}
    assert fake_server.post("/v1/unload_lora_adapter", json=body).status_code == 200
    assert fake.calls[-1] == ("unload", "new", {"drain_seconds": 2.5})
    body["drain_seconds"] = -1
    assert fake_server.post("/v1/unload_lora_adapter", json=body).status_code == 400


def test_a_relative_path_that_is_not_there_is_told_in_full(fake_server: RunningServer) -> None:
    body = {"lora_name": "new", "lora_path": "no/such"}
    answer = fake_server.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith(f"folder: {Path.cwd() / 'no/such'}")
    body["lora_path"] = str(Path.cwd() / "no/such")
    answer = fake_server.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400
    assert "relative" not in answer.text


NO_OPTIONS = {"lora_B_layout": None, "load_inplace": False}


def test_a_load_that_hangs_holds_up_no_other(
    fake: FakeEngine, fake_server: RunningServer, folder: str
) -> None:
    go, begun = threading.Event(), threading.Event()
    fake.before_load["stuck"] = lambda: (begun.set(), go.wait(60))
    body = {"lora_name": "stuck", "lora_path": folder}
    stuck = threading.Thread(target=load, args=(fake_server,), kwargs=body)
    stuck.start()
    try:
        assert begun.wait(60)
        assert load(fake_server, lora_name="new", lora_path=folder)[0] == 200
        assert fake_server.ask("new", "hello") == "hello"
        assert fake_server.get("/v1/models/stuck").status_code == 404
    finally:
        go.set()
        stuck.join()
    assert fake_server.get("/v1/models/stuck").status_code == 200


def test_names_wait_for_no_load_that_hangs(fake: FakeEngine) -> None:
    go = threading.Event()
    names = [f"n{i}" for i in range(engine_loop.ADAPTER_CALLS)]
    begun: set[str] = set()
    for name in names:
        fake.before_load[name] = lambda name=name: (begun.add(name), go.wait(60))
    with serving(fake) as running, ThreadPoolExecutor(len(names)) as pool:
        for name in names:
            pool.submit(load, running, lora_name=name, lora_path="bundled")
        try:
            wait_for(lambda: len(begun) == len(names))
            assert load(running, lora_name="lazy", lora_path="bundled", lazy=True)[0] == 200
            unloaded = running.post("/v1/unload_lora_adapter", json={"lora_name": "lazy"})
            assert unloaded.status_code == 200
        finally:
            go.set()


def test_loads_take_few_threads_and_the_queue_is_bounded(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "MAX_LOADS", 30)
    go = threading.Event()
    names, before = [f"n{i}" for i in range(40)], set(threading.enumerate())
    fake.before_load = dict.fromkeys(names, lambda: go.wait(60))
    with serving(fake) as running, ThreadPoolExecutor(40) as pool:

        def load(name: str) -> int:
            body = {"lora_name": name, "lora_path": "bundled"}
            return running.post("/v1/load_lora_adapter", json=body).status_code

        answers = [pool.submit(load, name) for name in names]
        wait_for(lambda: sum(answer.done() for answer in answers) == 10)
        assert {answer.result() for answer in answers if answer.done()} == {429}

        def threads() -> int:
            mine = set(threading.enumerate()) - before
            return sum("adapter-call" in thread.name for thread in mine)

        # The refusals come from the front; the engine may still be taking up the calls accepted.
        wait_for(lambda: threads() == engine_loop.ADAPTER_CALLS)
        assert running.ask("upper", "hello") == "HELLO"
        assert threads() == engine_loop.ADAPTER_CALLS
        unloaded = running.post("/v1/unload_lora_adapter", json={"lora_name": "upper"})
        assert unloaded.status_code == 200  # it waits for no disk
        body = {"model": "upper", "prompt": "hello"}
        assert running.post("/v1/completions", json=body).status_code == 404
        go.set()
        assert sorted(answer.result() for answer in answers) == [200] * 30 + [429] * 10
