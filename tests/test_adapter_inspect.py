"""`inspect_adapter`, and its command: what files hold, and what a model makes of them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_extras import (
    Files,
    all_biases,
    dora,
    expert_dora,
    full_head,
    full_router_and_linear,
    make_llm,
    make_model,
    plain,
    tokens,
)
from helpers_models import tiny_model
from safetensors.torch import load_file

import vexpert.demo
from vexpert.cli.adapter import _spans
from vexpert.cli.main import main
from vexpert.config import EngineConfig
from vexpert.engine.inspect import inspect_adapter
from vexpert.errors import ModelError
from vexpert.lora.halves import check_half_keys
from vexpert.models.loader import find_targets, serve
from vexpert.models.outline import read_outline


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("qwen3_moe")


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> str:
    """A model's config without weights: inspecting needs no more."""
    model.config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["adapter", *words])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_files_alone(model: Any, tmp_path: Path) -> None:
    path = plain(Files(model, tmp_path))
    report = inspect_adapter(path)
    assert (report.error, report.model, report.device_bytes) == (None, None, None)
    rows = {(row.module, row.part): row for row in report.files}
    a = rows["model.layers.{0,1}.mlp.experts.{0-5}.gate_proj", "A"]
    assert (a.count, a.shapes, a.dtypes) == (12, ((2, 40),), ("float32",))
    size = (path / "adapter_model.safetensors").stat().st_size
    assert 0 < size - report.file_bytes < 40_000  # the header


@pytest.mark.parametrize("write", [plain, dora, expert_dora, full_head, full_router_and_linear])
def test_bytes_are_those_of_the_device(write: Any, model: Any, folder: str, tmp_path: Path) -> None:
    files = Files(model, tmp_path)
    path = write(files)
    llm = make_llm(model)
    info = llm.load_adapter("x", str(path))
    report = inspect_adapter(path, folder, max_lora_rank=8)
    assert report.error is None
    assert report.device_bytes == info.host_bytes
    assert report.rank == info.rank


def test_rows_of_modules(model: Any, folder: str, tmp_path: Path) -> None:
    report = inspect_adapter(plain(Files(model, tmp_path)), folder)
    rows = {(row.module, row.projection): row for row in report.modules}
    down = rows["model.layers.1.mlp.experts", "down"]
    assert (down.rank, down.scale, down.inputs, down.outputs, down.experts, down.shared) == (
        *(2, 1.5, 20, 40),
        *(6, ""),
    )
    assert rows["lm_head", ""].outputs == 61
    assert report.formats == ("linear", "per expert")
    assert len(report.modules) == 2 * (4 + 1 + 3) + 1


def test_extras_are_named(model: Any, folder: str, tmp_path: Path) -> None:
    files = Files(model, tmp_path)
    assert inspect_adapter(tokens(files), folder).extras == ("tokens",)
    report = inspect_adapter(full_router_and_linear(files), folder)
    assert report.extras == ("full_linear", "full_router")


def test_a_refusal_is_in_the_report(model: Any, folder: str, tmp_path: Path) -> None:
    files = Files(model, tmp_path)
    path = files.save("bad", {"base_model.model.x.lora_A.weight": torch.ones(2, 4)})
    report = inspect_adapter(path, folder)
    assert report.error is not None
    assert "1 key of the adapter has no place" in report.error
    assert report.files  # the files are shown all the same
    assert "max_lora_rank=2" in str(inspect_adapter(plain(files), folder, max_lora_rank=1).error)
    assert "missing" in str(inspect_adapter(tmp_path).error)


def test_halves_are_missing_whatever_the_model(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = Files(model, tmp_path)
    keys = load_file(plain(files) / "adapter_model.safetensors")
    path = str(files.save("half", {key: x for key, x in keys.items() if "lora_A" in key}))
    code, text, _ = run(capsys, "inspect", path)
    assert code == 1
    assert "REFUSED" in text
    assert "q_proj.lora_B.weight (2 keys)" in text
    mixed = {"mlp.experts.up_proj.lora_A.weight", "mlp.experts.0.up_proj.lora_B.weight"}
    check_half_keys(mixed | {"x.q_proj.lora_A", "x.q_proj.lora_B.weight"})


@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text", "granitemoe", "mixtral"]
)
def test_an_outline_has_the_targets_of_the_loaded_model(model_type: str, tmp_path: Path) -> None:
    loaded = make_model(model_type)
    loaded.config.save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32")
    outline = read_outline(config)
    ours = serve(loaded, loaded.config, config, torch.float32, torch.device("cpu"))
    assert outline.targets == ours.targets
    assert outline.dtype == torch.float32


def test_biases_of_experts(tmp_path: Path) -> None:
    other = make_model("gpt_oss")
    other.config.save_pretrained(tmp_path / "model")
    report = inspect_adapter(all_biases(Files(other, tmp_path)), str(tmp_path / "model"))
    assert report.error is None
    assert report.extras == ("full_bias",)


def test_the_command(
    model: Any, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(plain(Files(model, tmp_path)))
    code, text, _ = run(capsys, "inspect", path, "--model", folder)
    assert code == 0
    assert "model.layers.N.mlp.experts.down  0-1     2     1.5    20 -> 40  6" in text
    assert text.endswith("accepted\n")
    code, text, _ = run(capsys, "inspect", path)
    assert code == 0
    assert text.endswith("--model says whether it fits\n")
    code, text, _ = run(capsys, "inspect", path, "--model", folder, "--max-lora-rank", "1")
    assert code == 1
    assert "REFUSED" in text


def test_the_command_as_json(
    model: Any, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(dora(Files(model, tmp_path)))
    code, text, _ = run(capsys, "inspect", path, "--model", folder, "--json")
    facts = json.loads(text)
    assert code == 0
    assert facts["extras"] == ["dora"]
    assert facts["config"]["use_dora"] is True
    report = inspect_adapter(path, folder)
    assert facts["modules"] == [dataclasses.asdict(row) for row in report.modules]
    code, text, _ = run(capsys, "inspect", str(tmp_path), "--json")
    assert (code, json.loads(text)["files"]) == (1, [])


def test_a_model_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError):
        inspect_adapter(tmp_path, str(tmp_path))
    code, text, error = run(capsys, "inspect", str(tmp_path), "--model", str(tmp_path))
    assert (code, text) == (2, "")
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_the_demo_by_every_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its adapters name it vexpert-demo; no path to its folder is another model."""
    model = vexpert.demo.model_path()
    monkeypatch.chdir(model.parent)
    for name in ("model", "../demo/model/", str(model), vexpert.demo.find_model("vexpert-demo")):
        report = inspect_adapter("adapters/sort", name)
        assert (report.error, report.warnings) == (None, ())
    assert vexpert.demo.find_model("other") == "other"


def test_the_demos_adapters() -> None:
    for path in vexpert.demo.adapter_paths().values():
        report = inspect_adapter(path, str(vexpert.demo.model_path()))
        assert report.error is None
        assert report.device_bytes
        assert report.modules


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([-1], ""), ([4], "4"), ([7, 0, 1, 2], "0-2, 7")]
)
def test_spans(numbers: list[int], text: str) -> None:
    assert _spans(numbers) == text


def test_names_that_no_terminal_can_show(
    model: Any, tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a surrogate pair in a field's name, and in a tensor's."""
    path = plain(Files(model, tmp_path))
    config = path / "adapter_config.json"
    config.write_text(config.read_text()[:-1] + ', "foo\\ud800": 1}')
    code, out, _ = run(capsys, "inspect", str(path), "--model", folder)
    assert code == 0
    assert "'foo\\ud800'" in out
    weights = path / "adapter_model.safetensors"
    data = weights.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].replace(b"q_proj", b"q_pro\\ud800")
    weights.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    for words in ([], ["--model", folder], ["--json"]):
        _, out, _ = run(capsys, "inspect", str(path), *words)
        assert "q_pro" in out


def test_an_empty_path(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["inspect", "", "--model", folder], ["check", ""]):
        code, out, error = run(capsys, *words)
        assert (code, out) == (2, "")
        assert "path is empty" in error


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    inspected, checked = (run(capsys, action, "nope") for action in ("inspect", "check"))
    assert inspected == checked
    assert inspected[:2] == (2, "")
    assert inspected[2].startswith("error: 'nope': no such folder; give an adapter's folder")


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_an_outline_takes_no_memory_for_weights(model_type: str) -> None:
    model = tiny_model(model_type)
    with torch.device("meta"):
        outline = type(model)(model.config)
    targets = find_targets(outline, model.config.get_text_config(), 16)
    assert targets.targets
    assert all(parameter.is_meta for parameter in outline.parameters())
