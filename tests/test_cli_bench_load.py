"""What `vexpert bench serve` sends: names by popularity, arrivals, and the picture of a run."""

import json
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers_server import BASE, NAMES, RunningServer

from vexpert.cli.bench.load import POPULARITIES, arrival_times, bodies, names_asked
from vexpert.cli.main import main

pytest_plugins = ["helpers_server_fixtures"]
TEN = [f"adapter-{i}" for i in range(10)]


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_names_are_drawn_by_popularity(popularity: str) -> None:
    asked = names_asked(TEN, popularity, 4000, seed=3)
    assert asked == names_asked(TEN, popularity, 4000, seed=3)
    counts = [count for _, count in Counter(asked).most_common()]
    if popularity == "identical":
        assert counts == [4000]
        return
    assert len(counts) == 10
    if popularity == "distinct":
        assert set(counts) == {400}
        assert len(set(asked[:10])) == 10
    if popularity == "uniform":
        assert 300 < counts[-1] <= counts[0] < 500
    if popularity == "zipf":  # shares in proportion to 1, 2 ** -1.5, ...: 0.501, 0.177, ...
        assert counts[0] / 4000 == pytest.approx(0.501, abs=0.03)
        assert counts[1] / 4000 == pytest.approx(0.177, abs=0.03)


def test_another_seed_makes_another_name_popular() -> None:
    first = {names_asked(TEN, "identical", 1, seed)[0] for seed in range(20)}
    assert len(first) > 4


def test_arrivals_are_poisson() -> None:
    times = arrival_times(50.0, 20_000, seed=1)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert times[0] == 0.0
    assert mean == pytest.approx(1 / 50, rel=0.03)
    assert spread == pytest.approx(mean**2, rel=0.06)  # as an exponential's
    assert arrival_times(float("inf"), 3, seed=1) == [0.0] * 3


def test_prompts_are_of_the_length_asked_for_and_share_no_prefix() -> None:
    made = bodies(TEN, vocab_size=500, input_len=7, output_len=3, seed=0)
    prompts = {tuple(body["prompt"]) for body in made}
    assert {len(prompt) for prompt in prompts} == {7}
    assert len({prompt[:3] for prompt in prompts}) == 10
    assert all(0 <= token < 500 for prompt in prompts for token in prompt)


def test_a_run_tells_each_model_and_draws_itself(
    server: RunningServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.png"
    words = ["bench", "serve", "--url", server.url, "--num-prompts", "20", "--output-len", "6"]
    words += ["--request-rate", "100", "--popularity", "distinct", "--plot", str(picture)]
    begun = time.perf_counter()
    assert main(words) == 0
    took = time.perf_counter() - begun
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert {name: row["completed"] for name, row in result["models"].items()} == dict.fromkeys(
        [BASE, *NAMES], 4
    )
    assert all(row["p99_ttft_ms"] >= row["median_ttft_ms"] > 0 for row in result["models"].values())
    assert result["popularity"] == "distinct"
    assert result["request_rate"] == 100
    assert 0.04 < result["duration"] < took
    assert "Request rate configured (RPS):          100.00" in captured.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(picture.read_bytes()) > 10_000
    assert captured.err == ""  # no progress bar where there is no terminal


@pytest.mark.parametrize(
    ("file", "told"), [("run.svg", "ends in .png"), ("no/such/run.png", "no folder")]
)
def test_a_picture_that_could_not_be_kept(
    file: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9", "--plot", file]) == 2
    assert told in capsys.readouterr().err


def test_a_plot_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["bench", "serve", "--plot", "x.png"]) == 2
    assert "vexpert[plots]" in capsys.readouterr().err


def test_an_unknown_name_is_refused_before_the_run(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "serve", "--url", server.url, "--num-prompts", "2", "--output-len", "2"]
    assert main([*words, "--models", "upper", "nobody"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: models=['nobody']: the server knows [")
    assert captured.out == ""
    assert main([*words, "--models", f"{BASE}:upper"]) == 0


def test_a_failed_request_is_exit_code_1(
    server: RunningServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_too_long(*args: Any) -> list[dict[str, Any]]:
        first, *others = bodies(*args)
        return [first | {"max_tokens": 10**6}, *others]

    monkeypatch.setattr("vexpert.cli.bench.serve.bodies", one_too_long)
    words = ["bench", "serve", "--url", server.url, "--num-prompts", "3", "--output-len", "2"]
    assert main(words) == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["completed"], result["failed"]) == (2, 1)
