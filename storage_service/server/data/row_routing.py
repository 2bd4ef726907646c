"""POST .../upsert and .../delete: changes by primary key, answered once they are visible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.errors import (
    BucketNotFoundError,
    InvalidRequestError,
    SchemaMismatchError,
    UnsupportedError,
)
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.model.bucketing import buckets_for_rows
from streamhouse.storage_service.model.changelog import OPERATION_DELETE, operations_of
from streamhouse.storage_service.model.conform import conform
from streamhouse.storage_service.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.storage_service.model.schema_change import in_current_version
from streamhouse.storage_service.model.sorted_values import distinct
from streamhouse.storage_service.model.table import TableInfo
from streamhouse.storage_service.server.data.write_route import writer_id_of
from streamhouse.storage_service.server.http.http_exchange import HttpExchange
from streamhouse.storage_service.server.http.parameters import column_names
from streamhouse.storage_service.server.service import Service
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
    if not isinstance(table, KeyTable):
        raise UnsupportedError(
            f"table '{table.path}' has no primary key, so there is nothing to {verb}; rows are"
            " appended to it"
        )
    async with service.rows_body(exchange) as body:
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
    parts: list[_Piece] = []
    sequences: dict[int, int] = {}
    for part in stream.batches():
        _check_sequence(part, request, sequences)
        if part.batch.num_rows:
            rows, operations = _operations(part.batch, request)
            if request.verb == "upsert":
                rows = in_current_version(request.table, rows)
            parts.append(_Piece(part.bucket, rows, operations))
    pieces: dict[int, list[_Piece]] = {}
    for piece in _by_bucket(parts, request):
        assert piece.bucket is not None
        pieces.setdefault(piece.bucket, []).append(piece)
    return [
        _joined(bucket, found, sequence=sequences.get(bucket, 0))
        for bucket, found in sorted(pieces.items())
    ]


class _Piece(NamedTuple):
    """Rows of a request, for one bucket once it is known; `numbers` are theirs in the request."""

    bucket: int | None
    rows: pa.RecordBatch
    operations: Operations | None
    numbers: npt.NDArray[np.int64] | None = None


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


def _by_bucket(parts: Sequence[_Piece], request: KeyRequest) -> Iterator[_Piece]:
    """Yield the rows of each bucket, each bucket's in the order of the body."""
    table = request.table
    count = table.bucket_count
    for part in parts:
        if part.bucket is not None and not 0 <= part.bucket < count:
            raise BucketNotFoundError(
                f"table '{table.path}' has no bucket {part.bucket}; its buckets are 0..{count - 1}"
            )
    if count == 1 or not parts:
        yield from (part._replace(bucket=0) for part in parts)
        return
    numbers = _bucket_numbers(parts, table)
    start = 0
    for part in parts:
        own = numbers[start : start + part.rows.num_rows]
        if part.bucket is None:
            yield from _split(part, own, start)
        else:
            # A key in two buckets would be two rows.
            wrong = np.flatnonzero(own != part.bucket)
            if len(wrong):
                raise SchemaMismatchError(
                    f"{request.what}: row {int(wrong[0])} of the batch for bucket {part.bucket}"
                    f" belongs to bucket {int(own[wrong[0]])}"
                )
            yield part
        start += part.rows.num_rows


def _split(part: _Piece, buckets: npt.NDArray[np.int32], start: int) -> Iterator[_Piece]:
    """Yield the rows of each bucket; the first row of `part` has the number `start`."""
    for bucket in distinct(buckets):
        chosen = np.flatnonzero(buckets == bucket)
        operations = None if part.operations is None else part.operations[chosen]
        yield _Piece(int(bucket), part.rows.take(pa.array(chosen)), operations, chosen + start)


def _bucket_numbers(parts: Sequence[_Piece], table: TableInfo) -> npt.NDArray[np.int32]:
    """Return the bucket of every row of all parts; raises for a key that is none."""
    keys = [_key_columns(part.rows, table) for part in parts]
    key = table.schema.select(table.descriptor.primary_key, table=str(table.path))
    if any(part.bucket is not None for part in parts):
        # Rows that came for a bucket are counted in what came for it.
        conformed = [conform(rows, key, table=str(table.path)) for rows in keys]
        whole = pa.concat_batches(conformed)
    else:
        whole = conform(pa.concat_batches(keys), key, table=str(table.path))
    return buckets_for_rows(whole, table.descriptor.effective_bucket_key, table.bucket_count)


def _key_columns(rows: pa.RecordBatch, table: TableInfo) -> pa.RecordBatch:
    key = table.descriptor.primary_key
    return rows.select([i for i, name in enumerate(rows.schema.names) if name in key])


def _joined(bucket: int, pieces: Sequence[_Piece], *, sequence: int) -> KeyWrite:
    if len(pieces) == 1:
        _, rows, operations, numbers = pieces[0]
        return KeyWrite(bucket, rows, operations, sequence, numbers)
    rows = pa.concat_batches([piece.rows for piece in pieces])
    given = [piece.operations for piece in pieces if piece.operations is not None]
    known = [piece.numbers for piece in pieces if piece.numbers is not None]
    return KeyWrite(
        bucket,
        rows,
        np.concatenate(given) if given else None,
        sequence,
        np.concatenate(known) if len(known) == len(pieces) else None,
    )
