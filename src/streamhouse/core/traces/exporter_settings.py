"""Whether a process exports spans, decided only by the standard variables of OpenTelemetry.

The variables also name the destination. A request can neither change the destination nor switch
spans on.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from streamhouse.core.extras import MissingExtraError, require

if TYPE_CHECKING:
    from streamhouse.core.traces.spans import Spans

__all__ = ["opened_spans", "why_no_spans"]

_logger = logging.getLogger(__name__)

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL: Final = "http/protobuf"


@contextlib.contextmanager
def opened_spans(service_name: str) -> Iterator[Spans | None]:
    """Yield the process's spans, or None; the exit exports waiting spans for a short time.

    A missing library or a bad variable is logged, and the process works without spans.
    """
    reason = why_no_spans(os.environ)
    if reason is not None:
        if reason:
            _logger.warning("event=no_traces why=%r", reason)
        yield None
        return
    try:
        require("otel", "traces (OTEL_EXPORTER_OTLP_ENDPOINT is set)")
    except MissingExtraError as error:
        _logger.warning("event=no_traces why=%r", str(error))
        yield None
        return
    from streamhouse.core.traces.spans import exporting_spans  # noqa: PLC0415 - OpenTelemetry is an extra

    try:
        spans = exporting_spans(service_name)
    except (OSError, RuntimeError, ValueError) as error:
        # OpenTelemetry replaces most malformed values by a default, but not all.
        _logger.warning("event=no_traces why=%r", f"a variable of OpenTelemetry: {error}")
        yield None
        return
    _logger.info("event=traces service_name=%s", spans.service_name)
    try:
        yield spans
    finally:
        spans.close()


def why_no_spans(environ: Mapping[str, str]) -> str | None:
    """Return why no spans are made, "" if spans are not configured; None if spans are made."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if exporter == "none" or not (exporter or any(environ.get(name) for name in _ENDPOINTS)):
        return ""
    if exporter not in ("", "otlp"):
        return f"OTEL_TRACES_EXPORTER is '{exporter[:40]}', and only otlp or none is known"
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), _PROTOCOL)
    if protocol != _PROTOCOL:
        return f"the OTLP protocol is '{protocol[:40]}', and only {_PROTOCOL} is known"
    return None
