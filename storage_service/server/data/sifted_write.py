"""Writes whose rows the service divides: those that keep what does not fit, and those of texts.

Rows that all fit are written like any others. Else the rows that fit, and the others as rejected
ones, are one transaction: one decision for both. So is a request that says what tells it from
others, which then happens once, however often it arrives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from streamhouse.core.model.rejected.companion import rejected_rows
from streamhouse.core.model.rejected.division import Divided, divide, divide_rows
from streamhouse.core.model.table import TableDescriptor, TableInfo
from streamhouse.core.model.transaction import (
    CommitResult,
    LinkedCommit,
    TransactionOperation,
    TransactionStatus,
)
from streamhouse.core.text.csv_rows import divide_csv
from streamhouse.core.text.json_reading import plain_values, read_json
from streamhouse.core.text.ndjson_rows import divide_ndjson
from streamhouse.core.text.text_rows import (
    DividedText,
    TextBounds,
    nested_bytes,
    nothing_done,
    width_of,
)
from streamhouse.core.traces.stages import stage_ended
from streamhouse.core.wire.arrow_body import encode_append_body
from streamhouse.core.wire.request_stream import open_request
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import LogTable, OpenTable
from streamhouse.storage_service.server._companions import kept_companion
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
    "write_divided",
]

SIFTED_PARAMETERS: Final = (
    "on_error",
    "transaction_id",
    "app_id",
    "version",
    "source",
    "first_row",
)
# All of them may be bad, and a rejected row takes some hundred bytes more than it had.
ROWS_MAX: Final = 65_536
# Dividing takes much longer than storing.
_INLINE_BYTES_MAX: Final = 16 << 10
_CUT_BYTES: Final = 8 << 20
_CUT_ROWS: Final = 4_096
_FORMS: Final = {form.content_type: form for form in (Body.JSON, Body.NDJSON, Body.CSV)}
_TRANSACTION_ID: Final = re.compile(r"[0-9a-f]{32}")
_SOURCE_TEXT_MAX: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class SiftedWrite:
    """What such a request asks for."""

    operation: TransactionOperation
    form: Body
    is_rejecting: bool
    transaction_id: str | None
    app_id: str | None
    version: int | None
    source: str
    first_row: int
    schema_id: int | None = None
    """The version of the schema that the columns are named by; None: the current one."""
    bucket: int | None = None
    """That of the rows that fit; None: they are spread, or their keys say it."""

    @property
    def is_once(self) -> bool:
        """Whether it says what tells it from others."""
        return self.transaction_id is not None or self.app_id is not None


def sifted_write(
    exchange: HttpExchange,
    query: Mapping[str, str],
    operation: TransactionOperation,
    table: TableInfo,
) -> SiftedWrite | None:
    """Read what a request asks for; None: its rows are Arrow's, and are stored as they are."""
    given = exchange.header(b"content-type")
    form = Body.ROWS if given is None or given == ARROW_STREAM else _form(exchange, given)
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
    """Return what a body is; Arrow's, which is refused then, if it is nothing that is known."""
    exchange.text_bodies = _FORMS
    return _FORMS.get(content_type.partition(b";")[0].strip().lower(), Body.ROWS)


async def answer_sifted(
    exchange: HttpExchange, service: Service, table: LogTable | KeyTable, asked: SiftedWrite
) -> None:
    """Write the rows that fit and keep the others, if they are to be kept: all or nothing."""
    exchange.body = asked.form
    with service.body_memory.body(exchange.caller.name) as held:
        body = await service.rows_body(exchange, held)
        arguments = (body, table.info, asked, service.config)
        if len(body) > _INLINE_BYTES_MAX:
            divided = await service.run_blocking(_divided, *arguments)
        else:
            divided = _divided(*arguments)
        stage_ended("decode")
        if asked.form is not Body.ROWS and not held.adds_at_once(
            sum(batch.nbytes for batch in divided.good)
        ):
            raise held.refusal()
        if divided.bad and not asked.is_rejecting:
            raise _refusal(table.info, asked, divided)
        service.check_write()
        if divided.bad or asked.is_once:
            result = await write_divided(service, table, asked, divided)
        else:
            result = await _like_any_others(service, table, asked, divided)
    service.check_written()
    rejected_count = 0
    if not result.is_skipped:
        # A repetition is answered by what was stored: its rows are the same.
        rejected_count = divided.good_count + divided.bad_count - result.row_count
    service.metrics.appended_rows.inc(result.row_count + rejected_count)
    await exchange.answer_json(
        {"table_id": table.info.table_id, **result.to_json(), "rejected_count": rejected_count}
    )


def _divided(body: bytes, table: TableInfo, asked: SiftedWrite, config: ServiceConfig) -> Divided:
    """Read the body and divide its rows, by one version of the schema. On any thread."""
    schema_id = table.schema_id if asked.schema_id is None else asked.schema_id
    divided = _divided_by(table.in_version(schema_id), body, asked, config)
    return dataclasses.replace(divided, schema_id=schema_id)


def _divided_by(
    table: TableInfo, body: bytes, asked: SiftedWrite, config: ServiceConfig
) -> Divided:
    what = written_to(str(asked.operation), table)
    key: tuple[str, ...] = ()
    if asked.operation is TransactionOperation.DELETE:
        key, table = table.descriptor.primary_key, _of_keys(table)
    bounds = TextBounds(
        what=what,
        rows_max=ROWS_MAX if asked.is_rejecting else config.append_rows_max,
        bytes_max=config.body_bytes_max,
        is_rejecting=asked.is_rejecting,
        key=key,
    )
    if asked.form is Body.JSON:
        rows = _json_rows(body, what=what)
        types = {column.name: column.type for column in table.schema.columns}
        # Four letters of null, or none, are as wide as any other value is in Arrow.
        empty_bytes = len(rows) * width_of(types.values())
        nested = sum(nested_bytes(row, types) for row in rows)
        DividedText(bounds).check(0, empty_bytes + nested)
        return divide_rows(
            table, rows, whose=bounds.whose, given=lambda at: plain_values(rows[at], types)
        )
    if asked.form is not Body.ROWS:
        return (divide_csv if asked.form is Body.CSV else divide_ndjson)(body, table, bounds)
    stream = open_request(
        body,
        what=what,
        rows_max=ROWS_MAX,
        batch_bytes_max=config.batch_bytes_max,
        batches_max=config.append_batches_max,
    )
    if asked.schema_id is None:
        check_names(table, stream.schema.names)
    parts = list(stream.batches())
    if any(part.sequence or part.bucket is not None for part in parts):
        raise InvalidRequestError(
            f"{what}: batches of a write that the service divides name no bucket and no sequence"
        )
    return divide(table, stream.schema, (part.batch for part in parts))


def _of_keys(table: TableInfo) -> TableInfo:
    """Return what has the keys of a table as its rows."""
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


def _refusal(table: TableInfo, asked: SiftedWrite, divided: Divided) -> SchemaMismatchError:
    first, rows = divided.bad[0]
    row = rows[0]
    column = "" if row.column is None else f", column '{row.column}'"
    ending = nothing_done(is_delete=asked.operation is TransactionOperation.DELETE)
    return SchemaMismatchError(
        f"{asked.operation} of '{table.path}': row {first + row.position}{column}: {row.reason};"
        f" {ending}"
    )


async def _like_any_others(
    service: Service, table: LogTable | KeyTable, asked: SiftedWrite, divided: Divided
) -> CommitResult:
    request = RowsRequest(
        table=table.info,
        verb=str(asked.operation),
        config=service.config,
        schema_id=divided.schema_id,
        first_bucket=table.next_spread_bucket(1),
    )
    body = _body(table.info, divided.good)
    if isinstance(table, KeyTable):
        writes = await service.run_by_size(routed_writes, body, request)
        appended = await service.manager.write_keys(table, writes, columns=None, writer_id=0)
    else:
        batches = await service.run_by_size(routed_batches, body, request)
        appended = await service.manager.append(table, batches)
    return CommitResult(
        status=TransactionStatus.COMMITTED,
        ranges=appended.ranges,
        row_count=divided.good_count,
        timestamp_us=appended.timestamp_us,
    )


async def write_divided(
    service: Service, table: OpenTable, asked: SiftedWrite, divided: Divided
) -> CommitResult:
    """Write the rows that fit and keep the others, all or nothing.

    It happens once for its transaction id, or app id and version.
    """
    transactions = service.transactions_of(table)
    transaction_id, status = await transactions.begin(
        asked.operation,
        columns=None,
        app_id=asked.app_id,
        version=asked.version,
        timeout_ms=None,
        transaction_id=asked.transaction_id,
    )
    if status is TransactionStatus.SKIPPED:
        return CommitResult(status=status, ranges={}, row_count=0, timestamp_us=0)
    refused: StreamhouseError | None = None
    if status is TransactionStatus.OPEN:
        try:
            return await _commit(service, table, asked, divided, transaction_id)
        except TransactionClosedError as error:
            # The same request, sent before, was faster.
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
    asked: SiftedWrite,
    divided: Divided,
    transaction_id: str,
) -> CommitResult:
    transactions = service.transactions_of(table)
    spare = contextlib.ExitStack()
    # Whatever is committed or decided stays as it is.
    spare.callback(_abort, service, table, transaction_id)
    with spare:
        parts = []
        if divided.good:
            # Of a table with a key the schema stays while the transaction is open.
            staged = await _stage(
                service,
                table,
                transaction_id,
                divided.good,
                schema_id=divided.schema_id,
                bucket=asked.bucket,
            )
            parts.append(staged)
        linked = None
        if divided.bad:
            companion = await kept_companion(service, str(table.path))
            others = service.transactions_of(companion)
            linked_id, _ = await others.begin(
                TransactionOperation.UPSERT,
                columns=None,
                app_id=None,
                version=None,
                timeout_ms=None,
            )
            spare.callback(_abort, service, companion, linked_id)
            rows = await service.run_blocking(_rejected, divided, asked)
            current = companion.info.schema_id
            kept = [
                await _stage(service, companion, linked_id, [batch], schema_id=current)
                for batch in rows
            ]
            linked = LinkedCommit(
                table=str(companion.path), transaction_id=linked_id, parts=tuple(kept)
            )
        service.check_write()
        try:
            result = await transactions.commit(transaction_id, parts, wait_s=None, linked=linked)
        except StreamhouseError:
            service.manager.check_open(table)
            raise
        assert result is not None, "nobody has limited the wait"
        return result


def _abort(service: Service, table: OpenTable, transaction_id: str) -> None:
    with contextlib.suppress(StreamhouseError, KeyError):
        service.manager.transactions.of(table).abort(transaction_id)


async def _stage(
    service: Service,
    table: OpenTable,
    transaction_id: str,
    batches: Sequence[pa.RecordBatch],
    *,
    schema_id: int | None,
    bucket: int | None = None,
) -> str:
    transactions = service.transactions_of(table)
    spec = transactions.spec(transaction_id)
    body = _body(table.info, batches, bucket=bucket)
    first = table.next_spread_bucket(1)
    staged = await service.run_by_size(
        read_staged, body, table.info, spec, first, service.config, schema_id
    )
    part_id, _ = await transactions.stage(transaction_id, *staged, token=None)
    return part_id


def _rejected(divided: Divided, asked: SiftedWrite) -> list[pa.RecordBatch]:
    """Return the rows that do not fit as the table of rejected rows has them."""
    now_us = time.time_ns() // 1_000
    return [
        rejected_rows(
            rows[start : start + _CUT_ROWS],
            operation=str(asked.operation),
            source=asked.source,
            first_row=asked.first_row + first,
            now_us=now_us,
        )
        for first, rows in divided.bad
        for start in range(0, len(rows), _CUT_ROWS)
    ]


def _body(
    table: TableInfo, batches: Sequence[pa.RecordBatch], *, bucket: int | None = None
) -> bytes:
    """Return rows as the body of a request, which has all its checks before it."""
    schema = batches[0].schema if batches else table.schema.to_arrow()
    parts = [(bucket, 0, part) for part in _cut(batches)]
    body: bytes = encode_append_body(schema, parts).to_pybytes()
    return body


def _cut(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield batches in order, none much larger than a request's."""
    for batch in batches:
        if batch.nbytes > _CUT_BYTES and batch.num_rows > 1:
            half = batch.num_rows // 2
            yield from _cut([batch.slice(0, half), batch.slice(half)])
        else:
            yield batch
