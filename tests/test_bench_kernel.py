"""`vexpert bench kernel`: cases, draws, floors, timer, the check of results, and the command."""

import csv
import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from vexpert.bench.bound import bound_us
from vexpert.bench.cases import GRIDS, Case, Grid, goal_cases, with_draws
from vexpert.bench.claims import check_claims, claim_cases, make_claims
from vexpert.bench.contenders import BASE, CLASSIC, DEFAULT, LORA, Contender
from vexpert.bench.draw import Draw, draw, draw_experts, draw_slots
from vexpert.bench.floor import Floor, count_floor
from vexpert.bench.layer import BenchLayer
from vexpert.bench.measure import Bench, Row
from vexpert.bench.peers import find_peer, load_peers
from vexpert.bench.reference import largest_error, reference
from vexpert.bench.shapes import SHAPES
from vexpert.bench.table import columns, heading, line
from vexpert.bench.timer import ClockTimer, Timing, make_timer
from vexpert.bench.verdict import verdict, verdict_lines
from vexpert.cli.bench.kernel import report
from vexpert.cli.main import main
from vexpert.errors import ConfigError
from vexpert.ops.backend import select_backend
from vexpert.ops.reference import factor_a, factor_b, grouped_gemm, lora_delta

CPU = torch.device("cpu")
CASES = {
    "plain": Case("tiny", (8,), 4, 16, 4, 0.5),
    "mixed": Case("tiny", (4, 8, 3), 6, 16, 3),
    "shared-a": Case("tiny", (8,), 4, 16, 4, 0.25, shared_a=True),
    "gpt-oss": Case("tiny-gpt-oss", (4, 8), 4, 16, 4, 0.5),
}


def make_layer(case: Case, dtype: torch.dtype = torch.float32) -> BenchLayer:
    return BenchLayer(case, CPU, dtype, select_backend("torch", CPU, dtype))


def make_bench(*contenders: Contender) -> Bench:
    backend = select_backend("torch", CPU, torch.float32)
    return Bench(CPU, torch.float32, backend, ClockTimer(2), contenders or DEFAULT)


# ---- cases


def test_the_default_grid_is_that_of_the_peers() -> None:
    cases = GRIDS["full"].cases()
    assert len(set(cases)) == len(cases)
    ours = {(c.ranks[0], c.adapters, c.tokens, c.base_share) for c in cases}
    theirs = {(p.rank, p.adapters, p.tokens, p.base_share) for p in load_peers()}
    assert ours == theirs
    assert len(ours) == 88
    assert all(find_peer(case) is not None for case in cases)


def test_goal_cases_have_their_goals() -> None:
    goals = {
        (c.ranks[0], c.adapters, c.tokens): peer.goal_added_us
        for c in goal_cases()
        if (peer := find_peer(c)) is not None
    }
    assert len(goals) == 15
    assert goals[16, 8, 8] == 10
    assert goals[64, 8, 4096] == 370
    floors = {(p.rank, p.adapters, p.tokens): p for p in load_peers() if p.base_share == 0}
    assert floors[16, 32, 512].vllm_added_us == 722.8
    assert floors[16, 32, 512].sglang_added_us == 876.9


@pytest.mark.parametrize(
    "change",
    [
        {"popularity": "zipf"},
        {"expert_popularity": "zipf"},
        {"slots": 64},
        {"shared_a": True},
        {"adapter_rows_only": True},
        {"ranks": (16, 64)},
        {"shape": "mixtral-8x7b"},
        {"tokens": 7},
    ],
    ids=str,
)
def test_no_peer_beside_another_case(change: dict[str, object]) -> None:
    case = Case("qwen3-30b-a3b", (16,), 8, 32, 8)
    assert find_peer(case) is not None
    assert find_peer(replace(case, **change)) is None


def test_a_grid_is_every_combination_that_can_be() -> None:
    grid = Grid(("tiny",), ((4,), (8, 16)), (1, 4), (1, 4), (0.0, 0.5), ("zipf", "uniform"), 4)
    cases = grid.cases()
    # of 1 and 4 adapters, one token: no base share; four tokens: both shares
    assert len(cases) == 2 * 2 * 2 * (1 + 2)
    assert {case.slots for case in cases} == {4}
    drawn = with_draws(cases, seed=5, draws=3)
    assert len(set(drawn)) == 3 * len(cases)
    assert {case.seed for case in drawn} == {5, 6, 7}


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens", 0), ("adapters", 0), ("ranks", ()), ("ranks", (8, 0)), ("slots", 3),
     ("base_share", 1.0), ("popularity", "x"), ("expert_popularity", "distinct")],
)  # fmt: skip
def test_impossible_cases(field: str, value: object) -> None:
    with pytest.raises(ConfigError):
        replace(CASES["plain"], **{field: value})


@pytest.mark.parametrize(
    ("name", "layers", "billions"),
    [
        ("qwen3-30b-a3b", 48, 30.5),
        ("mixtral-8x7b", 32, 46.7),
        ("gpt-oss-20b", 24, 20.9),
        ("deepseek-v2-lite", 26, 15.7),
        ("qwen3.5-35b-a3b", 40, 35),
    ],
)
def test_experts_are_most_of_the_published_size(name: str, layers: int, billions: float) -> None:
    count = sum(p.numel() for p in SHAPES[name].outline().parameters())
    assert 0.9 < layers * count / billions / 1e9 < 0.98


# ---- draws


@pytest.mark.parametrize("popularity", ["uniform", "zipf", "identical", "distinct"])
def test_slots(popularity: str) -> None:
    case = Case("tiny", (8,), 16, 400, 8, 0.25, popularity)
    slots = draw_slots(case)
    assert int((slots == -1).sum()) == 100
    used, counts = torch.unique(slots[slots >= 0], return_counts=True)
    assert int(used.max()) < 16
    largest = int(counts.max())
    expected = {"identical": (1, 300, 300), "distinct": (8, 38, 38), "uniform": (8, 38, 60)}
    number, low, high = expected.get(popularity, (8, 100, 250))  # zipf: one has half
    assert len(used) <= number
    assert low <= largest <= high
    assert popularity == "zipf" or len(used) == number


def test_one_token_always_has_an_adapter() -> None:
    case = Case("tiny", (8,), 1, 1, 1, 0.9)
    assert draw_slots(case).tolist() == [0]


@pytest.mark.parametrize("popularity", ["uniform", "zipf", "identical"])
def test_experts_of_a_token_are_distinct(popularity: str) -> None:
    case = Case("tiny", (8,), 4, 200, 4, expert_popularity=popularity)
    ids = draw_experts(case)
    assert ids.shape == (200, 2)
    assert bool((ids[:, 0] != ids[:, 1]).all())
    share = torch.bincount(ids.reshape(-1), minlength=8).max() / ids.numel()
    low, high = {"uniform": (0.125, 0.2), "zipf": (0.3, 0.5), "identical": (0.5, 0.5)}[popularity]
    assert low <= float(share) <= high


def test_what_a_draw_depends_on() -> None:
    case = CASES["plain"]
    step = draw(case, CPU, torch.float32)
    ranks = draw(replace(case, ranks=(16,)), CPU, torch.float32)
    adapters = draw(replace(case, adapters=2), CPU, torch.float32)
    seed = draw(replace(case, seed=1), CPU, torch.float32)
    for name in ("hidden", "topk_ids", "topk_weights", "slots"):
        mine = getattr(step, name)
        assert torch.equal(mine, getattr(ranks, name)), name
        assert not torch.equal(mine, getattr(seed, name)), name
        assert torch.equal(mine, getattr(adapters, name)) == (name != "slots"), name
    assert step.active_slots == tuple(sorted(set(step.slots.tolist()) - {-1}))


def test_more_slots_rename_the_adapters_alone() -> None:
    case = Case("tiny", (8,), 8, 64, 8, 0.25)
    few, many = draw_slots(case), draw_slots(replace(case, slots=64))
    assert not torch.equal(few, many)
    pairs = set(zip(few.tolist(), many.tolist(), strict=True))
    assert len(pairs) == len(set(few.tolist())) == len(set(many.tolist())) == 9


def test_adapter_rows_only_are_the_same_rows() -> None:
    case = CASES["plain"]
    both = draw(case, CPU, torch.float32)
    alone = draw(replace(case, adapter_rows_only=True), CPU, torch.float32)
    rows = both.slots >= 0
    assert alone.hidden.shape[0] == 8
    for name in ("hidden", "topk_ids", "topk_weights", "slots"):
        assert torch.equal(getattr(both, name)[rows], getattr(alone, name)), name
    layer = make_layer(case)
    expected = reference(layer, both, True)[rows]
    torch.testing.assert_close(reference(layer, alone, True), expected)


# ---- floors and reference


def naive_floor(layer: BenchLayer, step: Draw) -> tuple[int, int, int]:
    """Bytes of base and LoRA, and operations: one token and expert at a time."""
    weights = layer.run.weights
    base: dict[int, int] = {}
    lora: dict[tuple[int, int], int] = {}
    operations = 0
    for slot, ids in zip(step.slots.tolist(), step.topk_ids.tolist(), strict=True):
        for expert in ids:
            parts = [weights.gate_up[expert], weights.down[expert]]
            operations += 2 * sum(part.numel() for part in parts)
            if weights.gate_up_bias is not None and weights.down_bias is not None:
                parts += [weights.gate_up_bias[expert], weights.down_bias[expert]]
            base[expert] = sum(part.nbytes for part in parts)
            if slot < 0:
                continue
            factors = [factor_a(site, table, slot, expert) for site, table in layer.sites]
            for site, table in layer.sites:
                factors += [factor_b(site, table, i, slot, expert) for i in range(len(site.slices))]
            lora[slot, expert] = sum(factor.nbytes for factor in factors)
    return sum(base.values()), sum(lora.values()), operations


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_floor_equals_a_naive_count(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    layer, step = make_layer(case, dtype), draw(case, CPU, dtype)
    floor = count_floor(layer, step)
    assert (floor.base_bytes, floor.lora_bytes, floor.base_flops) == naive_floor(layer, step)
    assert floor.lora_us(2e6) == pytest.approx(floor.lora_bytes / 2)


def test_a_shared_a_is_stored_and_counted_once() -> None:
    case = replace(CASES["plain"], base_share=0.0)
    layers = [make_layer(replace(case, shared_a=shared)) for shared in (False, True)]
    own, shared = (count_floor(layer, draw(case, CPU, torch.float32)) for layer in layers)
    # A of gate, up, down and B of each, in elements per rank: 64 + 64 + 48 and 48 + 48 + 64
    assert own.lora_bytes / shared.lora_bytes == pytest.approx((176 + 160) / (112 + 160))
    assert layers[1].sites[0][1].host_rank == [8] * 4
    assert layers[0].sites[0][1].host_rank == [16] * 4


@pytest.mark.parametrize("with_lora", [True, False], ids=["lora", "base"])
@pytest.mark.parametrize("name", CASES)
def test_reference_equals_the_row_by_row_one(name: str, with_lora: bool) -> None:
    case = CASES[name]
    layer, step = make_layer(case), draw(case, CPU, torch.float32)
    weights = layer.run.weights
    expert, token = step.topk_ids.reshape(-1), torch.arange(16).repeat_interleave(2)
    slots = step.slots[token]
    gate_up, down = layer.sites
    transposed = weights.is_transposed
    y = grouped_gemm(step.hidden, token, weights.gate_up, weights.gate_up_bias, expert, transposed)
    if with_lora:
        delta = lora_delta(step.hidden, *gate_up, slots, expert, token)
        y += delta
        rows = slots >= 0
        assert 0.3 < float(delta[rows].norm() / y[rows].norm()) < 3  # a delta that counts
    inner = weights.activate(y)
    y = grouped_gemm(inner, None, weights.down, weights.down_bias, expert, transposed)
    if with_lora:
        y += lora_delta(inner, *down, slots, expert)
    out = (y.view(16, 2, -1) * step.topk_weights[:, :, None].double()).sum(1)
    assert largest_error(reference(layer, step, with_lora), out.float()) < 1e-5


def test_largest_error_is_of_one_token() -> None:
    expected = torch.ones(1000, 4)
    out = expected.clone()
    out[17] = 1.5
    assert largest_error(out, expected) == pytest.approx(0.5)
    out[3, 0] = float("nan")
    assert largest_error(out, expected) == float("inf")


# ---- timer


def test_timing_statistics() -> None:
    timing = Timing.of([float(value) for value in (5, 1, 2, 3, 4, 6, 7, 8, 9, 10, 110)])
    assert timing == Timing(median=6.0, low=1.0, p10=2.0, p90=10.0, repeats=11)


def test_the_clock_timer_takes_turns() -> None:
    now = 0.0
    order: list[str] = []

    def work(name: str, seconds: float) -> None:
        nonlocal now
        order.append(name)
        now += seconds

    timer = ClockTimer(4, clock=lambda: now)
    assert timer.overhead == 0
    prepared = {
        "a": timer.prepare(partial(work, "a", 2e-6)),
        "b": timer.prepare(partial(work, "b", 5e-6)),
    }
    order.clear()  # of warming up
    times = timer.time_in_turns(prepared)
    assert order == ["a", "b"] * 4
    assert times["a"].median == pytest.approx(2)
    assert times["b"].p90 == pytest.approx(5)


def test_one_repeat_has_no_spread() -> None:
    with pytest.raises(ConfigError, match="repeats=1"):
        ClockTimer(1)


@pytest.mark.gpu
def test_graph_timer() -> None:
    timer = make_timer(torch.device("cuda"), 20)
    assert 0 < timer.overhead < 50
    x = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    grow = timer.prepare(lambda: x.add_(1))
    x.zero_()
    before = int(x[0])
    assert int(grow.run()[0]) == before + 1
    times = timer.time_in_turns({"one": grow, "again": grow})
    assert int(x[0]) == (before + 41) % 256
    # 512 MiB of traffic: no GPU moves it in 10 us, none of today needs 10 ms
    assert 10 < times["one"].low <= times["one"].median < 10_000


# ---- rows


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_every_figure(name: str) -> None:
    (row,) = make_bench(*DEFAULT, CLASSIC).rows([CASES[name]])
    assert row.failure is None
    assert set(row.times) == {"base", "lora", "routing", "classic"}
    assert set(row.errors) == {"base", "lora", "classic"}
    assert max(row.errors.values()) < 1e-5
    figures = row.figures()
    assert figures["added_us"] == figures["lora_us"] - figures["base_us"]
    assert figures["lora_min_us"] <= figures["lora_p10_us"] <= figures["lora_p90_us"]
    assert figures["lora_floor_us"] == pytest.approx(figures["lora_bytes"] / 4.3e6)
    assert figures["added_to_floor"] == figures["added_us"] / figures["lora_floor_us"]


def swapped(layer: BenchLayer, step: Draw) -> partial[torch.Tensor]:
    """One token of another adapter."""
    slots = step.slots.clone()
    (row,) = (slots >= 0).nonzero()[:1, 0].tolist()
    slots[row] = (slots[row] + 1) % layer.pool.num_slots
    return partial(layer.forward, replace(step, slots=slots), with_lora=True)


def misrouted(layer: BenchLayer, step: Draw) -> partial[torch.Tensor]:
    """One pair at another expert."""
    ids = step.topk_ids.clone()
    ids[3, 1] = next(e for e in range(8) if e not in ids[3].tolist())
    return partial(layer.forward, replace(step, topk_ids=ids), with_lora=False)


def without_adapters(layer: BenchLayer, step: Draw) -> partial[torch.Tensor]:
    return partial(layer.forward, step, with_lora=False)


@pytest.mark.parametrize(
    "planted",
    [
        Contender("wrong", swapped, with_lora=True),
        Contender("wrong", misrouted, with_lora=False),
        Contender("wrong", without_adapters, with_lora=True),
    ],
    ids=["adapter", "expert", "no adapter"],
)
def test_a_wrong_contender_is_found(planted: Contender, capsys: pytest.CaptureFixture[str]) -> None:
    bench = make_bench(BASE, LORA, planted)
    facts = {"device": "cpu", "commit": "unknown"}
    assert report(bench, [CASES["plain"]], facts) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "FAILED: wrong: wrong (error" in lines[1]
    result = json.loads(lines[-1])
    assert result["failed"] == 1
    (row,) = result["results"]
    assert row["wrong_error"] > 0.1
    assert row["lora_error"] < 1e-5
    assert "lora_us" not in row  # it was not timed


def test_a_case_that_cannot_run_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BenchLayer.__init__

    def build(self: BenchLayer, case: Case, *rest: Any) -> None:
        if case.shape == "tiny":
            raise torch.OutOfMemoryError("no\nroom")
        original(self, case, *rest)

    monkeypatch.setattr(BenchLayer, "__init__", build)
    cases = [CASES["plain"], replace(CASES["gpt-oss"], tokens=4), CASES["gpt-oss"]]
    rows = list(make_bench().rows(cases))
    assert [row.failure for row in rows] == ["no room", None, None]


def test_layers_are_shared_only_by_cases_that_may(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    original = BenchLayer.__init__

    def build(self: BenchLayer, case: Case, *rest: Any) -> None:
        built.append(case)
        original(self, case, *rest)

    monkeypatch.setattr(BenchLayer, "__init__", build)
    first = CASES["plain"]
    cases = [first, replace(first, tokens=4, base_share=0.0, adapters=2, seed=3)]
    cases += [replace(first, ranks=(4,)), replace(first, ranks=(4,), slots=5)]
    cases += [replace(first, ranks=(4,), slots=5, shared_a=True)]
    assert all(row.failure is None for row in make_bench().rows(cases))
    assert built == [cases[0], *cases[2:]]


def test_a_line_fits_its_heading() -> None:
    shown = columns(with_classic=True, with_peers=True)
    case = Case("qwen3-30b-a3b", (16,), 8, 8, 8)
    times = {
        name: Timing(us, us, us - 2, us + 2, 20)
        for name, us in (("base", 120.04), ("lora", 130.5), ("routing", 3.0), ("classic", 99999.0))
    }
    floor = Floor(
        base_bytes=860_000_000, lora_bytes=17_200_000, lora_row_bytes=430_000, base_flops=1
    )
    row = Row(case, times, {"base": 0.004, "lora": 0.0051}, floor, find_peer(case))
    text = line(row, shown)
    assert len(text) == len(heading(shown))
    assert text.split() == [
        "qwen3-30b-a3b", "16", "8", "8", "8", "0%", "uniform#0", "120.0", "118.0-122.0", "200.0",
        "130.5", "128.5-132.5", "3.0", "10.5", "4.0", "2.6", "9.6", "99879", "10.0", "52.7", "46.1",
        "139.2", "5e-03",
    ]  # fmt: skip
    assert line(Row(case, failure="why"), shown).endswith("FAILED: why")


def test_verdict_counts() -> None:
    case = Case("qwen3-30b-a3b", (16,), 8, 8, 8)  # goal 10, SGLang 46.1, vLLM 52.7
    other = replace(case, base_share=0.5)  # no goal; SGLang 42.4, vLLM 52.3

    def timed(case: Case, added: float) -> Row:
        times = {
            name: Timing.of([value] * 2) for name, value in (("base", 100), ("lora", 100 + added))
        }
        return Row(case, times, peer=find_peer(case))

    rows = [timed(case, 9), timed(case, 30), timed(case, 50), timed(other, 42.0), timed(other, 43)]
    assert verdict([*rows, Row(case, failure="no")]) == {
        "rows": 6, "failed": 1, "goals": 3, "goals_held": 1, "peers": 5, "peers_held": 3,
        "bases": 5, "bases_held": 5, "bounds": 0, "bounds_held": 0,
    }  # fmt: skip
    lines = verdict_lines(rows)
    assert lines[0] == "5 rows, 0 failed"
    assert (
        lines[1]
        == "added at most the goal: 1 of 3 rows; above: 16/8/8 30.0 > 10.0, 16/8/8 50.0 > 10.0"
    )
    assert lines[2].endswith("3 of 5 rows; above: 16/8/8 50.0 > 46.1, 16/8/8 base 50% 43.0 > 42.4")
    assert lines[3] == "base at most vLLM's: 5 of 5 rows"
    assert len(lines) == 4  # no row of another shape


def test_the_bound_is_a_rule_for_the_goals() -> None:
    for peer in load_peers():
        if peer.goal_added_us is not None:
            rows = peer.tokens * 8 * (2048 + 768) * 2  # of 8 experts a token, bfloat16
            bound = bound_us(Floor(0, round(peer.lora_floor_us * 4.3e6), rows, 0), 4.3e12)
            assert 0.91 < bound / peer.goal_added_us < 1.09, peer


def test_other_shapes_are_held_to_the_bound() -> None:
    case = Case("mixtral-8x7b", (16,), 1, 1, 1)
    floor = Floor(0, 4_300_000, 43_000, 0)  # 1 us and 0.01 us: a bound of 5.76 us, 6.624 with slack

    def timed(added: float) -> Row:
        times = {name: Timing.of([value] * 2) for name, value in (("base", 9), ("lora", 9 + added))}
        return Row(case, times, floor=floor)

    rows = [timed(6.6), timed(6.7)]
    assert rows[0].figures()["bound_us"] == pytest.approx(5.76)
    assert verdict(rows)["bounds_held"] == 1
    assert verdict_lines(rows)[-1].endswith("1 of 2 rows; above: mixtral-8x7b 16/1/1 6.7 > 6.6")


def test_claims_compare_what_was_measured() -> None:
    claims = make_claims("tiny")
    assert len({claim.text for claim in claims}) == len(claims) == 9
    slots, half, mixed = claims[:3]

    def row(case: Case, added: float, seed: int = 0) -> Row:
        times = {"base": Timing.of([50.0] * 2), "lora": Timing.of([50 + added] * 2)}
        return Row(replace(case, seed=seed), times)

    rows = [row(slots.case, 103), *(row(slots.others[0], us, us) for us in (90, 100, 190))]
    rows += [row(half.case, 106), row(half.others[0], 100)]
    singles = zip(mixed.others, (40, 80, 120, 160), strict=True)
    rows += [row(mixed.case, 110), *(row(case, us) for case, us in singles)]
    outcome = [(c["ratio"], c["bound"], c["holds"]) for c in check_claims(claims, rows)]
    assert outcome == [(1.03, 1.03, True), (1.06, 1.05, False), (1.1, 1.15, True)]
    assert len(check_claims(claims, rows[:-1])) == 2  # a rank is missing


def test_claims_are_about_the_rows_of_their_preset() -> None:
    needed = {case for claim in make_claims() for case in (claim.case, *claim.others)}
    assert set(claim_cases()) == needed
    assert len(claim_cases()) == len(needed) == 27


# ---- the command

SMALL = ["bench", "kernel", "--device", "cpu", "--shapes", "tiny", "--repeats", "3"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "out.json"), "--csv", str(tmp_path / "out.csv")]
    grid = ["--ranks", "4", "4,8", "--adapters", "2", "--tokens", "2", "8", "--base-shares", "0"]
    words = [*SMALL, *grid, "--draws", "2", "--slots", "3", "--classic", "--lora-backend", "torch"]
    assert main([*words, *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    facts = dict(s.split(": ", 1) for s in itertools.takewhile(lambda s: ": " in s, lines))
    assert {"device", "driver", "torch", "triton", "commit", "date", "overhead_us"} <= set(facts)
    assert facts["dtype"] == "float32"
    result = json.loads(lines[-1])
    assert (result["rows"], result["failed"]) == (8, 0)
    kept = json.loads((tmp_path / "out.json").read_text())
    assert kept["results"] == result["results"]
    assert {row["ranks"] for row in kept["results"]} == {"4", "4,8"}
    assert {row["seed"] for row in kept["results"]} == {0, 1}
    with (tmp_path / "out.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 8
    assert all(float(row["classic_us"]) > 0 for row in table)
    for row in (*table, *kept["results"]):  # each says its own, out of its file too
        assert (row["device"], row["commit"]) == (facts["device"], facts["commit"])
    assert [text.split()[0] for text in lines].count("tiny") == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "gpt"], "use one of qwen3-30b-a3b"),
        (["--preset", "huge"], "use one of full, shapes, small, goals, claims"),
        (["--preset", "goals"], "leave out shapes"),
        (["--base-shares", "0.5", "--tokens", "1"], "add base share 0"),
        (["--slots", "0"], "slots=0"),
        (["--repeats", "1"], "repeats=1"),
        (["--draws", "0"], "draws=0"),
        (["--bandwidth", "0"], "bandwidth=0.0"),
        (["--device", "abacus"], "use cuda or cpu"),
        (["--json", "/no/such/folder/x"], "does not exist"),
        (["--lora-backend", "magic"], "magic"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
