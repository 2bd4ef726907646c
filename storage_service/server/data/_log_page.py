"""A page of a bucket's log as pieces of an Arrow stream or text, for fetch and subscribe."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from streamhouse.core.model.identity import Same
from streamhouse.core.model.table import TableInfo
from streamhouse.core.wire.arrow_body import (
    BatchAddress,
    encode_fetch_body,
    encode_payload,
    project_payload,
)
from streamhouse.storage_service.engine.open_table import ReadableTable
from streamhouse.storage_service.log.readable_log import ReadableLog
from streamhouse.storage_service.log.segments.segment import StoredBatch
from streamhouse.storage_service.server._request_service import LogRequestService
from streamhouse.storage_service.server.data._log_text import LogForm, TextPage, event
from streamhouse.storage_service.server.http.http_exchange import ARROW_STREAM, HttpExchange

__all__ = ["ARROW_STREAM", "LogPage", "LogReader", "as_views"]

# Writing rows as text takes so many times longer than reading them.
_TEXT_WEIGHT: Final = 16


class LogPage(NamedTuple):
    """The `pieces` of a page, the counts, and the first offset of the next page."""

    pieces: Sequence[bytes | memoryview]
    next_offset: int
    row_count: int
    byte_count: int
    fingerprints: Mapping[int, str] = {}
    """The log's fingerprint at `next_offset`, by bucket; for text, if rows may be lost."""


class LogReader:
    """Reads some columns of a table's log for a request, in a fixed version of the schema.

    Rows of other versions are converted. Event loop only.
    """

    def __init__(
        self,
        exchange: HttpExchange,
        service: LogRequestService,
        table: ReadableTable[ReadableLog],
        *,
        columns: Sequence[str] | None,
        schema_id: int,
        form: LogForm = LogForm.ARROW,
    ) -> None:
        self._exchange = exchange
        self._service = service
        self._table = table
        self._columns = columns
        self._schema_id = schema_id
        self._form = form
        # Bucket -> the log's fingerprint at the end of the last page, if rows may be lost.
        self._fingerprints: dict[int, str] = {}
        self._schema = table.log_schema_of(schema_id)
        self._page_schema = self._schema
        if columns is not None:
            self._page_schema = _projected_schema(Same(self._schema), tuple(columns))

    async def page(self, bucket: int, *, offset: int, end: int, bytes_max: int) -> LogPage:
        """Read the stored batches with rows of [offset, end); the page may be empty.

        The page counts as an answer of the request and is read once answer memory is free. Small
        reads run on the event loop: a hand-over to a thread costs more than a small read.
        """
        service, tablet = self._service, self._table.tablet(bucket)
        seen = {bucket: (tablet.log_start_offset, tablet.high_watermark)}
        # All arguments are bound here, so the function runs on any thread.
        read = functools.partial(
            self._read, self._table.info, tablet, bucket, offset, end, bytes_max, seen
        )

        weight = 1 if self._form is LogForm.ARROW else _TEXT_WEIGHT

        async def build(expected: int) -> LogPage:
            is_small = is_at_hand and expected * weight <= service.config.inline_bytes_max
            return read() if is_small else await service.run_blocking(read)

        is_at_hand = tablet.is_at_hand(end)
        estimate = min(tablet.bytes_estimate(end - offset), bytes_max)
        return await service.answers.build(self._exchange, estimate, build)

    def heartbeat(self, positions: Mapping[int, int]) -> list[bytes | memoryview]:
        """Return a page without rows, with the first and last offsets of the buckets."""
        seen = self._seen(positions)
        if self._form is LogForm.EVENTS:
            data = json.dumps({str(bucket): ends for bucket, ends in seen.items()}).encode()
            return self._event("positions", positions, [data])
        return as_views(encode_fetch_body(self._page_schema, [], positions=seen))

    def pushed(self, page: LogPage, positions: Mapping[int, int]) -> Sequence[bytes | memoryview]:
        """Return a page in the form of a subscription, with `positions` after the page."""
        if self._form is not LogForm.EVENTS:
            return page.pieces
        self._fingerprints.update(page.fingerprints)
        return self._event("rows", positions, page.pieces)

    def _event(
        self, kind: str, positions: Mapping[int, int], data: Sequence[bytes | memoryview]
    ) -> list[bytes | memoryview]:
        return event(kind, self._table.info.table_id, positions, self._fingerprints, data)

    def _seen(self, buckets: Iterable[int]) -> dict[int, tuple[int, int]]:
        tablets = {bucket: self._table.tablet(bucket) for bucket in buckets}
        return {b: (log.log_start_offset, log.high_watermark) for b, log in tablets.items()}

    def _read(
        self,
        info: TableInfo,
        tablet: ReadableLog,
        bucket: int,
        offset: int,
        end: int,
        bytes_max: int,
        positions: Mapping[int, tuple[int, int]],
    ) -> LogPage:
        stored = []
        if offset < end:
            stored = tablet.read(offset, bytes_max=bytes_max, end_offset=end)
        if self._form is not LogForm.ARROW:
            return self._text_page(info, tablet, bucket, offset, end, stored, positions[bucket])
        batches: list[tuple[BatchAddress, pa.Buffer | memoryview]] = []
        for frame in stored:
            address = BatchAddress(
                bucket=bucket,
                base_offset=frame.base_offset,
                row_count=frame.row_count,
                timestamp_us=frame.timestamp_us,
                schema_id=frame.schema_id,
            )
            batches.append((address, self._payload(frame, info)))
        next_offset = stored[-1].end_offset if stored else offset
        reached: dict[int, tuple[int, str]] = {}
        if self._service.may_lose_rows:
            fingerprint = tablet.fingerprint(next_offset)
            if fingerprint is not None:
                reached[bucket] = (next_offset, fingerprint.hex())
        pieces = as_views(
            encode_fetch_body(self._page_schema, batches, positions=positions, reached=reached)
        )
        return LogPage(
            pieces=pieces,
            next_offset=next_offset,
            row_count=sum(frame.row_count for frame in stored),
            byte_count=sum(len(piece) for piece in pieces),
        )

    def _text_page(
        self,
        info: TableInfo,
        tablet: ReadableLog,
        bucket: int,
        offset: int,
        end: int,
        stored: Sequence[StoredBatch],
        ends: tuple[int, int],
    ) -> LogPage:
        """Return exactly the stored rows of [offset, end) as text."""
        batches, written_us = [], []
        next_offset = offset
        for frame in stored:
            first, next_offset = max(offset, frame.base_offset), min(end, frame.end_offset)
            written_us.append((first, frame.timestamp_us))
            rows = self._rows(frame, info)
            batches.append(rows.slice(first - frame.base_offset, next_offset - first))
        fingerprint_bytes = tablet.fingerprint(next_offset) if self._service.may_lose_rows else None
        fingerprint = None if fingerprint_bytes is None else fingerprint_bytes.hex()
        page = TextPage(
            table_id=info.table_id,
            bucket=bucket,
            first_offset=offset,
            next_offset=next_offset,
            log_start_offset=ends[0],
            high_watermark=ends[1],
            fingerprint=fingerprint,
            batches=batches,
            written_us=written_us,
        )
        pieces = page.pieces(self._form)
        return LogPage(
            pieces=pieces,
            next_offset=next_offset,
            row_count=sum(batch.num_rows for batch in batches),
            byte_count=sum(len(piece) for piece in pieces),
            fingerprints={} if fingerprint is None else {bucket: fingerprint},
        )

    def _rows(self, frame: StoredBatch, info: TableInfo) -> pa.RecordBatch:
        """Return the frame's rows with the requested columns and schema version."""
        return self._table.rows_of(frame, info, schema_id=self._schema_id, columns=self._columns)

    def _payload(self, frame: StoredBatch, info: TableInfo) -> pa.Buffer | memoryview:
        """Return the frame's payload with the requested columns and schema version.

        A payload that already has both is returned unchanged.
        """
        if frame.schema_id == self._schema_id:
            if self._columns is None:
                return frame.payload
            return project_payload(frame.payload, self._schema, self._columns)
        return encode_payload(self._rows(frame, info))


# Callers get the same object each time, so that values cached by schema are found again.
@functools.lru_cache(maxsize=64)
def _projected_schema(schema: Same, columns: Sequence[str]) -> pa.Schema:
    return pa.schema([schema.value.field(name) for name in columns])


def as_views(pieces: Sequence[pa.Buffer | memoryview | bytes]) -> list[bytes | memoryview]:
    """Return `pieces` in types that a socket accepts, without copying."""
    return [p if isinstance(p, bytes) else memoryview(p).cast("B") for p in pieces]
