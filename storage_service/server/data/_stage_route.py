"""POST .../transactions/{id}/stage: rows of a transaction, checked and durable, but not visible.

Staging refuses every mistake that shows without the rows in the table. A later commit is refused
only for a conflict with the rows in the table, and then as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import InvalidRequestError, RequestTooLargeError
from streamhouse.core.model.casts.written_rows import staged_schema
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.transaction import TransactionOperation
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.engine.keys.key_bucket import table_rules
from streamhouse.storage_service.engine.transactions.transaction_files import TransactionSpec
from streamhouse.storage_service.kv.plan.write_input import ROW_BYTES_MAX, WriteInput, check_rows
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.kv.rows.row_codec import RowCodec
from streamhouse.storage_service.kv.table_rules import TableRules
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.staged_part import OPERATION_COLUMN
from streamhouse.storage_service.server.data.row_routing import (
    RowsRequest,
    routed_batches,
    routed_writes,
)
from streamhouse.storage_service.server.http._parameters import written_version
from streamhouse.storage_service.server.http.http_exchange import HttpExchange
from streamhouse.storage_service.server.service import Service

__all__ = ["answer_stage", "read_staged"]

_TOKEN: Final = re.compile(r"[0-9a-zA-Z_-]{1,64}")


class _Staged(NamedTuple):
    schema: pa.Schema
    batches: Sequence[RoutedBatch]


async def answer_stage(
    exchange: HttpExchange, service: Service, *, path: str, transaction_id: str
) -> None:
    """Stage the request's rows as a part; parts not named by the commit are dropped.

    With a `token`, a repetition gets the part of the first request.
    """
    table = service.table(path)
    query = exchange.query(["token", "schema_id"])
    token = query.get("token")
    if token is not None and not _TOKEN.fullmatch(token):
        raise InvalidRequestError(
            f"{exchange.path}: token must be 1 to 64 letters, digits, '-' and '_'"
        )
    transactions = service.transactions_of(table)
    spec = transactions.spec(transaction_id)
    with service.body_memory.body(exchange.share) as memory:
        body = await service.rows_body(exchange, memory)
        first = table.next_spread_bucket(1)
        schema_id = written_version(query.get("schema_id"), table.info)
        staged = await service.run_by_size(
            read_staged, body, table.info, spec, first, service.config, schema_id
        )
        part_id, part = await transactions.stage(transaction_id, *staged, token=token)
    await exchange.answer_json(
        {"part": part_id, "row_count": part.row_count, "bytes": part.size_bytes}
    )


def read_staged(
    body: bytes,
    table: TableInfo,
    spec: TransactionSpec,
    first_bucket: int,
    config: ServiceConfig,
    schema_id: int | None,
) -> _Staged:
    """Decode, check and route the body, by version `schema_id` of the schema. On any thread."""
    is_delete = spec.operation is TransactionOperation.DELETE
    verb = TransactionOperation.DELETE if is_delete else TransactionOperation.UPSERT
    request = RowsRequest(
        table=table,
        verb=str(verb) if table.is_primary_key_table else "append",
        config=config,
        schema_id=schema_id,
        is_partial=spec.columns is not None,
        first_bucket=first_bucket,
    )
    if not table.is_primary_key_table:
        batches = routed_batches(body, request)
        stored_as = batches[0].schema_id if batches else table.schema_id
        return _Staged(staged_schema(table, stored_as), batches)
    writes = routed_writes(body, request)
    rules = table_rules(table)
    for write in writes:
        write_input = check_rows(
            write.rows,
            rules,
            operations=write.operations,
            columns=spec.columns,
            row_numbers=write.row_numbers,
        )
        _check_sizes(
            write_input, rules, rows_bytes_max=min(ROW_BYTES_MAX, config.batch_bytes_max // 3)
        )
    return _as_part(writes, rules)


def _as_part(writes: Sequence[KeyWrite], rules: TableRules) -> _Staged:
    """Return the changes as batches, with operations in an additional column.

    Rows that meet stored rows are judged by the rehearsal of the commit.
    """
    if not writes:
        return _Staged(pa.schema([]), ())
    batches = []
    rows = writes[0].rows
    for write in writes:
        rows = write.rows
        if write.operations is not None:
            operations = pa.array(np.asarray(write.operations), pa.int8())
            rows = rows.append_column(OPERATION_COLUMN, operations)
        payload = memoryview(rows.serialize()).cast("B")
        judged_by = rules.checks.texts
        batches.append(RoutedBatch(write.bucket, rows.num_rows, payload, judged_by=judged_by))
    return _Staged(rows.schema, batches)


def _check_sizes(write_input: WriteInput, rules: TableRules, *, rows_bytes_max: int) -> None:
    """Raise `RequestTooLargeError` for a row that is too large to be stored."""
    codec = RowCodec(rules.schema, table=rules.table, schema_id=0)
    for first, rows in _suspects(write_input.rows, 0, bytes_max=rows_bytes_max // 2):
        sizes = pc.binary_length(codec.encode(rows))
        if (pc.max(sizes).as_py() or 0) > rows_bytes_max:
            raise RequestTooLargeError(
                f"table '{rules.table}': row {int(write_input.row_numbers[first])} has"
                f" {pc.max(sizes).as_py()} bytes; at most {rows_bytes_max}"
            )


def _suspects(
    rows: pa.RecordBatch, first: int, *, bytes_max: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the few single rows that may be too large, with their positions."""
    if rows.nbytes <= bytes_max:
        return
    if rows.num_rows == 1:
        yield first, rows
        return
    half = rows.num_rows // 2
    yield from _suspects(rows.slice(0, half), first, bytes_max=bytes_max)
    yield from _suspects(rows.slice(half), first + half, bytes_max=bytes_max)
