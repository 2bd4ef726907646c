"""Reading the body of a write: decode, check, and split by bucket.

A body with any mistake is refused before any row is stored. Rows to append are judged here by the
table's constraints, whatever their door; rows by key are judged as they are planned. No I/O; on any
thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.errors import (
    BucketNotFoundError,
    InvalidRequestError,
    SchemaMismatchError,
)
from streamhouse.core.model.bucketing import (
    FEW_ROWS,
    buckets_for_rows,
    buckets_of_few,
    split_by_bucket,
    split_evenly,
)
from streamhouse.core.model.casts.conform import conform
from streamhouse.core.model.casts.written_rows import (
    check_dropped,
    check_names,
    in_current_version,
    version_of,
)
from streamhouse.core.model.changelog import OPERATION_DELETE, operations_of
from streamhouse.core.model.lake.limits import LakeLimits
from streamhouse.core.model.records.record_sequence import RECORD_COUNTED
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.checks import CheckText
from streamhouse.core.model.values.sorted_values import distinct
from streamhouse.core.wire.arrow_body import decode_append, encode_payload
from streamhouse.core.wire.request_stream import (
    RequestBatch,
    RequestStream,
    open_request,
)
from streamhouse.reading.where.checks import Checks
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.append_queue import RoutedBatch

__all__ = [
    "RowsRequest",
    "routed_batches",
    "routed_changes",
    "routed_rows",
    "routed_writes",
    "written_to",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRequest:
    """The context to read a body with; plain values, for any thread.

    `schema_id` is the writer's version of the schema; None: the writer names no version. With
    `is_partial` rows have some columns only. Rows of a table without a key are spread over the
    buckets from `first_bucket` on.
    """

    table: TableInfo
    verb: str
    config: ServiceConfig
    schema_id: int | None
    is_partial: bool = False
    writer_id: int = 0
    first_bucket: int = 0

    @property
    def what(self) -> str:
        """The beginning of error messages."""
        return written_to(self.verb, self.table)

    def version(self, columns: pa.Schema) -> int:
        """Return the schema version of rows with these columns.

        Raises `SchemaMismatchError` if the column names match no version.
        """
        stated = self.schema_id
        if stated is None:
            check_names(self.table, columns.names)
            stated = self.table.schema_id
        if self.is_partial or self.verb == "delete":
            return stated
        return version_of(self.table, columns, stated=stated)


def written_to(verb: str, table: TableInfo) -> str:
    """Return the beginning of error messages about a write."""
    return f"{verb} {'to' if verb == 'append' else 'of'} '{table.path}'"


def _opened(body: bytes, request: RowsRequest) -> RequestStream:
    config = request.config
    return open_request(
        body,
        what=request.what,
        rows_max=config.append_rows_max,
        batch_bytes_max=config.batch_bytes_max,
        batches_max=config.append_batches_max,
    )


def routed_batches(body: bytes, request: RowsRequest) -> list[RoutedBatch]:
    """Read the body of an append; return batches, each with its bucket.

    All batches have the schema version of the body's columns.
    """
    table = request.table
    stream = _opened(body, request)
    schema_id = request.version(stream.schema)
    name = str(table.path)
    parts = decode_append(stream, table.schema_version(schema_id), table=name)
    limits = LakeLimits.of_table(table, schema_id)
    routed: list[RoutedBatch] = []
    for part in parts:
        _check_sequence(part, request)
        check_dropped(table, part.batch, schema_id=schema_id)
        limits.check(part.batch, table=name)
        judged_by = _judged(table, part.batch, schema_id)
        if part.bucket is None:
            routed.extend(_spread(part, request, schema_id, judged_by))
        else:
            _check_bucket(part, part.bucket, request, schema_id)
            routed.append(
                RoutedBatch(
                    bucket=part.bucket,
                    row_count=part.batch.num_rows,
                    payload=part.payload,
                    schema_id=schema_id,
                    writer_id=request.writer_id,
                    sequence=part.sequence,
                    judged_by=judged_by,
                )
            )
    return routed


def _judged(table: TableInfo, rows: pa.RecordBatch, schema_id: int) -> frozenset[CheckText]:
    """Judge rows of a version of the schema; return the constraints that the rows hold."""
    checks = Checks.of_table(table)
    if checks:
        checks.refuse(in_current_version(table, rows, schema_id=schema_id))
    return checks.texts


def routed_rows(
    rows: pa.RecordBatch, request: RowsRequest, *, bucket: int, sequence: int = 0
) -> list[RoutedBatch]:
    """Return rows with their buckets; `RowSplitter` has already checked the rows.

    The bucket is `bucket`, unless the table has a bucket key. All batches have the writer's
    `sequence`.
    """
    table = request.table
    schema_id = table.schema_id
    _check_is_bucket(table, bucket)
    judged_by = _judged(table, rows, schema_id)
    key, count = table.bucket_key_of(schema_id), table.bucket_count
    parts = split_by_bucket(rows, key, count) if key and count > 1 else {bucket: rows}
    return [
        RoutedBatch(
            bucket=part_bucket,
            row_count=part.num_rows,
            payload=encode_payload(part),
            schema_id=schema_id,
            writer_id=request.writer_id,
            sequence=sequence,
            judged_by=judged_by,
        )
        for part_bucket, part in parts.items()
    ]


def routed_changes(
    rows: pa.RecordBatch,
    operations: npt.NDArray[np.int8] | None,
    request: RowsRequest,
    *,
    sequence: int = 0,
) -> list[KeyWrite]:
    """Split changes by key, with all columns of the table, into the changes of each bucket.

    All writes have the writer's `sequence`.
    """
    if not rows.num_rows:
        return []
    write = KeyWrite(0, rows, operations, sequence, schema_id=request.table.schema_id)
    return list(_by_bucket([(None, write)], request))


def _check_bucket(part: RequestBatch, bucket: int, request: RowsRequest, schema_id: int) -> None:
    table = request.table
    count = table.bucket_count
    _check_is_bucket(table, bucket)
    key = table.bucket_key_of(schema_id)
    if not key or count == 1:
        return
    # A row in a wrong bucket would break the lake's partitioning for ever.
    wrong = (buckets_for_rows(part.batch, key, count) != bucket).nonzero()[0]
    if len(wrong):
        raise SchemaMismatchError(
            f"{request.what}: row {int(wrong[0])} of the batch for bucket {bucket}"
            f" belongs to another bucket by the bucket key {', '.join(key)}"
        )


def _spread(
    part: RequestBatch, request: RowsRequest, schema_id: int, judged_by: frozenset[CheckText]
) -> list[RoutedBatch]:
    table, config = request.table, request.config
    key = table.bucket_key_of(schema_id)
    if key:
        rows = split_by_bucket(part.batch, key, table.bucket_count)
    else:
        rows = split_evenly(
            part.batch,
            table.bucket_count,
            first_bucket=request.first_bucket,
            rows_min=config.spread_rows_min,
        )
    return [
        RoutedBatch(
            bucket=bucket,
            row_count=batch.num_rows,
            payload=part.payload if batch is part.batch else encode_payload(batch),
            schema_id=schema_id,
            judged_by=judged_by,
        )
        for bucket, batch in rows.items()
    ]


def routed_writes(body: bytes, request: RowsRequest) -> list[KeyWrite]:
    """Read the body of an upsert or delete; return the changes of each bucket, in order."""
    parts: list[tuple[int | None, KeyWrite]] = []
    numbered: set[int | None] = set()
    stream = _opened(body, request)
    names = stream.schema.names
    columns = stream.schema
    if CHANGE_TYPE_COLUMN in names and request.verb != "delete":
        columns = columns.remove(names.index(CHANGE_TYPE_COLUMN))
    schema_id = request.version(columns)
    for part in stream.batches():
        _check_sequence(part, request)
        if part.sequence:
            if part.bucket in numbered:
                raise InvalidRequestError(
                    f"{request.what}: two batches with a sequence are for bucket {part.bucket};"
                    " send one a bucket"
                )
            numbered.add(part.bucket)
        rows, operations = part.batch, None
        if not rows.num_rows:
            continue
        if request.verb == "delete":
            _check_only_keys(names, request, schema_id)
            operations = np.full(rows.num_rows, OPERATION_DELETE, np.int8)
        elif CHANGE_TYPE_COLUMN in names:
            position = names.index(CHANGE_TYPE_COLUMN)
            operations = operations_of(rows.column(position), table=str(request.table.path))
            rows = rows.remove_column(position)
        table = request.table
        write = KeyWrite(
            part.bucket or 0, rows, operations, part.sequence, schema_id=table.schema_id
        )
        deletes = write.deletes
        check_dropped(table, rows, schema_id=schema_id, deletes=deletes)
        current = in_current_version(
            table, rows, schema_id=schema_id, is_partial=request.is_partial, deletes=deletes
        )
        write = write._replace(rows=current)
        parts.append((part.bucket, write))
    pieces: dict[int, list[KeyWrite]] = {}
    for piece in _by_bucket(parts, request):
        pieces.setdefault(piece.bucket, []).append(piece)
    return [_joined(pieces[bucket]) for bucket in sorted(pieces)]


def _check_only_keys(names: Sequence[str], request: RowsRequest, schema_id: int) -> None:
    table = request.table.in_version(schema_id)
    key = table.descriptor.primary_key
    for name in names:
        if name not in key:
            table.schema.column(name, table=str(table.path))
            raise SchemaMismatchError(
                f"{request.what}: column '{name}' is not part of the key ({', '.join(key)}); a"
                " delete takes the key columns only"
            )


def _by_bucket(
    parts: Sequence[tuple[int | None, KeyWrite]], request: RowsRequest
) -> Iterator[KeyWrite]:
    """Yield the rows of each bucket, in the order of the body.

    A part has its bucket, or None for placement by key.
    """
    table = request.table
    count = table.bucket_count
    for bucket, _ in parts:
        if bucket is not None:
            _check_is_bucket(table, bucket)
    if count == 1 or not parts or _are_few_and_right(parts, table):
        yield from (write for _, write in parts)
        return
    rows = [write.rows for _, write in parts]
    names_buckets = any(bucket is not None for bucket, _ in parts)
    numbers = _bucket_numbers(rows, table, is_each_numbered=names_buckets)
    start = 0
    for bucket, write in parts:
        row_buckets = numbers[start : start + write.rows.num_rows]
        if bucket is None and len(parts) == 1 and (row_buckets == row_buckets[0]).all():
            yield write._replace(bucket=int(row_buckets[0]))
        elif bucket is None:
            yield from _split(write, row_buckets, start)
        else:
            # A key in two buckets would be two rows.
            wrong = np.flatnonzero(row_buckets != bucket)
            if len(wrong):
                raise SchemaMismatchError(
                    f"{request.what}: row {int(wrong[0])} of the batch for bucket {bucket}"
                    f" belongs to bucket {int(row_buckets[wrong[0]])}"
                )
            yield write
        start += write.rows.num_rows


def _are_few_and_right(parts: Sequence[tuple[int | None, KeyWrite]], table: TableInfo) -> bool:
    """Whether the rows are few and in their right buckets; the full check reports mistakes."""
    if sum(write.rows.num_rows for _, write in parts) > FEW_ROWS:
        return False
    hashed, schema = table.descriptor.effective_bucket_key, parts[0][1].rows.schema
    for name in table.descriptor.primary_key:
        position = schema.get_field_index(name)
        column = table.schema.column(name, table=table.path)
        if position < 0 or schema.field(position).type != column.type:
            return False
    for bucket, write in parts:
        rows = write.rows
        if bucket is None:
            return False
        for name in table.descriptor.primary_key:
            if rows.column(name).null_count:
                return False
        row_buckets = buckets_of_few(list(map(rows.column, hashed)), table.bucket_count)
        if row_buckets is None or row_buckets.count(bucket) < len(row_buckets):
            return False
    return True


def _split(write: KeyWrite, buckets: npt.NDArray[np.int32], start: int) -> Iterator[KeyWrite]:
    """Yield the rows of each bucket; the first row of `write` has the number `start`."""
    for bucket in distinct(buckets):
        chosen = np.flatnonzero(buckets == bucket)
        yield write._replace(
            bucket=int(bucket),
            rows=write.rows.take(pa.array(chosen)),
            operations=None if write.operations is None else write.operations[chosen],
            row_numbers=chosen + start,
        )


def _bucket_numbers(
    parts: Sequence[pa.RecordBatch], table: TableInfo, *, is_each_numbered: bool
) -> npt.NDArray[np.int32]:
    """Return the bucket of every row of all parts; raises for an invalid key.

    With `is_each_numbered` each part is checked alone: row numbers in errors count within the part.
    """
    names = table.descriptor.primary_key
    keys = [
        rows.select([i for i, name in enumerate(rows.schema.names) if name in names])
        for rows in parts
    ]
    key = table.schema.select(names, table=str(table.path))
    if is_each_numbered:
        conformed = [conform(rows, key, table=str(table.path), key=key.names) for rows in keys]
        whole = pa.concat_batches(conformed)
    else:
        whole = conform(pa.concat_batches(keys), key, table=str(table.path), key=key.names)
    return buckets_for_rows(whole, table.descriptor.effective_bucket_key, table.bucket_count)


def _joined(pieces: Sequence[KeyWrite]) -> KeyWrite:
    """Join the pieces of a bucket into a write; several pieces have no sequence."""
    if len(pieces) == 1:
        return pieces[0]
    operations = [piece.operations for piece in pieces if piece.operations is not None]
    row_numbers = [piece.row_numbers for piece in pieces if piece.row_numbers is not None]
    return KeyWrite(
        pieces[0].bucket,
        pa.concat_batches([piece.rows for piece in pieces]),
        np.concatenate(operations) if operations else None,
        row_numbers=np.concatenate(row_numbers) if len(row_numbers) == len(pieces) else None,
        schema_id=pieces[0].schema_id,
    )


def _check_sequence(part: RequestBatch, request: RowsRequest) -> None:
    if bool(part.sequence) != bool(request.writer_id):
        raise InvalidRequestError(
            f"{request.what}: a batch with a sequence needs the parameter writer_id, and with"
            " writer_id every batch needs a sequence from 1 on"
        )
    if part.sequence and part.bucket is None:
        raise InvalidRequestError(
            f"{request.what}: a batch with a sequence must name its bucket, because sequences"
            " count per bucket"
        )
    if part.sequence >= RECORD_COUNTED:
        raise InvalidRequestError(
            f"{request.what}: {part.sequence} is no sequence; they count batches from 1 on, and are"
            f" below {RECORD_COUNTED}"
        )


def _check_is_bucket(table: TableInfo, bucket: int) -> None:
    if not 0 <= bucket < table.bucket_count:
        raise BucketNotFoundError(
            f"table '{table.path}' has no bucket {bucket}; its buckets are"
            f" 0..{table.bucket_count - 1}"
        )
