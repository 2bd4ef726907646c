"""Spans of calls: which headers say that a call is part of a trace."""

from __future__ import annotations

import pytest

from tests.support.span_world import CARRIED, SPAN_ID, TRACE_ID, KeptSpans

PARENT = (b"traceparent", CARRIED.encode())
OTHER = (b"traceparent", CARRIED.replace("b7ad", "c7ad").encode())


@pytest.mark.parametrize("headers", [[PARENT, OTHER], [PARENT, PARENT], [PARENT, (OTHER[0], b"")]])
def test_of_two_parents_neither_is_believed(headers: list[tuple[bytes, bytes]]) -> None:
    assert KeptSpans().spans.follow("GET", "/v1/tables", headers) is None


def test_a_state_may_come_in_several_headers() -> None:
    kept = KeptSpans()
    states = [(b"tracestate", b"one=1"), (b"x-other", b"?"), (b"tracestate", b"two=2,three=3")]

    call = kept.spans.follow("GET", "/v1/tables", [PARENT, *states])

    assert call is not None
    call.end(200)
    span, _ = kept.taken()
    assert span.context is not None
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (TRACE_ID, SPAN_ID)
    assert dict(span.parent.trace_state) == {"one": "1", "two": "2", "three": "3"}
