"""POST .../upsert and .../delete: changes by primary key, answered once they are visible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.errors import (
    BucketNotFoundError,
    InvalidRequestError,
    SchemaMismatchError,
    UnsupportedError,
)
from streamhouse.storage_service.model.bucketing import buckets_for_rows
from streamhouse.storage_service.model.changelog import OPERATION_DELETE, operations_of
from streamhouse.storage_service.model.conform import conform
from streamhouse.storage_service.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.storage_service.model.table import TableInfo
from streamhouse.storage_service.server.append_route import writer_id_of
from streamhouse.storage_service.server.http_exchange import HttpExchange
from streamhouse.storage_service.server.parameters import column_names
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.tablet.key_writer import KeyWrite
from streamhouse.storage_service.wire.request_stream import RequestBatch, open_request

__all__ = ["KeyRequest", "answer_delete", "answer_upsert", "routed_writes"]

Operations = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRequest:
    """What reading a body needs to know besides it; plain values, for any thread."""

    table: TableInfo
    verb: str
    writer_id: int
    config: ServiceConfig

    @property
    def what(self) -> str:
        return f"{self.verb} of '{self.table.path}'"


async def answer_upsert(exchange: HttpExchange, service: Service, *, path: str) -> None:
    """Upsert the request's rows, or apply its changes; `columns` makes a partial update."""
    query = exchange.query(["writer_id", "columns"])
    columns = column_names(query.get("columns"), service.table(path).info)
    writer_id = writer_id_of(exchange, query.get("writer_id"))
    await _write(exchange, service, path=path, verb="upsert", columns=columns, writer_id=writer_id)


async def answer_delete(exchange: HttpExchange, service: Service, *, path: str) -> None:
    """Delete the rows whose keys the request has."""
    writer_id = writer_id_of(exchange, exchange.query(["writer_id"]).get("writer_id"))
    await _write(exchange, service, path=path, verb="delete", columns=None, writer_id=writer_id)


async def _write(
    exchange: HttpExchange,
    service: Service,
    *,
    path: str,
    verb: str,
    columns: Sequence[str] | None,
    writer_id: int,
) -> None:
    """All of the request happens or nothing, also when its client has gone away meanwhile."""
    table = service.table(path)
    config = service.config
    if not table.info.is_primary_key_table:
        raise UnsupportedError(
            f"table '{table.path}' has no primary key, so there is nothing to {verb}; rows are"
            " appended to it"
        )
    with service.body_memory.hold(exchange, bytes_max=config.body_bytes_max) as settle:
        body = await exchange.read_body(
            bytes_max=config.body_bytes_max,
            limit_name="body_bytes_max",
            timeout_ms=config.body_read_timeout_ms,
        )
        settle(len(body))
        service.metrics.received_bytes.inc(len(body))
        request = KeyRequest(table=table.info, verb=verb, writer_id=writer_id, config=config)
        if len(body) > config.inline_bytes_max:
            writes = await service.run_blocking(routed_writes, body, request)
        else:
            writes = routed_writes(body, request)
        appended = await service.manager.write_keys(
            table, writes, columns=columns, writer_id=writer_id
        )
    service.metrics.appended_rows.inc(sum(end - start for start, end in appended.ranges.values()))
    await exchange.answer_json(
        {
            "buckets": {str(b): [start, end] for b, (start, end) in appended.ranges.items()},
            "timestamp_us": appended.timestamp_us,
        }
    )


def routed_writes(body: bytes, request: KeyRequest) -> list[KeyWrite]:
    """Read the body; return its changes by bucket, each bucket's in the order of the body."""
    config = request.config
    stream = open_request(
        body,
        what=request.what,
        rows_max=config.append_rows_max,
        batch_bytes_max=config.batch_bytes_max,
        batches_max=config.append_batches_max,
    )
    pieces: dict[int, list[tuple[pa.RecordBatch, Operations | None]]] = {}
    sequences: dict[int, int] = {}
    for part in stream.batches():
        _check_sequence(part, request, sequences)
        if part.batch.num_rows == 0:
            continue
        rows, operations = _operations(part.batch, request)
        for bucket, piece, piece_operations in _split(part, rows, operations, request):
            pieces.setdefault(bucket, []).append((piece, piece_operations))
    return [
        KeyWrite(bucket, *_joined(found), sequence=sequences.get(bucket, 0))
        for bucket, found in sorted(pieces.items())
    ]


def _check_sequence(part: RequestBatch, request: KeyRequest, sequences: dict[int, int]) -> None:
    if bool(part.sequence) != bool(request.writer_id):
        raise InvalidRequestError(
            f"{request.what}: a batch with a sequence needs the parameter writer_id, and with"
            " writer_id every batch needs a sequence from 1 on"
        )
    if not part.sequence:
        return
    if part.bucket is None:
        raise InvalidRequestError(
            f"{request.what}: a batch with a sequence must name its bucket, because sequences"
            " count per bucket"
        )
    if part.bucket in sequences:
        raise InvalidRequestError(
            f"{request.what}: two batches with a sequence are for bucket {part.bucket}; send one"
            " a bucket"
        )
    sequences[part.bucket] = part.sequence


def _operations(
    batch: pa.RecordBatch, request: KeyRequest
) -> tuple[pa.RecordBatch, Operations | None]:
    """Return the rows without their change types, and what each of them does."""
    if request.verb == "delete":
        return _only_keys(batch, request), np.full(batch.num_rows, OPERATION_DELETE, np.int8)
    names = batch.schema.names
    if CHANGE_TYPE_COLUMN not in names:
        return batch, None
    position = names.index(CHANGE_TYPE_COLUMN)
    operations = operations_of(batch.column(position), table=str(request.table.path))
    return batch.remove_column(position), operations


def _only_keys(batch: pa.RecordBatch, request: KeyRequest) -> pa.RecordBatch:
    key = request.table.descriptor.primary_key
    for name in batch.schema.names:
        if name not in key:
            request.table.schema.column(name, table=str(request.table.path))
            raise SchemaMismatchError(
                f"{request.what}: column '{name}' is not part of the key ({', '.join(key)}); a"
                " delete takes the key columns only"
            )
    return batch


def _split(
    part: RequestBatch,
    rows: pa.RecordBatch,
    operations: Operations | None,
    request: KeyRequest,
) -> list[tuple[int, pa.RecordBatch, Operations | None]]:
    """Return (bucket, rows, operations), each bucket's rows in the order of the batch."""
    table = request.table
    count = table.bucket_count
    if part.bucket is not None and not 0 <= part.bucket < count:
        raise BucketNotFoundError(
            f"table '{table.path}' has no bucket {part.bucket}; its buckets are 0..{count - 1}"
        )
    if count == 1:
        return [(0, rows, operations)]
    keys = _bucket_keys(rows, table)
    numbers = buckets_for_rows(keys, table.descriptor.effective_bucket_key, count)
    if part.bucket is not None:
        # A key in two buckets would be two rows.
        wrong = np.flatnonzero(numbers != part.bucket)
        if len(wrong):
            raise SchemaMismatchError(
                f"{request.what}: row {int(wrong[0])} of the batch for bucket {part.bucket} belongs"
                f" to bucket {int(numbers[wrong[0]])}"
            )
        return [(part.bucket, rows, operations)]
    return [
        (
            int(number),
            rows.take(pa.array(chosen)),
            None if operations is None else operations[chosen],
        )
        for number in np.unique(numbers)
        for chosen in (np.flatnonzero(numbers == number),)
    ]


def _bucket_keys(rows: pa.RecordBatch, table: TableInfo) -> pa.RecordBatch:
    """Return the key columns as the table has them; raises if there are not, or one is null."""
    key = table.descriptor.primary_key
    present = [i for i, name in enumerate(rows.schema.names) if name in key]
    return conform(
        rows.select(present),
        table.schema.select(key, table=str(table.path)),
        table=str(table.path),
    )


def _joined(
    pieces: Sequence[tuple[pa.RecordBatch, Operations | None]],
) -> tuple[pa.RecordBatch, Operations | None]:
    if len(pieces) == 1:
        return pieces[0]
    rows = pa.concat_batches([rows for rows, _ in pieces])
    operations = [operations for _, operations in pieces if operations is not None]
    return rows, np.concatenate(operations) if operations else None
