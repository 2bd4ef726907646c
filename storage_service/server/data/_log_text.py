"""A page of a bucket's log as text: JSON, NDJSON, or an event that a browser takes.

An event's id says where every bucket goes on after it: sent back as `Last-Event-ID`, which a
browser does by itself, a subscription goes on there.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.text.json_text import joined, row_texts
from streamhouse.storage_service.server.http.http_exchange import ARROW_STREAM, HttpExchange

__all__ = ["LogForm", "TextPage", "event", "event_positions", "wanted_form"]

_CHANGES: Final = pa.array([None, "+I", "-U", "+U", "-D"])


class LogForm(enum.Enum):
    """What an answer of rows of a log is."""

    ARROW = ARROW_STREAM
    JSON = b"application/json"
    NDJSON = b"application/x-ndjson"
    EVENTS = b"text/event-stream"


_FETCHED: Final = {form.value: form for form in (LogForm.ARROW, LogForm.JSON, LogForm.NDJSON)}


def wanted_form(exchange: HttpExchange) -> LogForm:
    """Return what a request for rows that are there asks for: Arrow, unless it says otherwise."""
    named = exchange.accepted(_FETCHED)
    return LogForm.ARROW if named is None else _FETCHED[named]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPage:
    """Rows of one bucket from `first_offset` on, and where its log begins and ends."""

    table_id: int
    bucket: int
    first_offset: int
    next_offset: int
    log_start_offset: int
    high_watermark: int
    fingerprint: str | None
    batches: Sequence[pa.RecordBatch]

    def pieces(self, form: LogForm) -> list[bytes | memoryview]:
        """Return it as text."""
        texts = [row_texts(_with_change_names(batch)) for batch in self.batches]
        if form is LogForm.NDJSON:
            lines = [memoryview(joined(part, separator="\n")) for part in texts if len(part)]
            return [piece for line in lines for piece in (line, b"\n")] or [b""]
        said: dict[str, int | str] = {
            "table_id": self.table_id,
            "bucket": self.bucket,
            "first_offset": self.first_offset,
            "next_offset": self.next_offset,
            "log_start_offset": self.log_start_offset,
            "high_watermark": self.high_watermark,
        }
        if self.fingerprint is not None:
            said["fingerprint"] = self.fingerprint
        head = json.dumps(said)[:-1] + ', "rows": ['
        rows = [memoryview(joined(part, separator=", ")) for part in texts if len(part)]
        parts = [piece for text in rows for piece in (b", ", text)][1:]
        return [head.encode(), *parts, b"]}"]


def _with_change_names(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows whose change types are the names that an upsert takes."""
    position = rows.schema.get_field_index(CHANGE_TYPE_COLUMN)
    if position < 0 or not pa.types.is_integer(rows.schema.field(position).type):
        return rows
    names = _CHANGES.take(rows.column(position))
    return rows.set_column(position, CHANGE_TYPE_COLUMN, names)


def event(
    kind: str,
    table_id: int,
    positions: Mapping[int, int],
    fingerprints: Mapping[int, str],
    data: Sequence[bytes | memoryview],
) -> list[bytes | memoryview]:
    """Return one event, after which a reader of the table is at `positions`.

    There is no newline in `data`.
    """
    reached = {
        str(bucket): [offset, fingerprints[bucket]] if bucket in fingerprints else offset
        for bucket, offset in positions.items()
    }
    place = json.dumps({"table_id": table_id, "offsets": reached})
    head = f"id: {place}\nevent: {kind}\ndata: "
    return [head.encode(), *data, b"\n\n"]


def event_positions(text: str) -> dict[str, str]:
    """Return the id of an event as parameters of a subscription that goes on after it."""
    try:
        place = json.loads(text)
        found = {
            bucket: reached if isinstance(reached, list) else [reached]
            for bucket, reached in place["offsets"].items()
        }
        table_id = str(place["table_id"])
        start = {bucket: reached[0] for bucket, reached in found.items()}
        said = {bucket: reached[1] for bucket, reached in found.items() if len(reached) > 1}
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
    return {"start": json.dumps(start), "fingerprints": json.dumps(said), "table_id": table_id}
