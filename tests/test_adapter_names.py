"""Names that an adapter may not have, because they mean something else to a server."""

from pathlib import Path

import pytest
from helpers_server import BASE, make_fake_engine, serving
from test_lora_manager import folder, make

from vexpert.config import EngineConfig
from vexpert.engine import boot
from vexpert.errors import AdapterError, ConfigError
from vexpert.lora.adapter_name import check_name
from vexpert.server.keys import METRICS
from vexpert.server.options import ServerOptions


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (METRICS, "must not begin with '/'"),
        ("/x", "must not begin with '/'"),
        ("base", "is the base model's"),
        ("base:x", "a colon go before any adapter's name; choose another, such as 'x'"),
        ("a/b:x", "such as 'x'"),
        ("base:", "such as ''"),
    ],
)
def test_names_that_mean_something_else(tmp_path: Path, name: str, told: str) -> None:
    manager = make(reserved=("base", "a/b"))
    for call in (manager.load, manager.register):
        with pytest.raises(AdapterError, match=told):
            call(name, folder(tmp_path, "f", 1))
    assert manager.list() == []


@pytest.mark.parametrize("name", ["team/x", "x:base", "based:x", "a:b", "metrics", "baseline"])
def test_names_that_are_like_those(name: str) -> None:
    check_name(name, frozenset({"base", "a/b"}))


def test_further_names_of_the_model_reach_the_engine(tmp_path: Path) -> None:
    class Info:
        name = "folder"

    config = EngineConfig(model="folder", reserved_names=("served",))
    assert boot._base_names(config, Info()) == {"folder", "served"}  # type: ignore[arg-type]


def test_a_server_refuses_them_by_its_own_names(tmp_path: Path) -> None:
    path = folder(tmp_path, "f", 1)
    keys = {"scrape": frozenset({METRICS}), "op": None}
    limited = {key: names for key, names in keys.items() if names is not None}
    options = ServerOptions(
        ("one", "one:two"), api_keys=("op",), restricted_keys=limited, status_interval=None
    )
    with serving(make_fake_engine(), options) as running:
        operator = {"Authorization": "Bearer op"}
        for name in (METRICS, "one:x", "one:two:x", "one"):
            body = {"lora_name": name, "lora_path": str(path)}
            answer = running.post("/v1/load_lora_adapter", json=body, headers=operator)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "lora_name"
        scrape = {"Authorization": "Bearer scrape"}
        for model in (METRICS, f"one:{METRICS}"):
            body = {"model": model, "prompt": "x"}
            answer = running.post("/v1/completions", json=body, headers=scrape)
            assert answer.status_code == 403
        body = {"model": "one:two:upper", "prompt": "hello"}
        answer = running.post("/v1/completions", json=body, headers=operator)
        assert answer.json()["choices"][0]["text"] == "HELLO"


def test_a_base_model_is_no_page() -> None:
    with (
        pytest.raises(ConfigError, match=f"'{METRICS}': stands for that page"),
        serving(make_fake_engine(), ServerOptions((METRICS,))),
    ):
        pass


def test_an_adapter_that_hides_a_name_at_the_boot() -> None:
    engine = make_fake_engine()
    engine.load_adapter(f"{BASE}:upper", "bundled")
    with (
        pytest.raises(ConfigError, match="such as 'upper'"),
        serving(engine, ServerOptions((BASE,))),
    ):
        pass
