"""Writes with a check of every single row: text bodies, and `on_error=reject`.

If all rows fit the table, the rows are written as usual. Otherwise a transaction commits the valid
rows and the rejected rows together. A request with a transaction id, or with an application id and
version, is also a transaction: repetitions of the request write nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from streamhouse.core.errors import (
    InvalidRequestError,
    RequestTooLargeError,
    SchemaMismatchError,
    StreamhouseError,
    TransactionClosedError,
    UnsupportedError,
)
from streamhouse.core.model.casts.written_rows import check_names
from streamhouse.core.model.table import TableDescriptor, TableInfo
from streamhouse.core.model.transaction import (
    CommitResult,
    LinkedCommit,
    TransactionOperation,
    TransactionStatus,
)
from streamhouse.core.rows.checked_rows import CheckedRows, broken_rows
from streamhouse.core.rows.companion import rejected_rows
from streamhouse.core.rows.division import divide, divide_rows
from streamhouse.core.text.csv_rows import divide_csv
from streamhouse.core.text.json_reading import plain_values, read_json
from streamhouse.core.text.ndjson_rows import divide_ndjson
from streamhouse.core.text.text_rows import (
    TextBounds,
    TextRows,
    nested_bytes,
    nothing_done,
    width_of,
)
from streamhouse.core.traces.stages import stage_ended
from streamhouse.core.wire.arrow_body import encode_append_body
from streamhouse.core.wire.request_stream import open_request
from streamhouse.reading.where.checks import check_failed, judged
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import LogTable, OpenTable
from streamhouse.storage_service.server._companions import ensure_companion
from streamhouse.storage_service.server.data._stage_route import read_staged
from streamhouse.storage_service.server.data.row_routing import (
    RowsRequest,
    routed_batches,
    routed_writes,
    written_to,
)
from streamhouse.storage_service.server.http._parameters import integer, written_version
from streamhouse.storage_service.server.http.http_exchange import (
    ARROW_STREAM,
    Body,
    HttpExchange,
)
from streamhouse.storage_service.server.service import Service

__all__ = [
    "SIFTED_PARAMETERS",
    "SiftedWrite",
    "answer_sifted",
    "sifted_write",
    "write_checked",
]

SIFTED_PARAMETERS: Final = (
    "on_error",
    "transaction_id",
    "app_id",
    "version",
    "source",
    "first_row",
)
# All rows may be bad, and a rejected row takes some hundred bytes more than the original.
ROWS_MAX: Final = 65_536
# Checking rows takes much longer than storing them.
_INLINE_BYTES_MAX: Final = 16 << 10
_CUT_BYTES: Final = 8 << 20
_FORMS: Final = {form.content_type: form for form in (Body.JSON, Body.NDJSON, Body.CSV)}
_TRANSACTION_ID: Final = re.compile(r"[0-9a-f]{32}")
_SOURCE_TEXT_MAX: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class SiftedWrite:
    """The parameters of a request with rows to check."""

    operation: TransactionOperation
    form: Body
    is_rejecting: bool
    transaction_id: str | None
    app_id: str | None
    version: int | None
    source: str
    first_row: int
    schema_id: int | None = None
    """The schema version of the rows; None, before the rows are checked: the current version."""
    bucket: int | None = None
    """The bucket of the valid rows; None: rows are spread, or placed by key."""

    @property
    def is_once(self) -> bool:
        """Whether the request has an id, so that repetitions write nothing."""
        return self.transaction_id is not None or self.app_id is not None


def sifted_write(
    exchange: HttpExchange,
    content_type: bytes | None,
    query: Mapping[str, str],
    operation: TransactionOperation,
    table: TableInfo,
) -> SiftedWrite | None:
    """Read the parameters of a request; None for Arrow rows without a check of single rows."""
    form = (
        Body.ROWS
        if content_type is None or content_type == ARROW_STREAM
        else _form(exchange, content_type)
    )
    if form is Body.ROWS and (not query or query.keys().isdisjoint(SIFTED_PARAMETERS)):
        return None
    for name, instead in (("writer_id", "transaction_id"), ("columns", "whole rows")):
        if name in query:
            raise UnsupportedError(
                f"{exchange.path}: a write that the service divides takes no {name}; send {instead}"
            )
    on_error = query.get("on_error", "refuse")
    if on_error not in ("refuse", "reject"):
        raise InvalidRequestError(
            f"{exchange.path}: on_error = '{on_error[:40]}' is not one of refuse, reject"
        )
    transaction_id = query.get("transaction_id")
    if transaction_id is not None and not _TRANSACTION_ID.fullmatch(transaction_id):
        raise InvalidRequestError(
            f"{exchange.path}: transaction_id must be 32 hexadecimal digits in lower case, chosen"
            " at random"
        )
    version = query.get("version")
    source = query.get("source", "http")
    if len(source) > _SOURCE_TEXT_MAX:
        raise InvalidRequestError(
            f"{exchange.path}: source has more than {_SOURCE_TEXT_MAX} characters"
        )
    return SiftedWrite(
        operation=operation,
        form=form,
        is_rejecting=on_error == "reject",
        transaction_id=transaction_id,
        app_id=query.get("app_id"),
        version=None if version is None else integer("version", version, least=0),
        source=source,
        first_row=integer("first_row", query.get("first_row", "0"), least=0),
        schema_id=written_version(query.get("schema_id"), table),
    )


def _form(exchange: HttpExchange, content_type: bytes) -> Body:
    """Return the kind of a body; for an unknown content type Arrow rows, refused later."""
    exchange.text_bodies = _FORMS
    return _FORMS.get(content_type.partition(b";")[0].strip().lower(), Body.ROWS)


async def answer_sifted(
    exchange: HttpExchange, service: Service, table: LogTable | KeyTable, write: SiftedWrite
) -> None:
    """Write the valid rows and, with `on_error=reject`, the rejected rows: all or nothing."""
    exchange.body = write.form
    with service.body_memory.body(exchange.share) as memory:
        body = await service.rows_body(exchange, memory)
        info = table.info
        arguments = (body, info, write, service.config)
        if len(body) > _INLINE_BYTES_MAX:
            checked = await service.run_blocking(_judged, *arguments)
        else:
            checked = _judged(*arguments)
        stage_ended("decode")
        if write.form is not Body.ROWS and not memory.adds_at_once(checked.rows.nbytes):
            raise memory.refusal()
        if checked.misfits and not write.is_rejecting:
            raise check_failed(str(table.path), checked) or _refusal(info, write, checked)
        service.check_write()
        write = dataclasses.replace(write, schema_id=_schema_id(info, write))
        if checked.misfits or write.is_once:
            result = await write_checked(service, table, write, checked)
            service.check_written()
        else:
            result = await _write_valid_rows(service, table, write, checked)
            service.check_answer(exchange, result.ranges)
    rejected_count = 0
    if not result.is_skipped:
        # The answer to a repetition is the stored result: the rows are the same.
        rejected_count = checked.row_count - result.row_count
    service.metrics.appended_rows.inc(result.row_count + rejected_count)
    await exchange.answer_json(
        {"table_id": table.info.table_id, **result.to_json(), "rejected_count": rejected_count}
    )


def _schema_id(table: TableInfo, write: SiftedWrite) -> int:
    return table.schema_id if write.schema_id is None else write.schema_id


def _judged(
    body: bytes, table: TableInfo, write: SiftedWrite, config: ServiceConfig
) -> CheckedRows:
    """Read the body, and check the rows against the schema and the constraints. On any thread."""
    return judged(
        table,
        _checked(body, table, write, config),
        schema_id=_schema_id(table, write),
        is_delete=write.operation is TransactionOperation.DELETE,
    )


def _checked(
    body: bytes, table: TableInfo, write: SiftedWrite, config: ServiceConfig
) -> CheckedRows:
    """Read the body and check the rows against a version of the schema. On any thread."""
    table = table.in_version(_schema_id(table, write))
    error_prefix = written_to(str(write.operation), table)
    key: tuple[str, ...] = ()
    if write.operation is TransactionOperation.DELETE:
        key, table = table.descriptor.primary_key, _of_keys(table)
    bounds = TextBounds(
        what=error_prefix,
        rows_max=ROWS_MAX if write.is_rejecting else config.append_rows_max,
        bytes_max=config.body_bytes_max,
        is_rejecting=write.is_rejecting,
        key=key,
    )
    if write.form is Body.JSON:
        rows = _json_rows(body, what=error_prefix)
        types = {column.name: column.type for column in table.schema.columns}
        # In Arrow a null, or an absent value, takes as many bytes as any value of a fixed width.
        empty_bytes = len(rows) * width_of(types.values())
        nested = sum(nested_bytes(row, types) for row in rows)
        TextRows(bounds).check(0, empty_bytes + nested)
        return divide_rows(
            table, rows, owner=bounds.owner, original=lambda at: plain_values(rows[at], types)
        )
    if write.form is not Body.ROWS:
        return (divide_csv if write.form is Body.CSV else divide_ndjson)(body, table, bounds)
    stream = open_request(
        body,
        what=error_prefix,
        rows_max=ROWS_MAX,
        batch_bytes_max=config.batch_bytes_max,
        batches_max=config.append_batches_max,
    )
    if write.schema_id is None:
        check_names(table, stream.schema.names)
    parts = list(stream.batches())
    if any(part.sequence or part.bucket is not None for part in parts):
        raise InvalidRequestError(
            f"{error_prefix}: batches of a write that the service divides name no bucket and no"
            " sequence"
        )
    return divide(table, stream.schema, (part.batch for part in parts))


def _of_keys(table: TableInfo) -> TableInfo:
    """Return a table description with only the key columns."""
    whole = table.descriptor
    schema = whole.schema.select(whole.primary_key, table=str(whole.path))
    return TableInfo(
        descriptor=TableDescriptor(path=whole.path, schema=schema),
        table_id=table.table_id,
        created_at_us=table.created_at_us,
    )


def _json_rows(body: bytes, *, what: str) -> Sequence[Mapping[str, Any]]:
    try:
        rows = read_json(body)
    except ValueError as error:
        raise InvalidRequestError(f"{what}: the body {error}") from error
    if not isinstance(rows, list):
        raise InvalidRequestError(
            f"{what}: the body must be a JSON list of rows, each an object of column to value"
        )
    if len(rows) > ROWS_MAX:
        raise RequestTooLargeError(
            f"{what}: {len(rows)} rows in one request; at most {ROWS_MAX}, send fewer"
        )
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InvalidRequestError(f"{what}: row {number} is no JSON object")
    return rows


def _refusal(table: TableInfo, write: SiftedWrite, checked: CheckedRows) -> SchemaMismatchError:
    position, misfit = checked.first_misfit()
    column = "" if misfit.column is None else f", column '{misfit.column}'"
    ending = nothing_done(is_delete=write.operation is TransactionOperation.DELETE)
    return SchemaMismatchError(
        f"{write.operation} of '{table.path}': row {position}{column}: {misfit.reason}; {ending}"
    )


async def _write_valid_rows(
    service: Service, table: LogTable | KeyTable, write: SiftedWrite, checked: CheckedRows
) -> CommitResult:
    request = RowsRequest(
        table=table.info,
        verb=str(write.operation),
        config=service.config,
        schema_id=write.schema_id,
        first_bucket=table.next_spread_bucket(1),
    )
    body = _body(table.info, checked.rows)
    if isinstance(table, KeyTable):
        writes = await service.run_by_size(routed_writes, body, request)
        appended = await service.manager.write_keys(table, writes, columns=None, writer_id=0)
    else:
        batches = await service.run_by_size(routed_batches, body, request)
        appended = await service.manager.append(table, batches)
    return CommitResult(
        status=TransactionStatus.COMMITTED,
        ranges=appended.ranges,
        row_count=checked.rows.num_rows,
        timestamp_us=appended.timestamp_us,
    )


async def write_checked(
    service: Service, table: OpenTable, write: SiftedWrite, checked: CheckedRows
) -> CommitResult:
    """Write the valid rows and the rejected rows in a transaction, all or nothing.

    A repetition with the same transaction id, or app id and version, writes nothing.
    """
    transactions = service.transactions_of(table)
    transaction_id, status = await transactions.begin(
        write.operation,
        columns=None,
        app_id=write.app_id,
        version=write.version,
        timeout_ms=None,
        transaction_id=write.transaction_id,
    )
    if status is TransactionStatus.SKIPPED:
        return CommitResult(status=status, ranges={}, row_count=0, timestamp_us=0)
    refused: StreamhouseError | None = None
    if status is TransactionStatus.OPEN:
        try:
            return await _commit(service, table, write, checked, transaction_id)
        except TransactionClosedError as error:
            # An earlier copy of this request is committing the transaction.
            refused = error
    outcome = await transactions.outcome(transaction_id)
    if outcome is None:
        raise refused or TransactionClosedError(
            f"transaction {transaction_id} of '{table.path}' is being committed; repeat the request"
        )
    return outcome.result


async def _commit(
    service: Service,
    table: OpenTable,
    write: SiftedWrite,
    checked: CheckedRows,
    transaction_id: str,
) -> CommitResult:
    transactions = service.transactions_of(table)
    spare = contextlib.ExitStack()
    # An abort leaves committed and decided transactions unchanged.
    spare.callback(_abort, service, table, transaction_id)
    with spare:
        parts = []
        if checked.rows.num_rows:
            # The schema of a primary key table is fixed while the transaction is open.
            staged = await _stage(
                service,
                table,
                transaction_id,
                checked.rows,
                schema_id=write.schema_id,
                bucket=write.bucket,
            )
            parts.append(staged)
        linked = None
        if checked.misfits:
            companion = await ensure_companion(service, str(table.path))
            companion_transactions = service.transactions_of(companion)
            linked_id, _ = await companion_transactions.begin(
                TransactionOperation.UPSERT,
                columns=None,
                app_id=None,
                version=None,
                timeout_ms=None,
            )
            spare.callback(_abort, service, companion, linked_id)
            rejected = rejected_rows(
                checked,
                operation=str(write.operation),
                source=write.source,
                first_row=write.first_row,
            )
            batches: list[pa.RecordBatch] = await service.run_blocking(list, rejected)
            current = companion.info.schema_id
            rejected_parts = [
                await _stage(service, companion, linked_id, batch, schema_id=current)
                for batch in batches
            ]
            linked = LinkedCommit(
                table=str(companion.path),
                transaction_id=linked_id,
                parts=tuple(rejected_parts),
                broken=broken_rows(checked.misfits.values()),
            )
        service.check_write()
        try:
            result = await transactions.commit(transaction_id, parts, wait_s=None, linked=linked)
        except StreamhouseError:
            service.manager.check_open(table)
            raise
        assert result is not None, "the wait has no limit"
        return result


def _abort(service: Service, table: OpenTable, transaction_id: str) -> None:
    with contextlib.suppress(StreamhouseError, KeyError):
        service.manager.transactions.of(table).abort(transaction_id)


async def _stage(
    service: Service,
    table: OpenTable,
    transaction_id: str,
    rows: pa.RecordBatch,
    *,
    schema_id: int | None,
    bucket: int | None = None,
) -> str:
    transactions = service.transactions_of(table)
    spec = transactions.spec(transaction_id)
    body = _body(table.info, rows, bucket=bucket)
    first = table.next_spread_bucket(1)
    staged = await service.run_by_size(
        read_staged, body, table.info, spec, first, service.config, schema_id
    )
    part_id, _ = await transactions.stage(transaction_id, *staged, token=None)
    return part_id


def _body(table: TableInfo, rows: pa.RecordBatch, *, bucket: int | None = None) -> bytes:
    """Return rows as a request body; the body then passes the checks of any request."""
    parts = [(bucket, 0, part) for part in _cut(rows)] if rows.num_rows else []
    schema = rows.schema if parts else table.schema.to_arrow()
    body: bytes = encode_append_body(schema, parts).to_pybytes()
    return body


def _cut(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield rows in order, cut to about `_CUT_BYTES`."""
    if rows.nbytes > _CUT_BYTES and rows.num_rows > 1:
        half = rows.num_rows // 2
        yield from _cut(rows.slice(0, half))
        yield from _cut(rows.slice(half))
    else:
        yield rows
