"""A span for each request, sent to an OpenTelemetry collector; only with --otlp-traces-endpoint.

The spans' attributes are those that vLLM sends, so that dashboards keep working. A caller's
`traceparent` header makes the span a child of the caller's own.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vexpert.errors import ConfigError
from vexpert.server.progress import Update

if TYPE_CHECKING:
    from vexpert.server.generation import Job

NAME = "llm_request"
SERVICE = "vexpert"


class NoTrace:
    """Of a request that nobody traces."""

    def count(self, update: Update) -> None:
        """The request gained `update`."""

    def end(self, error: BaseException | None = None) -> None:
        """The request is over; called once or more, the first call counts."""


class Trace(NoTrace):
    """One request's span, open until `end`."""

    def __init__(self, span: Any) -> None:
        self._span = span
        self._began = time.perf_counter()
        self._tokens = 0
        self._is_open = True

    def count(self, update: Update) -> None:
        new = sum(len(delta.token_ids) for delta in update.deltas)
        if new and not self._tokens:
            seconds = time.perf_counter() - self._began
            self._span.set_attribute("gen_ai.latency.time_to_first_token", seconds)
        self._tokens += new

    def end(self, error: BaseException | None = None) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._span.set_attribute("gen_ai.usage.completion_tokens", self._tokens)
        self._span.set_attribute("gen_ai.latency.e2e", time.perf_counter() - self._began)
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        self._span.end()


class NoTraces:
    """A server without an endpoint."""

    def begin(self, headers: Mapping[str, str], job: "Job", model: str) -> NoTrace:
        """The trace of a request that starts now."""
        return NoTrace()

    def close(self) -> None:
        """Send what is left."""


class Traces(NoTraces):
    """Spans through `exporter`, in batches on a thread of its own."""

    def __init__(self, exporter: Any, batch: bool = True) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
        processor = BatchSpanProcessor(exporter) if batch else SimpleSpanProcessor(exporter)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SERVICE)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, headers: Mapping[str, str], job: "Job", model: str) -> NoTrace:
        from opentelemetry.trace import SpanKind

        params = job.params[0]
        span = self._tracer.start_span(
            NAME,
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.response.model": model,
                "gen_ai.request.id": job.request_id,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.n": params.n,
                "gen_ai.usage.prompt_tokens": sum(len(each.token_ids) for each in job.prompts),
                "vexpert.adapter": job.adapter or "",
            },
        )
        if params.max_tokens is not None:
            span.set_attribute("gen_ai.request.max_tokens", params.max_tokens)
        return Trace(span)

    def close(self) -> None:
        self._provider.shutdown()


def check_endpoint(endpoint: str | None) -> None:
    """ConfigError where the URL is none or the packages are missing."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_traces_endpoint={endpoint!r}: give a URL such as http://localhost:4318/v1/traces"
        )
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint: {error.name} is not installed; pip install 'vexpert[tracing]'"
        ) from error


def make_traces(endpoint: str | None) -> NoTraces:
    """The traces of a server that sends them to `endpoint`, an OTLP collector's URL over HTTP.

    ConfigError as `check_endpoint`.
    """
    check_endpoint(endpoint)
    if endpoint is None:
        return NoTraces()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Traces(OTLPSpanExporter(endpoint=endpoint))
