"""`vexpert bench tune`: candidates, the search, what is skipped, and files that engines read."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vexpert.bench.cases import Case
from vexpert.bench.draw import Draw
from vexpert.bench.layer import BenchLayer
from vexpert.bench.reference import largest_error, reference
from vexpert.bench.shapes import find_shape
from vexpert.bench.timer import ClockTimer
from vexpert.bench.tune.compiling import Compilers
from vexpert.bench.tune.moe import MoeStep, kernel_of, lora_of, run_plan
from vexpert.bench.tune.rows import plan_row, ranges, up_to, write_rows
from vexpert.bench.tune.run import Cell, Grid, Tuner, deadline, families
from vexpert.bench.tune.search import descend
from vexpert.bench.tune.space import Space, Tiles
from vexpert.cli.main import main
from vexpert.errors import ConfigError, UnsupportedError
from vexpert.ops.backend import select_backend
from vexpert.ops.dense_plan import DenseShape, choose_dense_plan
from vexpert.ops.moe_plan import MoePlan, MoeShape, choose_plan, fit_plan
from vexpert.ops.plan_rows import packaged
from vexpert.ops.plans import load_plans
from vexpert.ops.triton_backend import TritonBackend

CPU = torch.device("cpu")
SHAPE = MoeShape(128, 8, 128, 2048, 768, torch.bfloat16, True, True)
SMALL = Space(
    {16: Tiles((16,), (16, 32), (4,), (2,))}, (16,), (1, 2), (32,), (4,), (2,), (1,), (1,)
)


# ---- search


def costs(plans: Sequence[tuple[int, int]]) -> list[float | None]:
    """(x - 3)^2 + (y - 2)^2 + 1 over the first's; x of 5 cannot be used."""
    cost = [(x - 3) ** 2 + (y - 2) ** 2 + 1 for x, y in plans]
    return [None if x == 5 else c / cost[0] for (x, _), c in zip(plans, cost, strict=True)]


COORDINATES = {
    "x": lambda plan: [(x, plan[1]) for x in range(6)],
    "y": lambda plan: [(plan[0], y) for y in range(4)],
}


def test_search_finds_the_best_of_each_coordinate() -> None:
    said: list[str] = []
    assert descend((5, 0), COORDINATES, costs, lambda: True, said.append) == (3, 2)
    assert said[0].startswith("x: 5 of 6 usable")


def test_search_ends_with_its_time() -> None:
    times = iter([True, False])
    assert descend((0, 0), COORDINATES, costs, lambda: next(times), lambda text: None) == (3, 0)


def test_noise_is_no_reason_to_change() -> None:
    def nearly(plans: Sequence[tuple[int, int]]) -> list[float | None]:
        return [1.0, *(0.998 for _ in plans[1:])]

    assert descend((0, 0), COORDINATES, nearly, lambda: True, lambda text: None) == (0, 0)


# ---- candidates


@pytest.mark.parametrize("tokens", [1, 8, 32, 128, 512, 4096])
def test_candidates_keep_the_rules_of_plans(tokens: int) -> None:
    shape = replace(SHAPE, tokens=tokens)
    start = choose_plan(shape, 8)
    space = Space()
    coordinates = space.base(shape.pairs / 128, 2) | space.lora(start.base.order_chunk > 0)
    for name, variants in coordinates.items():
        plans = [fit_plan(plan, shape) for plan in variants(start)]
        assert 8 <= len(plans) < 200, name
        for plan in plans:
            assert not (plan.base.is_identity and plan.lora.by_run)
            assert plan.lora.by_run or not plan.base.order_chunk
            blocks = {plan.lora.shrink.block_m, plan.lora.down_shrink.block_m}
            assert not plan.lora.by_run or len(blocks) == 1
            for tile in (plan.base.gate_up, plan.base.down):
                assert tile.num_stages * tile.block_k * plan.base.block_m * 2 <= 227 << 10


# ---- rows


def test_ranges_meet_and_do_not_overlap() -> None:
    found = ranges([128, 1, 8, 32])
    assert found == {1: (1, 1), 8: (2, 16), 32: (17, 64), 128: (65, 181)}
    assert ranges([100]) == {100: (71, 141)}
    assert [up_to([16, 64], rank) for rank in (16, 64)] == [(1, 16), (17, 64)]


def cell(plan: MoePlan, tokens: int = 128, with_lora: bool = False) -> Cell:
    grid = Grid("qwen3-30b-a3b", (tokens,), (8,), (16,))
    timer = ClockTimer(2)
    tuner = Tuner(
        grid, torch.bfloat16, TritonBackend(), timer, timer, Compilers(0), lambda: True, print
    )
    case = grid.case(tokens, 8, 16)
    return Cell(case, with_lora, 2.0, 1.0, tuner._row(case, with_lora, plan))


def test_a_file_of_winners_is_what_the_engine_runs(tmp_path: Path) -> None:
    usual = choose_plan(SHAPE, 8)
    base = replace(usual.base, gate_up=replace(usual.base.gate_up, num_stages=6))
    lora = replace(usual.lora, group=5)
    path = str(tmp_path / "plans.json")
    cells = [cell(MoePlan(base, lora)), cell(MoePlan(base, lora), with_lora=True)]
    write_rows(path, families(cells, torch.bfloat16), {"device": "a GPU"})
    rows = load_plans(path, batch_invariant=False)
    assert rows.about["device"] == "a GPU"
    assert choose_plan(SHAPE, 8, 16, rows) == MoePlan(base, lora)
    others = [
        (replace(SHAPE, tokens=256), 8, 16),
        (replace(SHAPE, num_experts=64), 8, 16),
        (replace(SHAPE, dtype=torch.float32), 8, 16),
    ]
    for shape, adapters, rank in others:
        assert choose_plan(shape, adapters, rank, rows) == choose_plan(shape, adapters, rank)
    for adapters, rank in ((32, 16), (8, 64)):
        assert choose_plan(SHAPE, adapters, rank, rows) == MoePlan(
            base, choose_plan(SHAPE, adapters).lora
        )
    dense = DenseShape(128, 2048, 5120, torch.bfloat16)
    assert choose_dense_plan(dense, 8, rows) == choose_dense_plan(dense, 8)


def test_a_backend_and_its_layers_hold_the_rows(tmp_path: Path) -> None:
    path = str(tmp_path / "plans.json")
    plan = choose_plan(SHAPE, 8)
    write_rows(path, families([cell(plan)], torch.bfloat16), {})
    backend = select_backend("triton", CPU, torch.float32, path)
    assert isinstance(backend, TritonBackend)
    assert backend.rows.source == f"{path}, then packaged plans"
    layer = BenchLayer(Case("tiny", (4,), 2, 8, 2), CPU, torch.float32, backend)
    assert kernel_of(layer).rows is backend.rows
    with pytest.raises(UnsupportedError, match="plans are for the Triton kernels"):
        select_backend("torch", CPU, torch.float32, path)


def test_packaged_rows_make_their_plans_again() -> None:
    for adapters, tokens in itertools.product((1, 8, 32), (1, 8, 128, 4096)):
        plan = choose_plan(replace(SHAPE, tokens=tokens), adapters)
        row = json.loads(json.dumps(plan_row(plan.lora)))
        made = load_row(row)
        assert made == plan.lora


def load_row(row: dict[str, object]) -> object:
    from vexpert.ops.moe_plan import lora_plan

    return lora_plan({"least_tokens": 3, "top_k": 8, **row})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must be an object"),
        ('{"mo": {}}', "known: moe, dense"),
        ('{"moe": {"base": []}}', "known: base half"),
        ('{"moe": {"base half": {}}}', "must be a list of rows"),
        ('{"moe": {"base half": [{"block_m": 16}]}}', "missing"),
        ('{"moe": {"lora half": [{"group": "4"}]}}', "of another type"),
        ('{"moe": {"lora half": [{"most_token": 4}]}}', "no field 'most_token'"),
        ('{"dense": {"linear half": [{"alone": true}]}}', "tile"),
    ],
)
def test_files_that_are_none(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_plans(str(path), batch_invariant=False)
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_plans(str(tmp_path / "none.json"), batch_invariant=False)


# ---- a tuning, in the interpreter


def make_tuner(said: list[str], seconds: float = float("inf")) -> Tuner:
    return Tuner(
        Grid("tiny", (8,), (2,), (4,)),
        torch.float32,
        select_backend("triton", CPU, torch.float32),
        ClockTimer(2),
        ClockTimer(2),
        Compilers(0),
        deadline(seconds / 60),
        said.append,
        SMALL,
    )


def test_a_tuning_measures_checks_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[MoePlan] = []

    def run(layer: BenchLayer, step: Draw, plan: MoePlan, with_lora: bool) -> torch.Tensor:
        out = reference(layer, step, with_lora)  # the interpreter takes a second for each
        if with_lora and plan.lora.shrink.planes == 2:
            wrong.append(plan)
            return out * 1.01
        return out

    monkeypatch.setattr("vexpert.bench.tune.moe.run_plan", run)
    said: list[str] = []
    base, lora = make_tuner(said).cells()
    assert (base.with_lora, lora.with_lora) == (False, True)
    assert wrong
    assert any(text.startswith("wrong (error") for text in said)
    for found in (base, lora):
        assert found.row is None or found.tuned_us < found.packaged_us
    if lora.row is not None:
        assert lora.row["shrink"]["planes"] == 1
    assert "8 tokens, base: " in base.line()


def test_a_plan_is_what_runs() -> None:
    tuner = make_tuner([])
    step = tuner._step(tuner.grid.case(8, 2, 4), True)
    plan = kernel_of(step.layer).choose(step.step.topk_ids, lora_of(step.layer, step.step))
    for with_lora in (False, True):
        out = run_plan(step.layer, step.step, plan, with_lora)
        assert largest_error(out, reference(step.layer, step.step, with_lora)) < 1e-5
    grouped = replace(plan, lora=replace(plan.lora, shrink=None))  # type: ignore[arg-type]
    with pytest.raises(AttributeError):  # it is this plan that is asked
        run_plan(step.layer, step.step, grouped, True)


def test_a_tuning_without_time_does_nothing() -> None:
    said: list[str] = []
    assert list(make_tuner(said, 0.0).cells()) == []
    assert said == ["no time left for the other cells"]


def test_candidates_with_a_fault_are_not_run() -> None:
    measured: list[MoePlan] = []

    class Step(MoeStep):
        def _chunk(self, first, plans):  # type: ignore[no-untyped-def]
            measured.extend(plan for plan in plans if plan is not None)
            return [None if plan is None else 1.0 for plan in plans]

    def refuse(plans: Sequence[MoePlan]) -> list[str | None]:
        return ["no"] * len(plans)

    tuner = make_tuner([])
    usual = tuner._step(tuner.grid.case(8, 2, 4), True)
    step = Step(
        usual.case,
        usual.layer,
        usual.step,
        True,
        usual.timer,
        lambda plans: ["no"] * len(plans),
        print,
    )
    start = choose_plan(SHAPE, 8)
    other = replace(start, lora=replace(start.lora, group=3))
    assert step.measure([start, other]) == [1.0, None]
    assert measured == [start]  # the plan in use is never in doubt


# ---- the command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "gpt"], "or HxIxExK"),
        (["--shape", "64x48x8x9"], "or HxIxExK"),
        (["--minutes", "0"], "minutes=0.0"),
        (["--tokens", "0"], "tokens=[0]"),
        (["--output", "/no/such/folder/x"], "does not exist"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tune", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_shape_by_its_sizes() -> None:
    shape = find_shape("64x48x8x2")
    assert (shape.hidden, shape.inter, shape.experts, shape.top_k) == (64, 48, 8, 2)
    assert sum(p.numel() for p in shape.outline().parameters()) == 8 * 3 * 64 * 48


def test_the_packaged_rows_are_plans() -> None:
    from vexpert.ops.plans import check_rows

    check_rows(packaged())
    check_rows(packaged("invariant_"))


def test_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "plans.json"

    def cells(self: Tuner) -> Iterator[Cell]:
        yield cell(choose_plan(SHAPE, 8))

    monkeypatch.setattr(Tuner, "cells", cells)
    assert main(["bench", "tune", "--shape", "tiny", "--output", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "128 tokens, base: 2.0 -> 1.0 us" in lines
    assert json.loads(lines[-1])["won"] == 1
    assert load_plans(str(output), batch_invariant=False).about["shape"] == "tiny"
