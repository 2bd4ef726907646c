"""What a client's request says of the span that its caller is in."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from opentelemetry.trace.span import TraceState

from streamhouse.core.traces.carried import carried_headers
from tests.support.span_world import CARRIED, SPAN_ID, TRACE_ID, UNSAMPLED


def _in_span(*, flags: int = 1, state: TraceState | None = None) -> str:
    context = SpanContext(
        TRACE_ID, SPAN_ID, is_remote=False, trace_flags=TraceFlags(flags), trace_state=state
    )
    with trace.use_span(NonRecordingSpan(context)):
        return carried_headers()


def test_outside_of_a_span_nothing_is_said() -> None:
    assert carried_headers() == ""


def test_the_active_span_is_named() -> None:
    assert _in_span() == f"traceparent: {CARRIED}\r\n"
    assert _in_span(flags=0) == f"traceparent: {UNSAMPLED}\r\n"


def test_what_vendors_add_is_passed_on() -> None:
    state = TraceState([("congo", "t61rcWkgMzE"), ("rojo", "00f067aa0ba902b7")])

    assert _in_span(state=state) == (
        f"traceparent: {CARRIED}\r\ntracestate: congo=t61rcWkgMzE,rojo=00f067aa0ba902b7\r\n"
    )


def test_what_is_too_long_is_left_out() -> None:
    state = TraceState([(f"vendor{n}", "x" * 200) for n in range(5)])

    assert _in_span(state=state) == f"traceparent: {CARRIED}\r\n"


@pytest.mark.slow
def test_a_client_does_not_load_the_library() -> None:
    """Nor does a process that makes none: nothing is paid for what nobody has asked for."""
    program = (
        "import sys, streamhouse.api.client, streamhouse.client as c\n"
        "from streamhouse.core.traces.carried import carried_headers\n"
        "assert carried_headers() == ''\n"
        "assert 'opentelemetry.trace' not in sys.modules\n"
        "import streamhouse.storage_service.server.listener\n"
        "assert 'opentelemetry.sdk' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
