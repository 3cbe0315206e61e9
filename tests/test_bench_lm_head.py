"""`bench/lm_head.py`: every contender is timed and compared, the last line is JSON."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "bench" / "lm_head.py"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tiny sizes in the interpreter")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lm_head", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_dry(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(["--dry", "--repeats", "2"])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(last["rows"]) == {"1", "3"}
    for row in last["rows"].values():
        names = {"bfloat16", "widened", "float32"}
        assert set(row["us"]) == names | {f"{name}, token" for name in names}
        assert row["errors"]["float32"] < 1e-5 < 1e-3 < row["errors"]["bfloat16"]
        assert row["errors"]["widened"] == row["errors"]["bfloat16"]


@torch.inference_mode()
def test_what_is_timed_gives_the_likeliest_tokens(script: ModuleType) -> None:
    x, weight = torch.randn(5, 32).bfloat16(), torch.randn(70, 32).bfloat16()
    calls = script.contenders(x, weight)
    for name in ("bfloat16", "widened", "float32"):
        assert torch.equal(calls[f"{name}, token"](), calls[name]().float().argmax(-1)), name
