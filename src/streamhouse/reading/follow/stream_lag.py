"""The lag of a stream: the figures of its progress, and a log line for each micro-batch."""

from __future__ import annotations

import ast
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.offsets import offsets_from_json

__all__ = [
    "LAG_MEMBER",
    "LOG_LEVEL_VARIABLE",
    "NEWEST_MEMBER",
    "StreamLag",
    "lag",
    "log_batch",
    "show_if_wanted",
]

LOG_LEVEL_VARIABLE: Final = "STREAMHOUSE_LOG_LEVEL"
LAG_MEMBER: Final = "lag_ms"
"""Of the newest end in a progress: the age of the oldest row that was not read, lately."""
NEWEST_MEMBER: Final = "newest"
"""Of an end: the table's newest end, from a Spark before 4.2, which does not ask for it."""

_logger = logging.getLogger("streamhouse.stream")
_BUCKETS_SHOWN_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class StreamLag:
    """The lag of a query's source behind the source's table.

    `seconds` is the age of the oldest unread row, 0 if all rows are read; None before the service
    has answered the first report.
    """

    table: str
    rows: int
    seconds: float | None


def lag(progress: Any) -> list[StreamLag]:
    """Return how far each Streamhouse source of a query was behind after a micro-batch.

    Args:
        progress: `query.lastProgress`, a `StreamingQueryProgress` of a listener, or such a
            progress as dictionary or JSON text. None, before the first one, has no sources.
    """
    if progress is None:
        return []
    if isinstance(progress, str):
        progress = _parsed(progress)
    try:
        sources = progress["sources"]
    except (TypeError, KeyError) as error:
        raise InvalidRequestError(
            f"lag takes query.lastProgress, which has sources, not {type(progress).__name__}"
        ) from error
    lags = (_of_source(source) for source in sources)
    return [source_lag for source_lag in lags if source_lag is not None]


def _of_source(source: Mapping[str, Any]) -> StreamLag | None:
    end, latest = _parsed(source.get("endOffset")), _parsed(source.get("latestOffset"))
    if not _is_ours(end):
        return None
    latest = end.get(NEWEST_MEMBER, latest)
    read = offsets_from_json(end["offsets"])
    newest = offsets_from_json(latest["offsets"]) if _is_ours(latest) else read
    rows = sum(max(0, newest[bucket] - read.get(bucket, 0)) for bucket in newest)
    seconds = 0.0 if not rows else None
    if rows and (lag_ms := latest.get(LAG_MEMBER)) is not None:
        seconds = lag_ms / 1_000
    return StreamLag(table=str(end.get("table", "")), rows=rows, seconds=seconds)


def _is_ours(offset: Any) -> bool:
    return isinstance(offset, Mapping) and {"version", "table_id", "offsets"} <= offset.keys()


def _parsed(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        # Spark before 4.2 shows an offset as Python's text of a dictionary.
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None


def log_batch(
    table: str,
    start: Mapping[int, int],
    end: Mapping[int, int],
    *,
    latest: Mapping[int, int],
    lag_ms: int | None,
) -> None:
    """Log one micro-batch: table and offsets, rows, and remaining rows.

    The process in which Spark runs a source has no handler for logs. The process gets a handler for
    stderr if the environment variable STREAMHOUSE_LOG_LEVEL names a level that shows the line.
    """
    show_if_wanted(_logger)
    if not _logger.isEnabledFor(logging.INFO):
        return
    read = {bucket: offset - start.get(bucket, 0) for bucket, offset in end.items()}
    moved = [bucket for bucket, rows in sorted(read.items()) if rows]
    ranges = [f"{b}:{start.get(b, 0)}-{end[b]}" for b in moved[:_BUCKETS_SHOWN_MAX]]
    remainder = "" if len(moved) <= _BUCKETS_SHOWN_MAX else f",+{len(moved) - _BUCKETS_SHOWN_MAX}"
    lag_rows = sum(max(0, latest[bucket] - end.get(bucket, 0)) for bucket in latest)
    # What the service said of the lag it said before these rows were read.
    if not lag_rows:
        lag_ms = 0
    _logger.info(
        "event=micro_batch table=%s offsets=%s%s rows=%d lag_rows=%d lag_ms=%s",
        table,
        ",".join(ranges),
        remainder,
        sum(read.values()),
        lag_rows,
        "unknown" if lag_ms is None else lag_ms,
    )


def show_if_wanted(logger: logging.Logger) -> None:
    """Let a logger without handlers write to stderr, if the environment asks for its level."""
    level_name = os.environ.get(LOG_LEVEL_VARIABLE, "").strip().upper()
    if not level_name or logger.hasHandlers() or level_name not in logging.getLevelNamesMapping():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level_name)
