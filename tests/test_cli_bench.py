"""`vexpert bench throughput` with a stand-in for the model."""

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import vexpert
from vexpert.cli.main import main
from vexpert.engine.outputs import CompletionOutput, RequestOutput

SEEN: list["FakeLLM"] = []


@dataclass
class Run:
    """One call of generate."""

    prompts: list[tuple[int, ...]]
    adapters: list[str | None]
    max_tokens: int


class FakeLLM:
    """Notes what it is asked and answers with as many tokens as allowed."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.loaded: dict[str, str] = {}
        self.runs: list[Run] = []
        self.engine = SimpleNamespace(model_info=SimpleNamespace(vocab_size=50))
        SEEN.append(self)

    def load_adapter(self, name: str, path: str, **options: Any) -> None:
        self.loaded[name] = path

    def generate(self, prompts: Any, params: Any, adapter: Any) -> list[RequestOutput]:
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        self.runs.append(Run([tuple(row) for row in ids], adapter, params.max_tokens))
        done = CompletionOutput(0, token_ids=[5] * params.max_tokens)
        return [RequestOutput("x", None, row, [done], True, None) for row in ids]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    SEEN.clear()
    # In the module's dictionary: setattr would import the real one first, to remember it.
    monkeypatch.setitem(vars(vexpert), "LLM", FakeLLM)
    return FakeLLM


WORDS = ["bench", "throughput", "folder", "--num-prompts", "4", "--input-len", "6",
         "--output-len", "3", "--repeats", "2", "--max-loras", "2"]  # fmt: skip


def test_base_and_mixed_adapters(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    modules = ["--lora-modules", "a=x", "b=y", "c=z", "--adapters", "2"]
    assert main([*WORDS, *modules]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert lines[0].startswith("base: ")
    assert lines[1].startswith("mixed: ")
    assert result["mixed_share_of_base"] == pytest.approx(
        result["mixed_tokens_per_second"] / result["base_tokens_per_second"], abs=1e-3
    )
    (made,) = SEEN
    assert made.options["max_loras"] == 2
    assert made.loaded == {"a": "x", "b": "y"}
    assert [run.adapters for run in made.runs] == [[None] * 4, ["a", "b", "a", "b"]] * 2
    prompts = [prompt for run in made.runs for prompt in run.prompts]
    assert len(set(prompts)) == len(prompts) == 16  # no run finds another's prefixes
    assert {len(prompt) for prompt in prompts} == {6}


def test_the_median_round_counts(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Seconds of base, mixed, base, mixed, base, mixed; each makes 4 x 3 tokens.
    times = iter([0, 1, 0, 9, 0, 4, 0, 6, 0, 3, 0, 2])
    monkeypatch.setattr("vexpert.cli.bench.throughput.time.perf_counter", lambda: next(times))
    assert main([*WORDS, "--repeats", "3", "--lora-modules", "a=x"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["base_tokens_per_second"] == 4  # 12 / 3
    assert result["mixed_tokens_per_second"] == 2  # 12 / 6


def test_without_adapters_there_is_no_mixed_line(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(WORDS) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "mixed_tokens_per_second" not in result
    assert result["base_tokens_per_second"] > 0


def test_more_adapters_than_given(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--adapters", "1"]) == 2
    assert "adapters=1: 0 are given" in capsys.readouterr().err
