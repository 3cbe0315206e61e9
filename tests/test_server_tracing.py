"""Spans of requests, as a collector receives them."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from helpers_server import BASE, make_fake_engine, serving

from vexpert.cli.main import main
from vexpert.errors import ConfigError
from vexpert.server.options import ServerOptions
from vexpert.server.tracing import NoTraces, make_traces

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(BaseHTTPRequestHandler):
    """Keeps the spans that are posted to it."""

    spans: list[Any]

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        sent = ExportTraceServiceRequest.FromString(body)
        for resource in sent.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    spans: list[Any] = []
    handler = type("Handler", (Collector,), {"spans": spans})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        finally:
            server.shutdown()
            thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes
    }


def test_each_request_is_a_span() -> None:
    with collector() as (url, spans):
        options = ServerOptions((BASE,), status_interval=None, otlp_traces_endpoint=url)
        with serving(make_fake_engine(), options) as server:
            body: dict[str, Any] = {"model": "upper", "prompt": "hey", "max_tokens": 5}
            server.post("/v1/completions", json=body, headers={"traceparent": PARENT})
            chat = {"messages": [{"role": "user", "content": "abc"}], "temperature": 0.5}
            server.post("/v1/chat/completions", json={"model": BASE, "stream": True, **chat})
            assert server.post("/v1/completions", json={**body, "model": "no"}).status_code == 404
    assert [span.name for span in spans] == ["llm_request"] * 3
    # They come in the order of their ends, each of which is beside the next request's begin.
    plain, streamed, refused = sorted(spans, key=lambda span: span.start_time_unix_nano)
    assert plain.trace_id.hex() == PARENT.split("-")[1]
    assert plain.parent_span_id.hex() == PARENT.split("-")[2]
    found = attributes(plain)
    assert found["vexpert.adapter"] == found["gen_ai.response.model"] == "upper"
    assert found["gen_ai.usage.prompt_tokens"] == 4
    assert found["gen_ai.usage.completion_tokens"] == 4  # H, E, Y and the end
    assert found["gen_ai.request.max_tokens"] == 5
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert plain.status.code == 0
    assert streamed.parent_span_id == b""
    assert attributes(streamed)["vexpert.adapter"] == ""
    assert attributes(streamed)["gen_ai.request.temperature"] == 0.5
    assert attributes(streamed)["gen_ai.usage.completion_tokens"] > 0
    assert refused.status.code == 2
    assert "no" in refused.status.message


def test_without_an_endpoint_nothing_is_traced() -> None:
    assert type(make_traces(None)) is NoTraces


def test_a_bad_endpoint_is_refused_at_boot(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="give a URL"):
        make_traces("localhost:4318")
    assert main(["serve", "--otlp-traces-endpoint", "localhost:4318"]) == 2
    assert "give a URL such as http://localhost:4318/v1/traces" in capsys.readouterr().err
