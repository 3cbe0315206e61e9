"""The metrics page, in Prometheus' text format, under the names users of vLLM watch."""

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from vexpert.engine.outputs import EngineStats
from vexpert.lora.info import AdapterInfo
from vexpert.server.adapter_labels import MAX_LABELS
from vexpert.server.adapter_metrics import adapter_families
from vexpert.server.recorder import Histogram, Recorder


class Metrics:
    """A Prometheus collector: numbers are read when the page is asked for, not kept twice."""

    def __init__(self, model_name: str, recorder: Recorder) -> None:
        self._model_name = model_name
        self._recorder = recorder
        self._stats: EngineStats | None = None
        self._infos: list[AdapterInfo] = []
        self._restarts, self._is_answered = 0, True
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def page(
        self,
        stats: EngineStats | None,
        infos: list[AdapterInfo],
        restarts: int = 0,
        is_answered: bool = True,
    ) -> bytes:
        """The page for `stats`, adapters with a label of their own, and the recorder's counts.

        `is_answered`: the engine just told `stats`; else they are older, None where it never did.
        """
        self._stats, self._infos = stats, infos
        self._restarts, self._is_answered = restarts, is_answered
        return bytes(generate_latest(self._registry))

    def describe(self) -> list[Any]:
        """No names in advance: some depend on an engine's statistics."""
        return []

    def collect(self) -> Iterator[Any]:
        """Every metric family, for prometheus_client."""
        yield from self._server()
        yield from self._requests()
        yield from self._per_adapter()
        if self._stats is not None:
            yield from self._engine(self._stats)
            yield self._adapters(self._stats)
            yield from adapter_families(self._stats, self._infos, self._recorder)

    def _server(self) -> Iterator[Any]:
        restarts = CounterMetricFamily("vexpert:engine_restarts", "Starts of a failed engine anew")
        restarts.add_metric([], self._restarts)
        yield restarts
        answers = GaugeMetricFamily(
            "vexpert:engine_answers", "1: figures of the engine are of now; 0: it did not answer"
        )
        answers.add_metric([], self._is_answered)
        yield answers

    def _engine(self, stats: EngineStats) -> Iterator[Any]:
        used = stats.kv_blocks_used / max(stats.kv_blocks_total, 1)
        yield self._gauge(
            "num_requests_running", "Requests in the running batch", stats.num_running
        )
        yield self._gauge("num_requests_waiting", "Requests that wait", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", used)
        for name, help, value in (
            ("prompt_tokens", "Prompt tokens processed", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated", stats.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up", stats.prefix_query_tokens),
            ("prefix_cache_hits", "Prompt tokens found", stats.prefix_hit_tokens),
            ("num_preemptions", "Requests preempted", stats.preemptions),
        ):
            yield self._counter(f"vllm:{name}", help, value)
        yield self._counter("vexpert:engine_steps", "Steps run", stats.steps)

    def _counter(self, name: str, help: str, value: float) -> Any:
        family = CounterMetricFamily(name, help, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _gauge(self, name: str, help: str, value: float) -> Any:
        family = GaugeMetricFamily(f"vllm:{name}", help, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _adapters(self, stats: EngineStats) -> Any:
        labels = ["running_lora_adapters", "waiting_lora_adapters", "max_lora"]
        family = GaugeMetricFamily(
            "vllm:lora_requests_info", "Adapters of running and waiting requests", labels=labels
        )
        # Gateways read the names of this label; thousands of them would be no label any more.
        running = ",".join(stats.running_adapters[:MAX_LABELS])
        waiting = ",".join(stats.waiting_adapters[:MAX_LABELS])
        family.add_metric([running, waiting, str(stats.max_loras)], time.time())
        return family

    def _requests(self) -> Iterator[Any]:
        by_reason = {"stop": 0, "length": 0, "abort": 0} | self._recorder.ended
        family = CounterMetricFamily(
            "vllm:request_success",
            "Completions ended, by reason",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in by_reason.items():
            family.add_metric([self._model_name, reason], count)
        yield family
        for name, help, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token", self._recorder.first_token),
            ("inter_token_latency_seconds", "Token to token", self._recorder.between_tokens),
            ("e2e_request_latency_seconds", "Arrival to end", self._recorder.whole_request),
        ):
            yield self._histogram(name, help, histogram)

    def _histogram(self, name: str, help: str, histogram: Histogram) -> Any:
        family = HistogramMetricFamily(f"vllm:{name}", help, labels=["model_name"])
        family.add_metric([self._model_name], histogram.cumulative(), histogram.total)
        return family

    def _per_adapter(self) -> Iterator[Any]:
        requests = CounterMetricFamily(
            "vexpert:adapter_requests",
            "Completions ended, by adapter; an empty name is the base model",
            labels=["adapter", "finished_reason"],
        )
        for (adapter, reason), count in list(self._recorder.requests.items()):
            requests.add_metric([adapter, reason], count)
        yield requests
        for name, help, counts in (
            ("prompt_tokens", "Prompt tokens processed", self._recorder.prompt_tokens),
            ("generation_tokens", "Tokens generated", self._recorder.generation_tokens),
        ):
            family = CounterMetricFamily(
                f"vexpert:adapter_{name}", f"{help}, by adapter", labels=["adapter"]
            )
            for adapter, count in list(counts.items()):
                family.add_metric([adapter], count)
            yield family
