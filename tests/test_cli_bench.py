"""`vexpert bench throughput`, mostly with a stand-in for the model."""

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import vexpert
from vexpert.bench.engine.cells import Cell, Mix, Timing
from vexpert.bench.engine.files import find_model_shape
from vexpert.bench.engine.floor import step_bytes
from vexpert.bench.engine.report import CellRow, Columns
from vexpert.cli.main import main
from vexpert.demo import DEMO_NAME, adapter_paths
from vexpert.engine.outputs import CompletionOutput, RequestOutput

SEEN: list["FakeLLM"] = []


@dataclass
class Run:
    """One call of generate."""

    prompts: list[tuple[int, ...]]
    adapters: list[str | None]
    max_tokens: int


class FakeLLM:
    """Notes what it is asked and answers with as many tokens as allowed, 1 ms each."""

    clock = 0.0  # seconds

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.loaded: dict[str, str] = {}
        self.runs: list[Run] = []
        self.engine = SimpleNamespace(model_info=SimpleNamespace(vocab_size=50))
        SEEN.append(self)

    def load_adapter(self, name: str, path: str, **options: Any) -> SimpleNamespace:
        self.loaded[name] = path
        return SimpleNamespace(rank={"y": 24}.get(path, 8))

    def generate(self, prompts: Any, params: Any, adapter: Any) -> list[RequestOutput]:
        FakeLLM.clock += 1e-3 * params.max_tokens
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        self.runs.append(Run([tuple(row) for row in ids], adapter, params.max_tokens))
        done = CompletionOutput(0, token_ids=[5] * params.max_tokens)
        return [RequestOutput("x", None, row, [done], True, None) for row in ids]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    SEEN.clear()
    # In the module's dictionary: setattr would import the real one first, to remember it.
    monkeypatch.setitem(vars(vexpert), "LLM", FakeLLM)
    clock = SimpleNamespace(perf_counter=lambda: FakeLLM.clock)
    monkeypatch.setattr("vexpert.bench.engine.cells.time", clock)
    return FakeLLM


WORDS = ["bench", "throughput", "folder", "--num-prompts", "2", "4", "--input-len", "6",
         "--output-len", "3", "--repeats", "2", "--max-loras", "2"]  # fmt: skip


def cells(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    found: list[dict[str, Any]] = result["cells"]
    for row in found:  # each says its own, out of its file too
        assert (row["device"], row["commit"]) == (result["device"], result["commit"])
    return found


def test_base_and_mixed_adapters(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    modules = ["--lora-modules", "a=x", "b=y", "c=z", "--adapters", "0", "2"]
    assert main([*WORDS, *modules, "--prefill", "2x5"]) == 0
    alone, made = SEEN
    assert alone.options["enable_lora"] is False
    assert made.options["max_loras"] == 2
    assert (alone.loaded, made.loaded) == ({}, {"a": "x", "b": "y", "c": "z"})
    assert all(set(run.adapters) == {None} for run in alone.runs)
    mixed = [run.adapters for run in made.runs if set(run.adapters) != {None}]
    # Two runs of a decode cell, one of a prefill; a warm-up and two rounds of each.
    assert sorted(len(names) for names in mixed) == [2] * 9 + [4] * 6
    assert all(names.count("a") == names.count("b") == len(names) // 2 for names in mixed)
    lengths = {(len(run.prompts[0]), run.max_tokens) for run in made.runs}
    assert lengths == {(6, 1), (6, 4), (5, 1)}
    prompts = [prompt for run in made.runs for prompt in run.prompts]
    assert len(set(prompts)) == len(prompts)  # no run finds another's prefixes
    kinds = [(c["server"], c["kind"], c["batch"], c["adapters"]) for c in cells(capsys)]
    expected = [("decode", 2), ("decode", 4), ("prefill", 2)]
    assert kinds == [("base", *each, 0) for each in expected] + [
        ("lora", *each, count) for each in expected for count in (0, 2)
    ]


def test_the_largest_rank_is_told(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    for modules, rank in ((["--lora-modules", "a=x", "b=y", "c=z"], 24), ([], 0)):
        assert main([*WORDS, *modules]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["lora_rank"] == rank


def test_one_round_is_told_to_be_one(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    for repeats, hints in (("1", 1), ("2", 0)):
        assert main([*WORDS, "--repeats", repeats]) == 0
        assert capsys.readouterr().out.count("one round: says nothing of noise") == hints


@pytest.mark.parametrize(
    ("runs", "rows"), [(3, []), (7, [("base", 2, 1)]), (12, [("base", 2, 2), ("base", 4, 2)])]
)
def test_ctrl_c_leaves_what_was_timed(
    runs: int,
    rows: list[tuple[str, int, int]],
    llm: type[FakeLLM],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After so many runs, of two in each of two cells' three rounds: server, batch, rounds."""
    answer, left = FakeLLM.generate, [runs]

    def interrupted(self: FakeLLM, *args: Any, **options: Any) -> list[RequestOutput]:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return answer(self, *args, **options)

    monkeypatch.setattr(FakeLLM, "generate", interrupted)
    assert main(WORDS) == 130
    got = [(row["server"], row["batch"], len(row["ms_rounds"])) for row in cells(capsys)]
    assert got == rows


def test_a_step_is_a_difference_and_the_median_counts(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Seconds of the short and the long run of each round; the first round warms up.
    seconds = [9, 9, 1, 4, 1, 7, 1, 13]
    times = iter([edge for length in 2 * seconds for edge in (0, length)])
    monkeypatch.setattr("vexpert.bench.engine.cells.time.perf_counter", lambda: next(times))
    assert main([*WORDS, "--num-prompts", "4", "--repeats", "3"]) == 0
    base, on_lora_server = cells(capsys)
    assert base["ms_rounds"] == [1000, 2000, 4000]  # (4 - 1) / 3 steps, ...
    assert base["tokens_per_second"] == 2  # 4 rows in 2 s
    assert on_lora_server["of_base"] == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--adapters", "1"], "adapters=1: 0 are given"),
        (["--prefill", "4"], "prefill='4'"),
        (["--shape", "tiny"], "leave them out"),
        (["--popularity", "odd"], "popularity='odd'"),
        (["--base-share", "1"], "base_share=1.0"),
        (["--num-prompts", "0"], "at least 1"),
        (
            ["--lora-modules", *(f"m{i}=x" for i in range(9)), "--adapters", "9"],
            "adapters=9: more than any batch has requests",
        ),
    ],
)
def test_refused(
    words: list[str], error: str, llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, *words]) == 2
    assert error in capsys.readouterr().err


def test_mix() -> None:
    cell = Cell(batch=200, input_len=4, steps=1, adapters=4)
    names = ["a", "b", "c", "d", "not in the batch"]
    for popularity in ("uniform", "zipf", "distinct", "identical"):
        chosen = Mix(popularity, base_share=0.25).names(cell, names, seed=1)
        assert chosen.count(None) == 50
        assert set(chosen) - {None} == ({"a"} if popularity == "identical" else set(names[:4]))
    zipf = Mix("zipf").names(cell, names, seed=1)
    assert zipf.count("a") > 2 * zipf.count("b")


def test_floor_of_the_bytes_is_the_published_one() -> None:
    shape = find_model_shape("qwen3-30b-a3b-8l")
    shares = {(32, 8): 0.94, (32, 32): 0.93, (128, 8): 0.88, (128, 32): 0.83, (8, 8): 0.96}
    for (batch, adapters), share in shares.items():
        assert step_bytes(shape, batch, adapters, 16, 112).share == pytest.approx(share, abs=0.01)


def test_shapes_are_bfloat16_unless_told_otherwise() -> None:
    assert find_model_shape("tiny").config().to_dict()["dtype"] == "bfloat16"


def test_the_demo_is_measured_with_its_adapters(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--num-prompts", "1", "8", "--output-len", "3"]
    for model in ([], [DEMO_NAME]):
        SEEN.clear()
        assert main(["bench", "throughput", *model, *words]) == 0
        alone, made = SEEN
        assert alone.loaded == {}
        assert set(made.loaded) == set(adapter_paths())
        shown = capsys.readouterr().out
        result = json.loads(shown.splitlines()[-1])
        assert result["model"] == DEMO_NAME
        counts = [(c["batch"], c["adapters"]) for c in result["cells"] if c["server"] == "lora"]
        assert counts == [(1, 0), (1, 1), (8, 0), (8, 4)]
        assert {"reverse", "shift", "sort", "upper"} in [set(run.adapters) for run in made.runs]
        assert "vLLM" not in shown  # nobody else's figures are of this model
        assert "floor" not in shown.splitlines()[1]


def test_the_table_has_the_columns_that_have_figures() -> None:
    row = CellRow(Cell(8, 64, 96, 8), "lora", Timing([0.004]), Timing([0.003]), 0.96)
    everything = Columns(has_floor=True, has_peer=True)
    heading, line = everything.heading(), row.line(everything)
    assert len(heading) == len(line)
    assert heading.split("of base")[1].split() == ["floor", "vLLM", "vLLM", "LoRA"]
    assert line.split()[-4:] == ["75.0%", "96%", "4456", "2487"]
    plain = Columns(has_floor=False, has_peer=False)
    assert plain.heading().endswith("of base")
    assert row.line(plain).endswith("75.0%")


def test_a_shape_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "throughput", "--shape", "tiny", "--num-prompts", "3", "--adapters", "0", "3",
             "--output-len", "2", "--input-len", "4", "--repeats", "1", "--lora-rank", "4",
             "--dtype", "float32"]  # fmt: skip
    assert main(words) == 0
    off, base, mixed = cells(capsys)
    assert all(cell["ms_rounds"][0] != 0 for cell in (off, base, mixed))
    assert 0 < mixed["floor_of_base"] < 1
