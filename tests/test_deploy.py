"""deploy/: metrics that are graphed exist, options that are given exist, probes and times fit."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers_server import BASE, RunningServer, make_fake_engine, serving

from vexpert.cli.main import build_parser
from vexpert.server.options import ServerOptions

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
METRIC = re.compile(r"\b(?:vllm|vexpert):\w+")
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "vexpert.yaml").read_text()))
RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())["groups"][0]["rules"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def manifest(kind: str) -> Any:
    (found,) = [one for one in MANIFESTS if one["kind"] == kind]
    return found


def container() -> Any:
    (found,) = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(make_fake_engine()) as running:
        running.ask("upper", "hello")
        yield running


@pytest.fixture(scope="module")
def series(server: RunningServer) -> dict[str, str]:
    """The labels of the first sample of each name on the metrics page."""
    found: dict[str, str] = {}
    for line in server.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            found.setdefault(name, labels)
    return found


def dashboard() -> Any:
    return json.loads((DEPLOY / "grafana" / "vexpert.json").read_text())


def test_each_metric_of_the_dashboard_exists(series: dict[str, str]) -> None:
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    assert len(queries) > 15
    for query in queries:
        assert query.count("(") == query.count(")")
        for name, labels in re.findall(r"((?:vllm|vexpert):\w+)\{([^}]*)\}", query):
            assert name in series
            for label in re.findall(r"(\w+)=~", labels):
                # `instance` is Prometheus' own.
                assert label == "instance" or f'{label}="' in series[name]
        for label in re.findall(r"by \((\w+)\)", query):
            assert f'{label}="' in series[METRIC.findall(query)[0]]
    shown = set(METRIC.findall(" ".join(queries)))
    page = {name for name in series if re.match(r"vllm:\w+(?<!_sum)(?<!_count)$", name)}
    assert page - shown == {"vllm:lora_requests_info"}  # for gateways


def test_the_dashboard_is_what_its_script_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import make_dashboard

    assert make_dashboard.FILE.read_text() == make_dashboard.text()


def test_each_metric_of_the_rules_exists(series: dict[str, str]) -> None:
    assert len(RULES) >= 5
    for rule in RULES:
        names = METRIC.findall(rule["expr"])
        assert set(names) <= set(series)
        assert names or rule["expr"].startswith("up{")
        for flag in re.findall(r"--[a-z-]+", str(rule.get("annotations"))):
            build_parser().parse_args(["serve", flag, "1"])
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    assert jobs["scrape_configs"][0]["job_name"] == "vexpert"


def test_the_servers_options_exist(tmp_path: Path) -> None:
    data = manifest("ConfigMap")["data"]
    (tmp_path / "serve.yaml").write_text(data["serve.yaml"])
    words = container()["args"]
    at = words.index("--config") + 1
    mounts = {mount["mountPath"] for mount in container()["volumeMounts"]}
    assert words[at] in mounts
    args = build_parser().parse_args([*words[:at], str(tmp_path / "serve.yaml"), *words[at + 1 :]])
    assert args.host == "0.0.0.0"
    assert args.port == container()["ports"][0]["containerPort"]
    assert args.api_key_file.startswith("/etc/vexpert/keys/")
    assert Path(args.api_key_file).name in manifest("Secret")["stringData"]


def test_grace_is_longer_than_what_the_server_takes() -> None:
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    sleep = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    served = yaml.safe_load(manifest("ConfigMap")["data"]["serve.yaml"])["shutdown-timeout"]
    assert pod["terminationGracePeriodSeconds"] >= sleep + served + 10


def test_probes_ask_what_the_server_answers(server: RunningServer) -> None:
    probes = {name: container()[name]["httpGet"] for name in container() if name.endswith("Probe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/health",
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }
    for probe in probes.values():
        assert probe["port"] == container()["ports"][0]["name"]
        assert server.get(probe["path"]).status_code == 200


def test_no_scrape_is_told_that_would_lack_a_key() -> None:
    options = ServerOptions((BASE,), api_keys=("secret",), status_interval=None)
    with serving(make_fake_engine(), options) as keyed:
        assert keyed.get("/metrics").status_code == 401
    config = yaml.safe_load(manifest("ConfigMap")["data"]["serve.yaml"])
    assert "api-key-file" in config
    assert "prometheus.io/scrape" not in manifest("Service")["metadata"].get("annotations", {})
    assert "credentials_file" in (DEPLOY / "prometheus" / "prometheus.yaml").read_text()


def test_the_image_starts_a_server() -> None:
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)
    (words,) = re.findall(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE)
    assert json.loads(entry) == ["vexpert"]
    args = build_parser().parse_args(json.loads(words))
    assert (args.command, args.host) == ("serve", "0.0.0.0")
    assert f"EXPOSE {args.port}" in DOCKERFILE
    kept = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    ]
    copied = re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    assert sorted(" ".join(copied).split()) == sorted(kept)
    assert all((ROOT / name).exists() for name in kept)
    extras = re.findall(r"EXTRAS=([a-z,]+)", DOCKERFILE)
    told = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert len(extras) == 2
    assert all(set(one.split(",")) <= told for one in extras)
