"""The metrics page: it parses, its names are vLLM's, its numbers are what happened."""

from typing import Any

import pytest
from helpers_server import BASE, FakeEngine, RunningServer, wait_for
from prometheus_client.parser import text_string_to_metric_families

from vexpert.engine.outputs import EngineStats
from vexpert.server.recorder import Histogram
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


def test_running_adapters_and_aborts_show(fake: FakeEngine, fake_server: RunningServer) -> None:
    fake.step_seconds = 0.02
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
