"""What an adapter's load warns of: logged once, with its name; and the names of base models."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from vexpert import LLM
from vexpert.cli.main import main
from vexpert.config import EngineConfig
from vexpert.demo import adapter_paths, model_path
from vexpert.engine.boot import model_names
from vexpert.engine.inspect import inspect_adapter
from vexpert.errors import AdapterError
from vexpert.server.engine_boot import build_engine
from vexpert.server.interface import LoraModule


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", device="cpu")


def changed(folder: Path, name: str, **fields: Any) -> str:
    """A copy of a demo adapter with other fields in its config."""
    shutil.copytree(adapter_paths()[name], folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return str(folder)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_each_warning_is_logged_once(
    llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info = llm.load_adapter("a", changed(tmp_path / "a", "shift", base_model_name_or_path="Other"))
    (warning,) = info.warnings
    assert "base model 'Other', but 'vexpert-demo' is served" in warning
    assert logged(caplog) == [f"adapter a: {warning}"]


def test_a_second_read_does_not_log_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With one copy on the host and one slot, an adapter is read again when it is asked again."""
    llm = LLM(dtype="float32", device="cpu", max_loras=1, max_cpu_loras=1)
    for name in ("a", "b"):
        path = changed(tmp_path / name, "shift", base_model_name_or_path="Other")
        llm.load_adapter(name, path)
    for name in ("a", "b", "a", "b"):
        llm.generate({"prompt_token_ids": [5, 6]}, adapter=name)
    assert max(info.loads for info in llm.adapters()) > 1
    assert sorted(text[:10] for text in logged(caplog)) == ["adapter a:", "adapter b:"]


def test_the_server_does_not_say_it_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = changed(tmp_path / "a", "shift", base_model_name_or_path="Other")
    caplog.set_level("INFO", "vexpert")
    build_engine(
        EngineConfig(dtype="float32", device="cpu"), [LoraModule("a", path)], is_restart=False
    )
    told = [record for record in caplog.records if record.getMessage().startswith("adapter a: ")]
    assert sorted(record.levelname for record in told) == ["INFO", "WARNING"]


def test_check_says_it_in_its_report_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(tmp_path / "a", "shift", base_model_name_or_path="Other")
    assert main(["adapter", "check", path, "--model", str(model_path()), "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out.count("base model 'Other'") == 1
    assert (err, logged(caplog)) == ("", [])


@pytest.mark.parametrize("name", sorted(adapter_paths()))
def test_the_demo_is_known_by_its_name(llm: LLM, name: str) -> None:
    path = str(adapter_paths()[name])
    assert llm.load_adapter(name, path).warnings == ()
    assert inspect_adapter(path, str(model_path())).warnings == ()


def test_names_of_a_model(tmp_path: Path) -> None:
    assert model_names("Qwen/Qwen3-30B-A3B") == ("Qwen/Qwen3-30B-A3B",)
    (tmp_path / "config.json").write_text('{"_name_or_path": "Qwen/Qwen3-30B-A3B"}')
    assert model_names(str(tmp_path)) == (str(tmp_path), "Qwen/Qwen3-30B-A3B")
    for odd in ("[]", "{", '{"_name_or_path": 3}'):
        (tmp_path / "config.json").write_text(odd)
        assert model_names(str(tmp_path)) == (str(tmp_path),)


@pytest.mark.parametrize("alpha", [1e20, 1e30, 1e38, -1e39])
@pytest.mark.parametrize("name", ["shift", "upper"])
def test_an_alpha_that_no_model_can_compute_with(
    llm: LLM, tmp_path: Path, name: str, alpha: float
) -> None:
    path = changed(tmp_path / "a", name, lora_alpha=alpha)
    with pytest.raises(AdapterError, match=r"scale \S+, rank .*in float32.*lora_alpha"):
        llm.load_adapter("large", path)


def test_an_alpha_that_a_model_can_compute_with(llm: LLM, tmp_path: Path) -> None:
    llm.load_adapter("x", changed(tmp_path / "a", "upper", lora_alpha=1e8))
    (output,) = llm.generate({"prompt_token_ids": [5, 6]}, adapter="x")
    assert output.outputs[0].finish_reason in ("length", "stop")


def test_an_alpha_of_zero_is_told(llm: LLM, tmp_path: Path) -> None:
    info = llm.load_adapter("zero", changed(tmp_path / "a", "upper", lora_alpha=0))
    assert "lora_alpha is 0" in info.warnings[0]


def test_the_demo_without_one_pair(llm: LLM, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = Path(changed(tmp_path / "a", "sort"))
    weights = path / "adapter_model.safetensors"
    lost = "layers.2.self_attn.q_proj"
    save_file({key: x for key, x in load_file(weights).items() if lost not in key}, weights)
    with pytest.raises(AdapterError) as error:
        llm.load_adapter("torn", str(path))
    assert f"  base_model.model.model.{lost}.lora_{{A,B}}.weight (2 keys)" in str(error.value)
    assert str(error.value).count("adapter '") == 1
    assert f"adapter 'torn': {path}: " in str(error.value)
