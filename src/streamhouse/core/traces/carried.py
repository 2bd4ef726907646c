"""Trace headers of a client's request, from the active span of the caller.

This module never imports OpenTelemetry: without an import by the caller, no span can be active.
"""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["carried_headers"]

# The number of characters which every implementation must propagate.
_TRACESTATE_MAX: Final = 512


def carried_headers() -> str:
    """Return the header lines `traceparent` and `tracestate`, or "" outside of any span."""
    api = sys.modules.get("opentelemetry.trace")
    # Another thread may be in the middle of the import.
    get_current_span = getattr(api, "get_current_span", None)
    if get_current_span is None:
        return ""
    span = get_current_span().get_span_context()
    if not span.is_valid:
        return ""
    lines = f"traceparent: 00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}\r\n"
    state = span.trace_state.to_header()
    if state and len(state) <= _TRACESTATE_MAX and state.isascii() and state.isprintable():
        lines += f"tracestate: {state}\r\n"
    return lines
