"""When a process makes spans: only when the standard variables ask for them."""

from __future__ import annotations

import logging
import sys

import pytest

from streamhouse.core.traces.exporter_settings import opened_spans, why_no_spans

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_SERVICE_NAME": "mine"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "True"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nobody_has_asked(environ: dict[str, str]) -> None:
    assert why_no_spans(environ) == ""


@pytest.mark.parametrize(
    "environ",
    [
        ENDPOINT,
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"},
        {"OTEL_TRACES_EXPORTER": "otlp"},
        {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
        {
            **ENDPOINT,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        },
    ],
)
def test_spans_are_made(environ: dict[str, str]) -> None:
    assert why_no_spans(environ) is None


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        (
            {"OTEL_TRACES_EXPORTER": "zipkin"},
            "OTEL_TRACES_EXPORTER is 'zipkin', and only otlp or none is known",
        ),
        (
            {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "the OTLP protocol is 'grpc', and only http/protobuf is known",
        ),
    ],
)
def test_what_cannot_be_had_is_a_line_of_the_log(
    environ: dict[str, str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    with caplog.at_level(logging.WARNING), opened_spans("streamhouse") as spans:
        assert spans is None

    assert why in caplog.text


def test_without_the_extra_a_process_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)

    with caplog.at_level(logging.WARNING), opened_spans("streamhouse") as spans:
        assert spans is None

    assert "pip install 'pyspark-streamhouse[otel]'" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-1"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "10"),
        ("OTEL_ATTRIBUTE_COUNT_LIMIT", "many"),
        ("OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER", "nobody"),
    ],
)
def test_with_a_variable_that_is_refused_a_process_goes_on(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv(name, value)

    with caplog.at_level(logging.WARNING), opened_spans("streamhouse") as spans:
        assert spans is None

    assert "a variable of OpenTelemetry: " in caplog.text


def test_a_header_for_the_collector_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization: Bearer correct-horse")

    with caplog.at_level(logging.WARNING), opened_spans("streamhouse") as spans:
        assert spans is not None

    assert "Header format invalid" in caplog.text
    assert "correct-horse" not in caplog.text
