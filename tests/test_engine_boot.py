"""What boot makes of a config."""

import pytest

from vexpert import LLM
from vexpert.demo import adapter_paths
from vexpert.errors import AdapterError


def test_the_name_of_the_base_model_is_reserved() -> None:
    llm = LLM(device="cpu")
    path = str(adapter_paths()["upper"])
    for name in ("vexpert-demo", llm.engine.model_info.name):
        with pytest.raises(AdapterError, match="is the base model's"):
            llm.load_adapter(name, path)
    llm.load_adapter("upper", path)
    assert [info.name for info in llm.adapters()] == ["upper"]
