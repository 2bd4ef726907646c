"""Spans that are kept in memory, and the headers of a caller that is in one."""

from __future__ import annotations

from typing import Final

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from streamhouse.core.traces.spans import Spans

__all__ = ["CARRIED", "SPAN_ID", "TRACE_ID", "UNSAMPLED", "KeptSpans", "names"]

TRACE_ID: Final = 0x0AF7651916CD43DD8448EB211C80319C
SPAN_ID: Final = 0xB7AD6B7169203331
CARRIED: Final = f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01"
UNSAMPLED: Final = CARRIED[:-1] + "0"


class KeptSpans:
    """What makes spans, and those that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")
        self.spans = Spans(provider)

    def taken(self) -> tuple[ReadableSpan, list[ReadableSpan]]:
        """Return the one span that has ended since the last call, and its children in order."""
        ended = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        *children, whole = ended
        assert whole.context is not None
        for child in children:
            assert child.parent is not None
            assert child.parent.span_id == whole.context.span_id
        return whole, children

    def count(self) -> int:
        """How many have ended."""
        return len(self._exporter.get_finished_spans())


def names(spans: list[ReadableSpan]) -> list[str]:
    """Return what the spans are called."""
    return [span.name for span in spans]
