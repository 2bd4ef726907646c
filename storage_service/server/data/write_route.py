"""POST .../append: one Arrow IPC stream in, one commit unit, an answer once it is durable."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.engine.open_table import LogTable
from streamhouse.storage_service.errors import (
    BucketNotFoundError,
    InvalidRequestError,
    SchemaMismatchError,
    UnsupportedError,
)
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.model.bucketing import (
    buckets_for_rows,
    split_by_bucket,
    split_evenly,
)
from streamhouse.storage_service.model.lake_limits import LakeLimits
from streamhouse.storage_service.model.schema_change import version_of
from streamhouse.storage_service.model.table import TableInfo
from streamhouse.storage_service.server.http.http_exchange import HttpExchange
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.wire.arrow_body import (
    decode_append_body,
    encode_payload,
    peek_schema,
)
from streamhouse.storage_service.wire.request_stream import RequestBatch

__all__ = ["AppendRequest", "answer_append", "routed_batches", "writer_id_of", "written_version"]

_WRITER_ID: Final = re.compile(r"[0-9a-fA-F]{1,16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendRequest:
    """What routing needs to know besides the body; plain values, so that it runs on any thread."""

    table: TableInfo
    schema_id: int
    writer_id: int
    spread_first_bucket: int
    config: ServiceConfig


async def answer_append(exchange: HttpExchange, service: Service, *, path: str) -> None:
    """Append the request's rows; they are durable and visible when the answer is sent.

    A client that goes away after its body arrived does not undo the append.
    """
    table = service.table(path)
    config = service.config
    writer_id = writer_id_of(exchange, exchange.query(["writer_id"]).get("writer_id"))
    if not isinstance(table, LogTable):
        raise UnsupportedError(
            f"table '{table.path}' has a primary key: upsert rows instead of appending them"
        )
    async with service.rows_body(exchange) as body:
        request = AppendRequest(
            table=table.info,
            schema_id=written_version(body, table.info),
            writer_id=writer_id,
            spread_first_bucket=table.next_spread_bucket(1),
            config=config,
        )
        if len(body) > config.inline_bytes_max:
            batches = await service.run_blocking(routed_batches, body, request)
        else:
            batches = routed_batches(body, request)
        appended = await service.manager.append(table, batches)
    service.metrics.appended_rows.inc(sum(batch.row_count for batch in batches))
    await exchange.answer_json(
        {
            "buckets": {str(b): [start, end] for b, (start, end) in appended.ranges.items()},
            "timestamp_us": appended.timestamp_us,
        }
    )


def writer_id_of(exchange: HttpExchange, text: str | None) -> int:
    """Read the parameter `writer_id`; 0 without one."""
    if text is None:
        return 0
    if not _WRITER_ID.fullmatch(text) or int(text, 16) == 0:
        raise InvalidRequestError(
            f"{exchange.path}: writer_id must be 1 to 16 hexadecimal digits and not 0"
        )
    return int(text, 16)


def written_version(body: bytes, table: TableInfo) -> int:
    """Return the version of the table's schema that a body's rows have; the current if unclear."""
    if len(table.schema_versions) == 1:
        return table.schema_id
    given = peek_schema(body)
    return table.schema_id if given is None else version_of(table, given)


def routed_batches(body: bytes, request: AppendRequest) -> list[RoutedBatch]:
    """Decode and check the body; return its batches, each with its bucket. On any thread."""
    config = request.config
    parts = decode_append_body(
        body,
        request.table.schema_version(request.schema_id),
        table=str(request.table.path),
        rows_max=config.append_rows_max,
        batch_bytes_max=config.batch_bytes_max,
        batches_max=config.append_batches_max,
    )
    table = request.table
    limits = LakeLimits.of_table(table, request.schema_id)
    routed: list[RoutedBatch] = []
    for part in parts:
        _check_sequence(part, request)
        limits.check(part.batch, table=str(table.path))
        if part.bucket is None:
            routed.extend(_split(part, request))
        else:
            _check_bucket(part, part.bucket, request)
            routed.append(
                RoutedBatch(
                    bucket=part.bucket,
                    row_count=part.batch.num_rows,
                    payload=part.payload,
                    schema_id=request.schema_id,
                    writer_id=request.writer_id,
                    sequence=part.sequence,
                )
            )
    return routed


def _check_sequence(part: RequestBatch, request: AppendRequest) -> None:
    table = request.table.path
    if bool(part.sequence) != bool(request.writer_id):
        raise InvalidRequestError(
            f"append to '{table}': a batch with a sequence needs the parameter writer_id, and with"
            " writer_id every batch needs a sequence from 1 on"
        )
    if part.sequence and part.bucket is None:
        raise InvalidRequestError(
            f"append to '{table}': a batch with a sequence must name its bucket, because sequences"
            " count per bucket"
        )


def _check_bucket(part: RequestBatch, bucket: int, request: AppendRequest) -> None:
    table = request.table
    count = table.bucket_count
    if not 0 <= bucket < count:
        raise BucketNotFoundError(
            f"table '{table.path}' has no bucket {bucket}; its buckets are 0..{count - 1}"
        )
    key = table.bucket_key_of(request.schema_id)
    if not key or count == 1:
        return
    # A row in a bucket that is not its own would break the lake's partitioning for ever.
    wrong = (buckets_for_rows(part.batch, key, count) != bucket).nonzero()[0]
    if len(wrong):
        raise SchemaMismatchError(
            f"append to '{table.path}': row {int(wrong[0])} of the batch for bucket {bucket}"
            f" belongs to another bucket by the bucket key {', '.join(key)}"
        )


def _split(part: RequestBatch, request: AppendRequest) -> list[RoutedBatch]:
    table, config = request.table, request.config
    key = table.bucket_key_of(request.schema_id)
    if key:
        rows = split_by_bucket(part.batch, key, table.bucket_count)
    else:
        rows = split_evenly(
            part.batch,
            table.bucket_count,
            first_bucket=request.spread_first_bucket,
            rows_min=config.spread_rows_min,
        )
    return [
        RoutedBatch(
            bucket=bucket,
            row_count=batch.num_rows,
            payload=part.payload if batch is part.batch else encode_payload(batch),
            schema_id=request.schema_id,
        )
        for bucket, batch in rows.items()
    ]
