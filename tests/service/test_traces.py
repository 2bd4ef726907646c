"""A real service sends spans to a collector, and serves all the same where there is none."""

from __future__ import annotations

import gzip
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from streamhouse.client import StorageClient
from tests.support.service_process import ServiceProcess
from tests.support.span_world import CARRIED, KeptSpans

pytestmark = pytest.mark.slow

REFUSALS = 5
ROWS = pa.table({"id": [1, 2, 3]})


class Collector:
    """Takes spans over HTTP."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.status = 200
        self.has_many = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                if len(collector.requests) >= REFUSALS:
                    collector.has_many.set()
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def test_a_collector_gets_the_spans_of_a_callers_trace(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> None:
    data_dir = tmp_path_factory.mktemp("traced") / "data"
    kept = KeptSpans()
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    with (
        ServiceProcess(data_dir, env=environment) as service,
        StorageClient(service.endpoint) as client,
    ):
        client.create_table("t", ROWS.schema)
        with kept.tracer.start_as_current_span("of an application") as outer:
            client.append("t", ROWS)
        client.append("t", ROWS)

        assert service.terminate() == 0

    # On a busy machine they may go in several requests.
    found = [one for request in collector.requests for one in request.resource_spans]
    attributes = [{a.key: a.value.string_value for a in one.resource.attributes} for one in found]
    assert {one["service.name"] for one in attributes} == {"streamhouse"}
    spans = [span for one in found for scope in one.scope_spans for span in scope.spans]
    trace_id = outer.get_span_context().trace_id.to_bytes(16, "big")
    assert {span.trace_id for span in spans} == {trace_id}
    [append] = [s for s in spans if s.name == "POST /v1/tables/{path}/append"]
    assert append.parent_span_id == outer.get_span_context().span_id.to_bytes(8, "big")
    assert {"queue", "sync"} <= {s.name for s in spans if s.parent_span_id == append.span_id}


def test_without_a_collector_a_service_serves_and_stops(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> None:
    collector.close()
    data_dir = tmp_path_factory.mktemp("untraced") / "data"
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    with (
        ServiceProcess(data_dir, env=environment, stop_timeout_s=60) as service,
        StorageClient(service.endpoint) as client,
    ):
        client.create_table("t", ROWS.schema)
        with KeptSpans().tracer.start_as_current_span("of an application"):
            client.append("t", ROWS)

        assert service.terminate() == 0


def test_a_collector_that_refuses_and_callers_that_lie_do_not_fill_the_log(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> None:
    collector.status = 400
    data_dir = tmp_path_factory.mktemp("refused") / "data"
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "1",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1",
    }
    begun_s = time.monotonic()
    with ServiceProcess(data_dir, env=environment) as service:
        headers = {"traceparent": CARRIED, "tracestate": "a forged; event=audit"}
        for _ in range(REFUSALS):
            request = urllib.request.Request(f"{service.endpoint}/v1/tables", headers=headers)
            with urllib.request.urlopen(request) as answer:
                assert answer.status == 200
        assert collector.has_many.wait(60)

        assert service.terminate() == 0
        log = service.log_text()

    minutes = 1 + (time.monotonic() - begun_s) // 60
    assert 1 <= log.count("Failed to export") <= minutes
    assert "forged" not in log
