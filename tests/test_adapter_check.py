"""`check_adapter`, and `vexpert adapter check`: the engine against merged weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_extras import (
    WRITERS,
    Files,
    Q,
    bias,
    expert_dora,
    make_model,
    plain,
    read,
    save_model,
)
from helpers_formats import applied

import vexpert.demo
from vexpert.cli.main import main
from vexpert.engine import check
from vexpert.engine.check import check_adapter
from vexpert.errors import AdapterError
from vexpert.lora.merge import merge_adapter
from vexpert.lora.types import AdapterWeights


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("qwen3_moe")


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(model, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("write", [plain, bias, expert_dora])
def test_right(write: Any, model: Any, folder: str, tmp_path: Path) -> None:
    report = check_adapter(write(Files(model, tmp_path)), folder, device="cpu")
    assert report.verdict == "right"
    assert report.difference < 2e-4
    assert report.effect > 0.01
    assert (report.prompts, report.tokens, report.dtype) == (4, 48, "float32")


def test_half_dtypes_are_judged_by_the_median(model: Any, folder: str, tmp_path: Path) -> None:
    path = expert_dora(Files(model, tmp_path))
    report = check_adapter(path, folder, device="cpu", dtype="bfloat16")
    assert report.is_right
    assert 2e-4 < report.median_difference < report.tolerance == 0.1 < report.effect


def test_a_wrong_merge_is_seen(
    model: Any, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Had the engine left out one layer's experts, this is how it would look."""

    def merge_less(plain: Any, weights: AdapterWeights, targets: Any) -> None:
        weights.modules.pop("model.layers.1.mlp.experts")
        merge_adapter(plain, weights, targets)

    monkeypatch.setattr(check, "merge_adapter", merge_less)
    report = check_adapter(plain(Files(model, tmp_path)), folder, device="cpu")
    assert not report.is_right
    assert report.verdict.startswith("DIFFERENT")


def test_an_adapter_that_does_nothing(model: Any, folder: str, tmp_path: Path) -> None:
    files = Files(model, tmp_path)
    zero = {key: x * (0.0 if "lora_B" in key else 1.0) for key, x in files.some(Q).items()}
    report = check_adapter(files.save("zero", zero), folder, device="cpu")
    assert report.is_right
    assert "too little" in report.verdict
    assert any("every lora_B is zero" in warning for warning in report.warnings)


def test_a_refused_adapter_raises(folder: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        check_adapter(tmp_path, folder, device="cpu")


@pytest.mark.parametrize("model_type", WRITERS)
def test_merging_equals_the_tests_own(model_type: str, tmp_path: Path) -> None:
    """Every extra, in parameters: two independent ways to fold an adapter in."""
    own = make_model(model_type)
    files = Files(own, tmp_path)
    for write in WRITERS[model_type]:
        if write is bias:
            continue  # the tests' own merging adds it with hooks
        weights = read(files, write(files))
        ours = make_model(model_type)
        merge_adapter(ours, weights, files.targets)
        with applied(own, weights) as theirs:
            wanted = dict(theirs.named_parameters())
            for name, parameter in ours.named_parameters():
                torch.testing.assert_close(parameter, wanted[name], atol=1e-5, rtol=1e-5)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    name, path = next(iter(vexpert.demo.adapter_paths().items()))
    words = ["adapter", "check", str(path), "--model", str(vexpert.demo.model_path()), "--json"]
    words += ["--tokenizer", str(vexpert.demo.model_path()), "--device", "cpu"]
    assert main([*words, "--prompt", "hello", "--prompt", name]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["prompts"] == 2
    assert facts["verdict"] == "right"
    assert facts["difference"] <= facts["tolerance"]


@pytest.mark.parametrize("words", [[], ["--model", "vexpert-demo"]])
def test_the_demo_is_the_model(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    path = vexpert.demo.adapter_paths()["upper"]
    assert main(["adapter", "check", str(path), "--device", "cpu", *words]) == 0
    out = capsys.readouterr().out
    assert out.endswith("verdict: right\n")
    assert "warning" not in out


def test_the_command_on_a_refused_adapter(
    model: Any, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["adapter", "check", str(tmp_path), "--model", folder, "--device", "cpu"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert "adapter_config.json is missing" in error
    files = Files(model, tmp_path)
    odd = {key.replace("q_proj", "q_porj"): x for key, x in files.some(Q).items()}
    path = str(files.save("odd", odd))
    assert main(["adapter", "check", path, "--model", folder, "--device", "cpu"]) == 2
    lines = capsys.readouterr().err.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"error: {path}: 4 keys"))
    assert "q_porj" in lines[first + 1]
    assert lines[first + 1].startswith("  base_model")
    assert "checked" not in "".join(lines)
