"""What boot makes of a config."""

from typing import Any

import pytest

from vexpert import LLM
from vexpert.config import EngineConfig
from vexpert.demo import adapter_paths
from vexpert.engine.engine import Engine
from vexpert.errors import AdapterError, ConfigError


def test_the_name_of_the_base_model_is_reserved() -> None:
    llm = LLM(device="cpu")
    path = str(adapter_paths()["upper"])
    for name in ("vexpert-demo", llm.engine.model_info.name):
        with pytest.raises(AdapterError, match="is the base model's"):
            llm.load_adapter(name, path)
    llm.load_adapter("upper", path)
    assert [info.name for info in llm.adapters()] == ["upper"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_dir": "/no/such/folder"}, "lora_dir='/no/such/folder'"),
        ({"lora_dir": ".", "enable_lora": False}, "lora_dir is given with enable_lora=False"),
        ({"lora_weights": "{"}, "lora_weights"),
    ],
)
def test_bad_adapter_options_are_refused_before_the_model_is_read(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(EngineConfig(model="/no/such/model", **options))
