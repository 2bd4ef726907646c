"""Spans of calls and of rounds of work, by OpenTelemetry's library.

A call gets a span only if its headers name a recorded trace. The stages of the call become child
spans after the call has ended, so calls without a trace cost nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from streamhouse.core.threads import NamedThread
from streamhouse.core.traces.stages import Stages

__all__ = ["FollowedCall", "Spans", "exporting_spans"]

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_CARRIED: Final = (b"traceparent", b"tracestate")
_SERVER_ERRORS: Final = 500
_FLUSH_MS: Final = 2_000
_SAID_AGAIN_S: Final = 60.0


class FollowedCall:
    """One call within a trace; `end` the call once. `stages` collects its waiting times."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._start_ns = _start_ns(span)
        self.stages = Stages()
        self.error_code: str | None = None
        """The stable code of the error in the response."""

    def tell(self, name: str, value: str) -> None:
        """Set an attribute of the span."""
        self._span.set_attribute(name, value)

    def end(self, status: int) -> None:
        """End the span of a call with this response status; 0: the client went away."""
        span = self._span
        if status:
            span.set_attribute("http.response.status_code", status)
        if self.error_code is not None:
            span.set_attribute("error.type", self.error_code)
        if status >= _SERVER_ERRORS:
            span.set_status(Status(StatusCode.ERROR))
        _end(self._tracer, span, self.stages, self._start_ns)


class Spans:
    """Makes the spans of one process. Thread-safe."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("streamhouse", _release())

    @property
    def service_name(self) -> str:
        """The service name in the spans."""
        return str(self._provider.resource.attributes[SERVICE_NAME])

    def follow(
        self, method: str, route: str, headers: Iterable[tuple[bytes, bytes]]
    ) -> FollowedCall | None:
        """Begin the span of a call; None if the headers have no trace, or an unrecorded trace."""
        carried: dict[str, list[str]] = {}
        for name, value in headers:
            if name in _CARRIED:
                carried.setdefault(name.decode(), []).append(value.decode("latin-1"))
        # The standard ignores the header if there are two parents.
        if len(carried.get("traceparent", ())) != 1:
            return None
        parent = _PROPAGATOR.extract(carried)
        if not trace.get_current_span(parent).get_span_context().is_valid:
            return None
        span = self._tracer.start_span(
            f"{method} {route}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "http.route": route},
        )
        return FollowedCall(self._tracer, span) if span.is_recording() else None

    @contextlib.contextmanager
    def of_work(self, name: str, attributes: Mapping[str, str]) -> Iterator[Stages]:
        """Make a span of the work inside the block, including requests sent from the block."""
        span = self._tracer.start_span(name, attributes=attributes)
        start_ns, stages = _start_ns(span), Stages()
        try:
            with trace.use_span(span, end_on_exit=False):
                yield stages
        finally:
            _end(self._tracer, span, stages, start_ns)

    def close(self) -> None:
        """Export the waiting spans, for two seconds at most, and stop."""
        # Without a collector the exporter retries for longer than a process may take to stop.
        closing = NamedThread("traces", self._provider.shutdown)
        closing.start()
        closing.join(_FLUSH_MS / 1000)


def exporting_spans(service_name: str) -> Spans:
    """Return spans with an exporter configured by the variables of OpenTelemetry.

    Raises `ValueError` or `RuntimeError` for variables refused by the library.
    """
    logging.getLogger(OTLPSpanExporter.__module__).addFilter(_seldom)
    logging.getLogger("opentelemetry.util.re").addFilter(_without_values)
    resource = Resource.create({"service.version": _release()})
    if not _is_named():
        resource = resource.merge(Resource({SERVICE_NAME: service_name}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Spans(provider)


class _Seldom(logging.Filter):
    """Lets a line of code log once a minute: every failed export logs the same message."""

    def __init__(self) -> None:
        super().__init__()
        self._said_s: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        where, now_s = (record.pathname, record.lineno), time.monotonic()
        if now_s - self._said_s.get(where, -_SAID_AGAIN_S) < _SAID_AGAIN_S:
            return False
        self._said_s[where] = now_s
        return True


_seldom: Final = _Seldom()


def _without_values(record: logging.LogRecord) -> bool:
    """Hide the arguments of a log line: a header of the exporter is often a token."""
    if record.args:
        record.args = ("(not shown)",) * len(record.args)
    return True


def _is_named() -> bool:
    named = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return bool(os.environ.get("OTEL_SERVICE_NAME")) or f"{SERVICE_NAME}=" in named


def _start_ns(span: Span) -> int:
    started = getattr(span, "start_time", None)
    return started if isinstance(started, int) else 0


def _end(tracer: Tracer, span: Span, stages: Stages, start_ns: int) -> None:
    """End a span now, with a child span for each stage, all by one clock."""
    inside = trace.set_span_in_context(span)
    begin_s = stages.start_s

    def at(seconds: float) -> int:
        return start_ns + round((seconds - begin_s) * 1e9)

    for stage in stages.ended:
        child = tracer.start_span(stage.name, context=inside, start_time=at(stage.start_s))
        child.end(at(stage.end_s))
    if stages.left_out:
        span.set_attribute("streamhouse.stages_left_out", stages.left_out)
    span.end(at(time.perf_counter()))


def _release() -> str:
    try:
        return version("pyspark-streamhouse")
    except PackageNotFoundError:
        return "unknown"
