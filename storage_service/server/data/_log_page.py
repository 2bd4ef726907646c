"""One page of a bucket's log as the pieces of one Arrow stream; fetch and subscribe send them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from streamhouse.core.model.identity import Same
from streamhouse.core.model.schema_change import read_stored
from streamhouse.core.model.table import TableInfo
from streamhouse.core.wire.arrow_body import (
    BatchAddress,
    decode_payload,
    encode_fetch_body,
    encode_payload,
    project_payload,
)
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.log.log_tablet import LogTablet
from streamhouse.storage_service.log.segments.segment import StoredBatch
from streamhouse.storage_service.server.data._log_text import LogForm, TextPage, event
from streamhouse.storage_service.server.http.http_exchange import ARROW_STREAM, HttpExchange
from streamhouse.storage_service.server.service import Service

__all__ = ["ARROW_STREAM", "LogPage", "LogReader", "as_views"]

# So much longer than reading rows does writing them as text take.
_TEXT_WEIGHT: Final = 16


class LogPage(NamedTuple):
    """`pieces` of one Arrow stream, what they hold, and where the next page starts."""

    pieces: Sequence[bytes | memoryview]
    next_offset: int
    row_count: int
    byte_count: int
    fingerprints: Mapping[int, str] = {}
    """Of the text of a bucket, if that is said: its log's where the next page starts."""


class LogReader:
    """What one request reads of a table's log: these columns, in one version of the schema.

    Rows come in that version, whichever they were written with. Event loop only.
    """

    def __init__(
        self,
        exchange: HttpExchange,
        service: Service,
        table: OpenTable,
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
        # Of each bucket, if that is said: the log's fingerprint where the last page ended.
        self._fingerprints: dict[int, str] = {}
        self._schema = table.log_schema_of(schema_id)
        self._page_schema = self._schema
        if columns is not None:
            self._page_schema = _projected(Same(self._schema), tuple(columns))

    async def page(self, bucket: int, *, offset: int, end: int, bytes_max: int) -> LogPage:
        """Read the stored batches that hold rows of [offset, end); empty if there are none.

        The page is counted as an answer of the request, and read once there is room for it. Small
        reads happen right here: handing them to a thread costs more than they do.
        """
        service, tablet, seen = self._service, self._table.tablet(bucket), self._seen([bucket])
        # Complete in itself, so that it runs on any thread.
        read = functools.partial(
            self._read, self._table.info, tablet, bucket, offset, end, bytes_max, seen
        )

        weight = 1 if self._form is LogForm.ARROW else _TEXT_WEIGHT

        async def build(expected: int) -> LogPage:
            is_small = expected * weight <= service.config.inline_bytes_max
            return read() if is_small else await service.run_blocking(read)

        estimate = min(tablet.bytes_estimate(end - offset), bytes_max)
        return await service.answers.build(self._exchange, estimate, build)

    def heartbeat(self, positions: Mapping[int, int]) -> list[bytes | memoryview]:
        """Return a page without rows: where these buckets begin and end."""
        seen = self._seen(positions)
        if self._form is LogForm.EVENTS:
            data = json.dumps({str(bucket): ends for bucket, ends in seen.items()}).encode()
            return self._event("positions", positions, [data])
        return as_views(encode_fetch_body(self._page_schema, [], positions=seen))

    def pushed(self, page: LogPage, positions: Mapping[int, int]) -> Sequence[bytes | memoryview]:
        """Return a page as a subscription sends it, which is at `positions` then."""
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
        tablet: LogTablet,
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
        if self._service.manager.may_lose_rows:
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
        tablet: LogTablet,
        bucket: int,
        offset: int,
        end: int,
        stored: Sequence[StoredBatch],
        ends: tuple[int, int],
    ) -> LogPage:
        """Return exactly the rows of [offset, end) that are stored."""
        batches = []
        next_offset = offset
        for frame in stored:
            first, next_offset = max(offset, frame.base_offset), min(end, frame.end_offset)
            batches.append(
                self._rows(frame, info).slice(first - frame.base_offset, next_offset - first)
            )
        found = tablet.fingerprint(next_offset) if self._service.manager.may_lose_rows else None
        fingerprint = None if found is None else found.hex()
        page = TextPage(
            table_id=info.table_id,
            bucket=bucket,
            first_offset=offset,
            next_offset=next_offset,
            log_start_offset=ends[0],
            high_watermark=ends[1],
            fingerprint=fingerprint,
            batches=batches,
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
        """Return the frame's rows as they were asked for."""
        if frame.schema_id == self._schema_id:
            rows = decode_payload(frame.payload, self._schema)
        else:
            rows = read_stored(
                frame.payload, info, stored_as=frame.schema_id, wanted=self._schema_id
            )
        return rows if self._columns is None else rows.select(list(self._columns))

    def _payload(self, frame: StoredBatch, info: TableInfo) -> pa.Buffer | memoryview:
        """Return the frame's payload as it was asked for, untouched where it is that already."""
        if frame.schema_id == self._schema_id:
            if self._columns is None:
                return frame.payload
            return project_payload(frame.payload, self._schema, self._columns)
        return encode_payload(self._rows(frame, info))


# The same object each time: what is worked out of it is remembered, too.
@functools.lru_cache(maxsize=64)
def _projected(schema: Same, columns: Sequence[str]) -> pa.Schema:
    return pa.schema([schema.value.field(name) for name in columns])


def as_views(pieces: Sequence[pa.Buffer | memoryview | bytes]) -> list[bytes | memoryview]:
    """Return `pieces` as what a socket takes, without copying."""
    return [p if isinstance(p, bytes) else memoryview(p).cast("B") for p in pieces]
