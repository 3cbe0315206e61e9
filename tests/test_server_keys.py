"""Keys for some models only, and folders that adapters may come from."""

from pathlib import Path
from typing import Any

import pytest
from helpers_server import BASE, RunningServer, make_fake_engine, serving

from vexpert.errors import ConfigError
from vexpert.server.keys import METRICS, check_names, read_keys
from vexpert.server.options import ServerOptions

TEXT = "/v1/completions"
KEYS = """
# who may ask what
all-models
one     upper
base    vexpert-demo sort
watch   /metrics
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    file.write_text(KEYS)
    options = ServerOptions((BASE,), api_key_file=str(file), status_interval=None)
    with serving(make_fake_engine(), options) as running:
        yield running


def status(server: RunningServer, key: str, model: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": model, "prompt": "x"}
    answers = {server.post(path, json=body, headers=headers).status_code for path in (TEXT, TOKENS)}
    assert len(answers) == 1
    return answers.pop()


TOKENS = "/tokenize"


@pytest.mark.parametrize(
    ("key", "model", "expected"),
    [
        ("all-models", "sort", 200),
        ("all-models", "nobody", 404),
        ("one", "upper", 200),
        ("one", f"{BASE}:upper", 200),
        ("one", "sort", 403),
        ("one", BASE, 403),
        ("one", "nobody", 403),  # what exists is not told
        ("base", BASE, 200),
        ("base", "sort", 200),
        ("base", "upper", 403),
        ("watch", BASE, 403),
        ("nobody", "upper", 401),
    ],
)
def test_a_key_opens_its_models(server: RunningServer, key: str, model: str, expected: int) -> None:
    assert status(server, key, model) == expected


def test_a_key_sees_its_models_alone(server: RunningServer) -> None:
    with server.client(api_key="base") as client:
        assert [entry.id for entry in client.models.list()] == [BASE, "sort"]
    headers = {"Authorization": "Bearer base"}
    for path in ("/v1/models/upper", "/v1/adapters/upper"):
        answer = server.get(path, headers=headers)
        assert answer.status_code == 404
        known = answer.json()["error"]["message"].partition("known: ")[2]
        assert sorted(known.split(", ")) == sorted([BASE, "sort"])


@pytest.mark.parametrize(
    ("key", "expected"), [("all-models", 200), ("watch", 200), ("one", 403), ("nobody", 401)]
)
def test_metrics_name_all_tenants_and_are_not_for_one(
    server: RunningServer, key: str, expected: int
) -> None:
    answer = server.get("/metrics", headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == expected
    assert ("vllm:" in answer.text) == (expected == 200)


@pytest.mark.parametrize("header", ["Bearer", "bearer all-models x", "all-models", ""])
def test_no_key_is_none(server: RunningServer, header: str) -> None:
    assert server.get("/v1/models", headers={"Authorization": header}).status_code == 401


@pytest.mark.parametrize("key", ["", " ", "\t", "two words", "end\n"])
def test_a_key_is_one_word(key: str) -> None:
    with pytest.raises(ConfigError, match=r"api_key: a key .*; write one word") as caught:
        ServerOptions(api_keys=("good", key))
    assert "good" not in str(caught.value)
    with pytest.raises(ConfigError, match="api_key: a key"):
        ServerOptions(restricted_keys={key: frozenset({"upper"})})


def test_names_that_no_model_has_are_told(caplog: pytest.LogCaptureFixture) -> None:
    lists = [frozenset({"upper", "later"}), frozenset({METRICS, "typo"})]
    check_names(lists, (BASE,), ("upper",))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "'later'" in told[0]
    assert "'typo'" in told[1]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (f"{BASE}:upper", "such as 'upper'"),
        (f"{BASE}:later", "such as 'later'"),
        ("/metric", "must not begin with '/'"),
        ("x" * 300, "use at most 256 characters"),
    ],
)
def test_a_name_that_no_model_can_have_is_refused(tmp_path: Path, name: str, told: str) -> None:
    """Its keys would wait for ever, and open nothing."""
    file = tmp_path / "keys.txt"
    file.write_text(f"sk {name} upper\n")
    options = ServerOptions((BASE,), api_key_file=str(file), status_interval=None)
    message = f"api_key_file: no model can have this name: .*{told}"
    with pytest.raises(ConfigError, match=message), serving(make_fake_engine(), options):
        raise AssertionError("it serves")


def test_a_restricted_key_changes_no_adapters(server: RunningServer) -> None:
    headers = {"Authorization": "Bearer one"}
    body = {"lora_name": "x", "lora_path": "/x"}
    assert server.post("/v1/load_lora_adapter", json=body, headers=headers).status_code == 403
    body = {"lora_name": "upper"}
    assert server.post("/v1/unload_lora_adapter", json=body, headers=headers).status_code == 403


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no key"),
        ("# x\n", "no key"),
        ("a\na b", "line 2: the key is given twice"),
        ("a b,c", "line 1: a comma"),
        ("\na b # c", "line 2: a comment"),
    ],
)
def test_a_bad_key_file_is_told(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_keys(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "missing"))


def test_adapters_come_from_allowed_folders_alone(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in" / "a", tmp_path / "out" / "b"
    for folder in (inside, outside):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    (tmp_path / "in" / "link").symlink_to(outside)
    sly = tmp_path / "in" / "sly"
    sly.mkdir()
    (sly / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    options = ServerOptions(
        (BASE,), allowed_adapter_roots=(str(tmp_path / "in"),), status_interval=None
    )
    with serving(make_fake_engine(), options) as running:

        def load(name: str, path: object) -> int:
            body = {"lora_name": name, "lora_path": str(path)}
            return running.post("/v1/load_lora_adapter", json=body).status_code

        assert load("a", inside) == 200
        for i, path in enumerate(
            [outside, tmp_path / "in" / "link", sly, f"{inside}/../../out/b", "/", "", "\x00"]
        ):
            assert load(f"b{i}", path) in (400, 403)
        names = [entry["id"] for entry in running.get("/v1/models").json()["data"]]
        assert [name for name in names if name.startswith("b")] == []
