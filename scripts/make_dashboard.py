"""Write deploy/grafana/vexpert.json from the rows below: `python scripts/make_dashboard.py`."""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent.parent / "deploy" / "grafana" / "vexpert.json"
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
ONE = '{model_name=~"$model",instance=~"$instance"}'
ALL = '{instance=~"$instance"}'


def quantiles(name: str) -> list[tuple[str, str]]:
    """Median, p90 and p99 of a histogram, by (query, legend)."""
    rate = f"sum by (le) (rate(vllm:{name}_bucket{ONE}[$__rate_interval]))"
    shares = (("median", 0.5), ("p90", 0.9), ("p99", 0.99))
    return [(f"histogram_quantile({share}, {rate})", label) for label, share in shares]


def rate(name: str, labels: str = ONE, by: str = "") -> str:
    """Increase of a counter per second, summed."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({name}{labels}[$__rate_interval]))"


# (title, unit, [(query, legend)])
PANELS: list[tuple[str, str, list[tuple[str, str]]]] = [
    (
        "Tokens per second",
        "short",
        [
            (rate("vllm:generation_tokens_total"), "generated"),
            (rate("vllm:prompt_tokens_total"), "prompt"),
        ],
    ),
    (
        "Requests",
        "short",
        [
            (f"sum(vllm:num_requests_running{ONE})", "running"),
            (f"sum(vllm:num_requests_waiting{ONE})", "waiting"),
        ],
    ),
    ("KV cache in use", "percentunit", [(f"vllm:kv_cache_usage_perc{ONE}", "{{instance}}")]),
    ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
    ("Inter-token latency", "s", quantiles("inter_token_latency_seconds")),
    ("Whole request", "s", quantiles("e2e_request_latency_seconds")),
    (
        "Tokens per second by adapter",
        "short",
        [(rate("vexpert:adapter_generation_tokens_total", ALL, "adapter"), "{{adapter}}")],
    ),
    (
        "Completions per second by adapter",
        "short",
        [(rate("vexpert:adapter_requests_total", ALL, "adapter"), "{{adapter}}")],
    ),
    (
        "Completions per second by reason",
        "short",
        [(rate("vllm:request_success_total", ONE, "finished_reason"), "{{finished_reason}}")],
    ),
    (
        "Bytes of adapters by tier",
        "bytes",
        [
            (f"vexpert:adapter_tier_bytes{ALL}", "{{tier}} {{kind}}"),
        ],
    ),
    (
        "Adapters",
        "short",
        [(f"vexpert:adapters{ALL}", "{{tier}}")],
    ),
    (
        "Adapter reads and evictions per second",
        "short",
        [
            (rate("vexpert:adapter_loads_total", ALL), "reads"),
            (rate("vexpert:adapter_load_errors_total", ALL), "errors"),
            (rate("vexpert:adapter_evictions_total", ALL), "evictions"),
        ],
    ),
    (
        "Share of prompt tokens found in the prefix cache",
        "percentunit",
        [(f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}",
          "found")],
    ),
    ("Preemptions per second", "short", [(rate("vllm:num_preemptions_total"), "preempted")]),
    ("Steps per second", "short", [(rate("vexpert:engine_steps_total"), "steps")]),
]  # fmt: skip


def panel(index: int, title: str, unit: str, queries: list[tuple[str, str]]) -> dict[str, Any]:
    """One time series panel at the index's place in the grid."""
    source = {"type": "prometheus", "uid": "$datasource"}
    row, column = divmod(index, COLUMNS)
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "expr": query,
                "legendFormat": legend,
                "datasource": source,
            }
            for i, (query, legend) in enumerate(queries)
        ],
    }


def variable(name: str, label: str) -> dict[str, Any]:
    """A list of a label's values, to choose from."""
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "query": f"label_values(vllm:num_requests_running, {label})",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard() -> dict[str, Any]:
    """The file's content."""
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    return {
        "title": "vexpert",
        "uid": "vexpert",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "tags": ["vexpert"],
        "templating": {
            "list": [source, variable("model", "model_name"), variable("instance", "instance")]
        },
        "panels": [panel(i, *row) for i, row in enumerate(PANELS)],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
