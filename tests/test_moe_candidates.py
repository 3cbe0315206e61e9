"""`bench/moe_candidates.py`: rows are plans, what is wrong is not timed, the last line is JSON."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vexpert.bench.draw import Draw
from vexpert.bench.layer import BenchLayer
from vexpert.bench.reference import reference
from vexpert.bench.tune.rows import plan_row
from vexpert.ops.moe_plan import MoePlan, MoeShape, choose_plan, lora_plan

SCRIPT = Path(__file__).parent.parent / "bench" / "moe_candidates.py"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tiny sizes in the interpreter")


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("moe_candidates", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "moe_candidates", module)  # dataclasses ask
        spec.loader.exec_module(module)
        yield module


def run(script: Any, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, Any]:
    script.main(["--dry", "--repeats", "2", *words])
    printed = capsys.readouterr().out
    return printed, json.loads(printed.splitlines()[-1])


def test_every_variant_is_another_plan(script: Any) -> None:
    assert script.VARIANTS.keys() == script.CELLS.keys()
    for name, cell in script.CELLS.items():
        shape = MoeShape(cell.tokens, 8, 128, 2048, 768, torch.bfloat16, True, True)
        usual = choose_plan(shape, cell.adapters, cell.rank).lora
        variants = script.VARIANTS[name]
        plans = [lora_plan({**plan_row(usual), **each.changes}) for each in variants]
        assert len({usual, *plans}) == 1 + len(plans) > 1
        assert len({each.name for each in variants}) == len(variants)
        assert all(
            each.expected > 0 and plan.by_run for each, plan in zip(variants, plans, strict=True)
        )


@torch.inference_mode()
def test_dry(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    printed, last = run(script, capsys)
    for cell, variants in script.DRY_VARIANTS.items():
        found = last["cells"][cell]
        names = {"packaged", *(each.name for each in variants)}
        assert set(found["added_us"]) == set(found["usable"]) == names
        assert set(found["errors"]) == {"base", *names}
        assert max(found["errors"].values()) < 1e-5
        assert found["best"] in names
        assert f"{cell}, rank 4: base " in printed


@torch.inference_mode()
def test_what_is_wrong_or_differs_is_not_timed(
    script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def planted(layer: BenchLayer, step: Draw, plan: MoePlan, with_lora: bool) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out = reference(layer, step, with_lora)
        if plan.lora.delta is None:
            return out
        return out * 1.01 if plan.lora.delta.first else out + 1e-7 * calls

    monkeypatch.setattr(script, "run_plan", planted)
    printed, last = run(script, capsys, "--cells", "3x24")
    assert set(last["cells"]["3x24"]["added_us"]) == {"packaged"}
    assert "WRONG: list, first, both, error 1.0e-02, repeatable: True" in printed
    assert "WRONG: share of 3, " in printed
    assert "repeatable: False" in printed


@torch.inference_mode()
def test_ends(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    printed, last = run(script, capsys, "--budget", "0", "--cells", "1x24")
    assert "out of time before 1x24" in printed
    assert last["cells"] == {"1x24": {"usable": ["packaged", "ahead 2"]}}
    _, last = run(script, capsys, "--compile-only", "--names", "share of 3", "--cells", "3x24")
    assert last["cells"] == {"3x24": {"usable": ["packaged", "share of 3"]}}
    with pytest.raises(SystemExit):
        script.parse(["--cells", "2x2"])
    assert "2x2: unknown; known: 1x4096, " in capsys.readouterr().err
