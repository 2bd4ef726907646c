"""POST .../append, .../upsert and .../delete: an Arrow IPC stream in, a JSON answer.

`sifted_write.py` handles text bodies and `on_error=reject`.

An append is answered once the rows are durable, a change by primary key once the change is also
visible. If the client disconnects after the body arrived, the write still happens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from streamhouse.core.errors import (
    InvalidRequestError,
    UnsupportedError,
)
from streamhouse.core.model.casts.written_rows import current_columns
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.transaction import TransactionOperation
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import Appended, LogTable
from streamhouse.storage_service.server.data.row_routing import (
    RowsRequest,
    routed_batches,
    routed_writes,
)
from streamhouse.storage_service.server.data.sifted_write import (
    SIFTED_PARAMETERS,
    answer_sifted,
    sifted_write,
)
from streamhouse.storage_service.server.http._parameters import column_names, written_version
from streamhouse.storage_service.server.http.http_exchange import HttpExchange
from streamhouse.storage_service.server.service import Service

__all__ = ["answer_append", "answer_delete", "answer_upsert"]

_APPEND_PARAMETERS: Final = ("writer_id", "schema_id", *SIFTED_PARAMETERS)
_UPSERT_PARAMETERS: Final = ("columns", *_APPEND_PARAMETERS)
_DELETE_PARAMETERS: Final = ("writer_id", "schema_id")
_WRITER_ID: Final = re.compile(r"[0-9a-fA-F]{1,16}")


async def answer_append(exchange: HttpExchange, service: Service, *, path: str) -> None:
    """Append the request's rows; the rows are durable and visible before the answer."""
    query, content_type = exchange.query(_APPEND_PARAMETERS), exchange.header(b"content-type")
    table = service.table(path)
    writer_id = writer_id_of(exchange, query.get("writer_id"))
    if not isinstance(table, LogTable):
        raise UnsupportedError(
            f"table '{table.path}' has a primary key: upsert rows instead of appending them"
        )
    sifted = sifted_write(exchange, content_type, query, TransactionOperation.APPEND, table.info)
    if sifted is not None:
        return await answer_sifted(exchange, service, table, sifted)
    with service.body_memory.body(exchange.share) as memory:
        body = await service.rows_body(exchange, memory)
        request = RowsRequest(
            table=table.info,
            verb="append",
            writer_id=writer_id,
            config=service.config,
            schema_id=written_version(query.get("schema_id"), table.info),
            first_bucket=table.next_spread_bucket(1),
        )
        batches = await service.decode(routed_batches, body, request)
        appended = await service.manager.append(table, batches)
    service.metrics.appended_rows.inc(sum(batch.row_count for batch in batches))
    await _answer(exchange, service, table.info, appended)


async def answer_upsert(exchange: HttpExchange, service: Service, *, path: str) -> None:
    """Upsert the request's rows or apply the changes; `columns` makes a partial update."""
    await _write(exchange, service, path, verb="upsert", parameters=_UPSERT_PARAMETERS)


async def answer_delete(exchange: HttpExchange, service: Service, *, path: str) -> None:
    """Delete the rows with the keys of the request."""
    await _write(exchange, service, path, verb="delete", parameters=_DELETE_PARAMETERS)


async def _write(
    exchange: HttpExchange, service: Service, path: str, *, verb: str, parameters: Sequence[str]
) -> None:
    """Write all rows of the request or nothing; `parameters` are the valid query parameters."""
    query, content_type = exchange.query(parameters), exchange.header(b"content-type")
    table = service.table(path)
    writer_id = writer_id_of(exchange, query.get("writer_id"))
    if not isinstance(table, KeyTable):
        raise UnsupportedError(
            f"table '{table.path}' has no primary key, so there is nothing to {verb}; rows are"
            " appended to it"
        )
    sifted = sifted_write(exchange, content_type, query, TransactionOperation(verb), table.info)
    if sifted is not None:
        return await answer_sifted(exchange, service, table, sifted)
    with service.body_memory.body(exchange.share) as memory:
        body = await service.rows_body(exchange, memory)
        info = table.info
        schema_id = written_version(query.get("schema_id"), info)
        columns = column_names(query.get("columns"), info, schema_id)
        request = RowsRequest(
            table=info,
            verb=verb,
            writer_id=writer_id,
            config=service.config,
            schema_id=schema_id,
            is_partial=columns is not None,
        )
        if columns is not None and schema_id is not None:
            columns = current_columns(info, columns, schema_id=schema_id)
        writes = await service.decode(routed_writes, body, request)
        appended = await service.manager.write_keys(
            table, writes, columns=columns, writer_id=writer_id
        )
    service.metrics.appended_rows.inc(sum(end - start for start, end in appended.ranges.values()))
    await _answer(exchange, service, table.info, appended)


async def _answer(
    exchange: HttpExchange, service: Service, table: TableInfo, appended: Appended
) -> None:
    service.check_answer(exchange, appended.ranges)
    ranges = (f'"{b}": [{start}, {end}]' for b, (start, end) in appended.ranges.items())
    buckets, time_us = ", ".join(ranges), appended.timestamp_us
    text = f'{{"table_id": {table.table_id}, "buckets": {{{buckets}}}, "timestamp_us": {time_us}}}'
    await exchange.answer(200, b"application/json", [text.encode()])


def writer_id_of(exchange: HttpExchange, text: str | None) -> int:
    """Read the parameter `writer_id`; 0 without one."""
    if text is None:
        return 0
    if not _WRITER_ID.fullmatch(text) or int(text, 16) == 0:
        raise InvalidRequestError(
            f"{exchange.path}: writer_id must be 1 to 16 hexadecimal digits and not 0"
        )
    return int(text, 16)
