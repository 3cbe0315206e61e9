"""Metrics of the adapters' tiers, and of single adapters under a bounded number of labels."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    SummaryMetricFamily,
)

from vexpert.engine.outputs import EngineStats
from vexpert.lora.info import AdapterInfo, TierUsage
from vexpert.server.adapter_labels import OTHERS
from vexpert.server.recorder import Recorder


def adapter_families(
    stats: EngineStats, infos: list[AdapterInfo], recorder: Recorder
) -> Iterator[Any]:
    """All families, for prometheus_client."""
    yield from _tiers(stats.adapters)
    yield from _requests(stats, recorder)
    yield from _residence(infos, recorder)
    summary = SummaryMetricFamily(
        "vexpert:adapter_time_to_first_token_seconds",
        "Arrival to first token, by adapter",
        labels=["adapter"],
    )
    for label, count in list(recorder.first_tokens.items()):
        summary.add_metric([label], count, recorder.first_token_seconds[label])
    yield summary


def _tiers(usage: TierUsage) -> Iterator[Any]:
    bytes_of = GaugeMetricFamily(
        "vexpert:adapter_tier_bytes",
        "Bytes of adapters: budget, in use, and payload without padding",
        labels=["tier", "kind"],
    )
    for tier, kind, value in (
        ("device", "budget", usage.device_bytes),
        ("device", "used", usage.device_used),
        ("device", "payload", usage.device_payload),
        ("host", "budget", usage.host_bytes),
        ("host", "used", usage.host_used),
    ):
        bytes_of.add_metric([tier, kind], value)
    yield bytes_of
    count = GaugeMetricFamily(
        "vexpert:adapters", "Adapters by name, in a tier, or being read", labels=["tier"]
    )
    for tier, value in (
        ("known", usage.known),
        ("device", usage.device_adapters),
        ("host", usage.host_adapters),
        ("loading", usage.loading),
    ):
        count.add_metric([tier], value)
    yield count
    for name, help, total in (
        ("loads", "Adapters read and packed", usage.loads),
        ("load_seconds", "Time that took", usage.load_seconds),
        ("load_errors", "Adapters that could not be read", usage.errors),
        ("evictions", "Adapters that left the device for others", usage.evictions),
    ):
        family = CounterMetricFamily(f"vexpert:adapter_{name}", help)
        family.add_metric([], total)
        yield family


def _requests(stats: EngineStats, recorder: Recorder) -> Iterator[Any]:
    for name, help, counts in (
        ("running", "Completions that run", stats.running_by_adapter),
        ("waiting", "Completions that wait", stats.waiting_by_adapter),
    ):
        family = GaugeMetricFamily(
            f"vexpert:adapter_requests_{name}", f"{help}, by adapter", labels=["adapter"]
        )
        own = recorder.labels.own()
        for label, count in _by_label(counts, own).items():
            family.add_metric([label], count)
        yield family


def _residence(infos: list[AdapterInfo], recorder: Recorder) -> Iterator[Any]:
    """Of the adapters with a label of their own: bytes in each tier, loads, evictions."""
    sizes = GaugeMetricFamily(
        "vexpert:adapter_bytes", "Bytes of one adapter in a tier", labels=["adapter", "tier"]
    )
    loads = CounterMetricFamily(
        "vexpert:adapter_reads", "Reads of the present version", labels=["adapter"]
    )
    evictions = CounterMetricFamily(
        "vexpert:adapter_device_evictions", "Of the present version", labels=["adapter"]
    )
    own = recorder.labels.own()
    for info in infos:
        if info.name in own and info.state != "draining":
            sizes.add_metric([info.name, "device"], info.device_bytes)
            sizes.add_metric([info.name, "host"], info.host_bytes)
            loads.add_metric([info.name], info.loads)
            evictions.add_metric([info.name], info.evictions)
    yield from (sizes, loads, evictions)


def _by_label(counts: dict[str, int], own: frozenset[str]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for name, count in counts.items():
        found[name if name in own else OTHERS] += count
    return found
