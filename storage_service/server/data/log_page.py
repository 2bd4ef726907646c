"""One page of a bucket's log as the pieces of one Arrow stream; fetch and subscribe send them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.log.log_tablet import LogTablet
from streamhouse.storage_service.log.segment import StoredBatch
from streamhouse.storage_service.model.identity import Same
from streamhouse.storage_service.model.schema_change import read_stored
from streamhouse.storage_service.model.table import TableInfo
from streamhouse.storage_service.server.http.http_exchange import ARROW_STREAM, HttpExchange
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.wire.arrow_body import (
    BatchAddress,
    encode_fetch_body,
    encode_payload,
    project_payload,
)

__all__ = ["ARROW_STREAM", "LogPage", "as_views", "projected_schema", "read_page"]


class LogPage(NamedTuple):
    """`pieces` of one Arrow stream, what they hold, and where the next page starts."""

    pieces: Sequence[bytes | memoryview]
    next_offset: int
    row_count: int
    byte_count: int


async def read_page(
    exchange: HttpExchange,
    service: Service,
    table: OpenTable,
    bucket: int,
    *,
    offset: int,
    end: int,
    bytes_max: int,
    columns: Sequence[str] | None,
    schema_id: int,
) -> LogPage:
    """Read the stored batches that hold rows of [offset, end); empty if there are none.

    Rows come in version `schema_id` of the schema, whichever they were written with. The page is
    counted as an answer of `exchange`, and read once there is room for it. Small reads happen right
    here: handing them to a thread costs more than they do.
    """
    tablet = table.tablet(bucket)
    request = _Read(
        tablet=tablet,
        bucket=bucket,
        offset=offset,
        end=end,
        bytes_max=bytes_max,
        table=table.info,
        schema_id=schema_id,
        schema=table.log_schema_of(schema_id),
        columns=columns,
        positions={bucket: (tablet.log_start_offset, tablet.high_watermark)},
    )

    async def build(expected: int) -> tuple[LogPage, int]:
        is_small = expected <= service.config.inline_bytes_max
        page = _read(request) if is_small else await service.run_blocking(_read, request)
        return page, page.byte_count

    estimate = min(_bytes_estimate(tablet, end - offset), bytes_max)
    return await service.answers.build(exchange, estimate, build)


def _bytes_estimate(tablet: LogTablet, row_count: int) -> int:
    rows = tablet.log_end_offset - tablet.log_start_offset
    return tablet.size_bytes * row_count // max(rows, 1)


class _Read(NamedTuple):
    """One read of one bucket's log, complete in itself, so that it runs on any thread."""

    tablet: LogTablet
    bucket: int
    offset: int
    end: int
    bytes_max: int
    table: TableInfo
    schema_id: int
    schema: pa.Schema
    columns: Sequence[str] | None
    positions: Mapping[int, tuple[int, int]]


def _read(request: _Read) -> LogPage:
    stored = []
    if request.offset < request.end:
        stored = request.tablet.read(
            request.offset, bytes_max=request.bytes_max, end_offset=request.end
        )
    batches: list[tuple[BatchAddress, pa.Buffer | memoryview]] = []
    for frame in stored:
        address = BatchAddress(
            bucket=request.bucket,
            base_offset=frame.base_offset,
            row_count=frame.row_count,
            timestamp_us=frame.timestamp_us,
            schema_id=frame.schema_id,
        )
        batches.append((address, _payload(frame, request)))
    schema = projected_schema(request.schema, request.columns)
    pieces = as_views(encode_fetch_body(schema, batches, positions=request.positions))
    return LogPage(
        pieces=pieces,
        next_offset=stored[-1].end_offset if stored else request.offset,
        row_count=sum(frame.row_count for frame in stored),
        byte_count=sum(len(piece) for piece in pieces),
    )


def _payload(frame: StoredBatch, request: _Read) -> pa.Buffer | memoryview:
    """Return the frame's payload as it was asked for, untouched where it is that already."""
    if frame.schema_id == request.schema_id:
        if request.columns is None:
            return frame.payload
        return project_payload(frame.payload, request.schema, request.columns)
    rows = read_stored(
        frame.payload, request.table, stored_as=frame.schema_id, wanted=request.schema_id
    )
    if request.columns is not None:
        rows = rows.select(list(request.columns))
    return encode_payload(rows)


def projected_schema(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Return the schema of only `columns`, in their order; None means all."""
    return schema if columns is None else _projected(Same(schema), tuple(columns))


# The same object each time: what is worked out of it is remembered, too.
@functools.lru_cache(maxsize=64)
def _projected(schema: Same, columns: Sequence[str]) -> pa.Schema:
    return pa.schema([schema.value.field(name) for name in columns])


def as_views(pieces: Sequence[pa.Buffer | memoryview | bytes]) -> list[bytes | memoryview]:
    """Return `pieces` as what a socket takes, without copying."""
    return [p if isinstance(p, bytes) else memoryview(p).cast("B") for p in pieces]
