"""The metrics page: it parses, its names are vLLM's, its numbers are what happened."""

import time
from typing import Any

import pytest
from helpers_server import BASE, FakeEngine, RunningServer, serving
from helpers_wait import wait_for
from prometheus_client.parser import text_string_to_metric_families

from vexpert.engine.outputs import EngineStats
from vexpert.lora.types import AdapterInfo, TierUsage
from vexpert.server.adapter_labels import OTHERS, AdapterLabels
from vexpert.server.metrics import Metrics
from vexpert.server.progress import Tracker
from vexpert.server.recorder import Histogram, Recorder
from vexpert.server.status_line import status_line

pytest_plugins = ["helpers_server_fixtures"]
NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:lora_requests_info",
    "vexpert:engine_steps_total",
    "vexpert:adapter_requests_total",
    "vexpert:adapter_generation_tokens_total",
}


def samples(server: RunningServer) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    response = server.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k != "model_name")):
            sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }  # fmt: skip


def value(found: Any, name: str, **labels: str) -> float:
    return float(found[name, frozenset(labels.items())])


def test_numbers_follow_what_happened(fake: FakeEngine, fake_server: RunningServer) -> None:
    fake_server.ask(BASE, "hello")
    fake_server.ask("upper", "hello")
    fake_server.post("/v1/completions", json={"model": "upper", "prompt": "x" * 9, "max_tokens": 4})
    found = samples(fake_server)
    assert {name for name, _ in found} >= NAMES
    assert "vllm:engine_steps_total" not in {name for name, _ in found}  # it is none of vLLM's
    prompt = len("<user>hello\n<assistant>")
    assert value(found, "vllm:prompt_tokens_total") == 2 * prompt + 10
    assert value(found, "vllm:generation_tokens_total") == 6 + 6 + 4
    assert value(found, "vllm:request_success_total", finished_reason="stop") == 2
    assert value(found, "vllm:request_success_total", finished_reason="length") == 1
    assert value(found, "vllm:time_to_first_token_seconds_count") == 3
    assert value(found, "vllm:inter_token_latency_seconds_count") == 5 + 5 + 3
    assert value(found, "vllm:e2e_request_latency_seconds_count") == 3
    assert value(found, "vexpert:adapter_generation_tokens_total", adapter="upper") == 10
    assert value(found, "vexpert:adapter_generation_tokens_total", adapter="") == 6
    stops = value(found, "vexpert:adapter_requests_total", adapter="upper", finished_reason="stop")
    assert stops == 1


def test_a_prompt_that_was_left_before_its_turn_counts_nowhere() -> None:
    recorder = Recorder()
    tracker = Tracker("x", "a", 5, 1, lambda update: None, arrival=0.0)
    recorder.stepped(tracker, 0, now=1.0)
    recorder.finished(tracker, ["abort"], now=1.0)
    assert recorder.prompt_tokens.total() == 0
    for _ in range(3):
        recorder.stepped(tracker, 1, now=2.0)
    assert recorder.prompt_tokens == {"a": 5}


def test_running_adapters_and_aborts_show(fake: FakeEngine, fake_server: RunningServer) -> None:
    fake.held_at = 3  # it runs until its client leaves
    body = {"model": "upper", "prompt": "x", "ignore_eos": True, "max_tokens": 200, "stream": True}
    with fake_server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # dropped, it would close the response
        next(lines)
        found = samples(fake_server)
    assert value(found, "vllm:num_requests_running") == 1
    labels = {"running_lora_adapters": "upper", "waiting_lora_adapters": "", "max_lora": "8"}
    assert value(found, "vllm:lora_requests_info", **labels) > 1e9  # a time in seconds
    wait_for(lambda: not fake.requests)
    found = samples(fake_server)
    assert value(found, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(found, "vllm:num_requests_running") == 0


def test_a_histogram_counts_each_value_once() -> None:
    histogram = Histogram((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(seconds)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert histogram.total == pytest.approx(12.0)


def test_the_status_line_tells_rates() -> None:
    common = {"running_adapters": ("upper",), "waiting_adapters": (), "max_loras": 8}
    rest = {"prefix_hit_tokens": 0, "prefix_query_tokens": 0, "preemptions": 0}
    blocks = {"kv_blocks_total": 200, "kv_blocks_used": 25}
    shared: Any = common | rest | blocks
    before = EngineStats(1, 0, prompt_tokens=0, generation_tokens=100, steps=1, **shared)
    now = EngineStats(2, 3, prompt_tokens=40, generation_tokens=600, steps=9, **shared)
    assert status_line(before, now, 10.0) == (
        "running 2, waiting 3, prompt 4.0 tok/s, generation 50.0 tok/s, KV blocks 12.5%, "
        "adapters upper"
    )


def test_adapters_have_series_of_their_own_up_to_a_limit() -> None:
    labels = AdapterLabels(most=2)
    assert [labels.of(name) for name in ("a", None, "b", "c", "a")] == ["a", "", "b", OTHERS, "a"]
    assert labels.forget({"b", "c"}) == ["a"]
    assert [labels.of(name) for name in ("c", "a")] == ["c", OTHERS]


def test_counts_of_thousands_of_adapters_stay_few_and_add_up() -> None:
    recorder = Recorder(labels=AdapterLabels(most=3))
    for index in range(1000):
        tracker = Tracker(str(index), f"a{index}", 5, 1, lambda update: None, arrival=0.0)
        recorder.stepped(tracker, 2, now=1.5)
        recorder.finished(tracker, ["stop"], now=2.0)
    assert set(recorder.prompt_tokens) == {"a0", "a1", "a2", OTHERS}
    assert recorder.prompt_tokens.total() == 5000
    assert recorder.requests[OTHERS, "stop"] == 997
    usage = TierUsage(known=1000, device_bytes=10, device_used=8, device_payload=6, evictions=4)
    stats = EngineStats(
        *(0, 0, tuple(f"a{i}" for i in range(1000)), (), 8, 1, 0, 0, 0, 0, 0, 0, 0),
        adapters=usage,
        running_by_adapter={"a0": 2, "a7": 3, "a8": 1},
    )
    infos = [AdapterInfo(f"a{i}", 1, "", "host", 8, 64, 0, -1) for i in range(1000)]
    text = Metrics("base", recorder).page(stats, infos).decode()
    assert len(text.splitlines()) < 250
    found = {
        (sample.name, *(v for _, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["vexpert:adapter_requests_running", "a0"] == 2
    assert found["vexpert:adapter_requests_running", OTHERS] == 4
    assert found["vexpert:adapter_tier_bytes", "used", "device"] == 8
    assert found["vexpert:adapter_evictions_total",] == 4
    assert found["vexpert:adapter_bytes", "a1", "host"] == 64
    assert found["vexpert:adapter_time_to_first_token_seconds_sum", "a2"] == 1.5
    recorder.forget({"a1"})
    assert set(recorder.prompt_tokens) == {"a1", OTHERS}
    assert ("a0", "stop") not in recorder.requests
    text = Metrics("base", recorder).page(stats, infos).decode()  # a counter of all only grows
    assert 'vllm:request_success_total{finished_reason="stop",model_name="base"} 1000.0' in text


def test_an_idle_engine_is_checked_once(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vexpert.server.engine_loop.IDLE_CHECK", 0.02)
    with serving(fake) as server:
        wait_for(lambda: fake.integrity_checks == 1)
        server.ask(BASE, "hello")
        wait_for(lambda: fake.integrity_checks == 2)
        time.sleep(0.1)
        assert fake.integrity_checks == 2
