"""A page of a bucket's log as text: JSON, NDJSON, or a server-sent event for browsers.

An event's id has the next offset of every bucket. Browsers send the id back as `Last-Event-ID`
when they reconnect, and the subscription goes on from these offsets.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.text.rows_as_json import joined, row_texts, with_change_names
from streamhouse.storage_service.server.http.http_exchange import ARROW_STREAM, HttpExchange

__all__ = ["LogForm", "TextPage", "accepted_form", "event", "event_positions"]


class LogForm(enum.Enum):
    """The format of an answer with rows of a log."""

    ARROW = ARROW_STREAM
    JSON = b"application/json"
    NDJSON = b"application/x-ndjson"
    EVENTS = b"text/event-stream"


_FETCHED: Final = {form.value: form for form in (LogForm.ARROW, LogForm.JSON, LogForm.NDJSON)}


def accepted_form(exchange: HttpExchange) -> LogForm:
    """Return the format that the `Accept` header names, Arrow by default."""
    named = exchange.accepted(_FETCHED)
    return LogForm.ARROW if named is None else _FETCHED[named]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPage:
    """Rows of a bucket from `first_offset` on, and the first and last offsets of the log."""

    table_id: int
    bucket: int
    first_offset: int
    next_offset: int
    log_start_offset: int
    high_watermark: int
    fingerprint: str | None
    batches: Sequence[pa.RecordBatch]
    written_us: Sequence[tuple[int, int]]
    """The first offset of each batch, and the time of its write."""

    def pieces(self, form: LogForm) -> list[bytes | memoryview]:
        """Return the page as text."""
        texts = [row_texts(with_change_names(batch)) for batch in self.batches]
        if form is LogForm.NDJSON:
            lines = [memoryview(joined(part, separator="\n")) for part in texts if len(part)]
            return [piece for line in lines for piece in (line, b"\n")] or [b""]
        fields: dict[str, Any] = {
            "table_id": self.table_id,
            "bucket": self.bucket,
            "first_offset": self.first_offset,
            "next_offset": self.next_offset,
            "log_start_offset": self.log_start_offset,
            "high_watermark": self.high_watermark,
            "written_us": self.written_us,
        }
        if self.fingerprint is not None:
            fields["fingerprint"] = self.fingerprint
        head = json.dumps(fields)[:-1] + ', "rows": ['
        rows = [memoryview(joined(part, separator=", ")) for part in texts if len(part)]
        parts = [piece for text in rows for piece in (b", ", text)][1:]
        return [head.encode(), *parts, b"]}"]


def event(
    kind: str,
    table_id: int,
    positions: Mapping[int, int],
    fingerprints: Mapping[int, str],
    data: Sequence[bytes | memoryview],
) -> list[bytes | memoryview]:
    """Return an event; after the event a reader of the table is at `positions`.

    `data` must have no newline.
    """
    reached = {
        str(bucket): [offset, fingerprints[bucket]] if bucket in fingerprints else offset
        for bucket, offset in positions.items()
    }
    place = json.dumps({"table_id": table_id, "offsets": reached})
    head = f"id: {place}\nevent: {kind}\ndata: "
    return [head.encode(), *data, b"\n\n"]


def event_positions(text: str) -> dict[str, str]:
    """Return the parameters of a subscription that goes on after the event with this id."""
    try:
        place = json.loads(text)
        positions = {
            bucket: reached if isinstance(reached, list) else [reached]
            for bucket, reached in place["offsets"].items()
        }
        table_id = str(place["table_id"])
        start = {bucket: reached[0] for bucket, reached in positions.items()}
        fingerprints = {
            bucket: reached[1] for bucket, reached in positions.items() if len(reached) > 1
        }
    except (
        ValueError,
        AttributeError,
        KeyError,
        TypeError,
        IndexError,
        RecursionError,
    ) as error:
        raise InvalidRequestError(
            f"header Last-Event-ID = '{text[:80]}' is no id of an event of a subscription"
        ) from error
    return {
        "start": json.dumps(start),
        "fingerprints": json.dumps(fingerprints),
        "table_id": table_id,
    }
