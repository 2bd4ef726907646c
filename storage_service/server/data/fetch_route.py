"""GET .../buckets/{b}/fetch: stored batches from an offset on, waiting for some if asked to."""

from __future__ import annotations

import asyncio
from typing import Final

from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.errors import InvalidRequestError, OffsetOutOfRangeError
from streamhouse.storage_service.server.data.log_page import ARROW_STREAM, read_page
from streamhouse.storage_service.server.http.http_exchange import HttpExchange
from streamhouse.storage_service.server.http.parameters import (
    integer,
    log_column_names,
    schema_version,
)
from streamhouse.storage_service.server.service import Service

__all__ = ["answer_fetch", "check_offset"]

FETCH_BYTES_DEFAULT: Final = 8 << 20
_PARAMETERS: Final = ("offset", "max_bytes", "max_wait_ms", "columns", "end_offset", "schema_id")


async def answer_fetch(exchange: HttpExchange, service: Service, *, path: str, bucket: str) -> None:
    """Answer rows from `offset` on; at the end of the log wait up to `max_wait_ms` for some."""
    config = service.config
    query = exchange.query(_PARAMETERS)
    table = service.table(path)
    number = integer("bucket", bucket, least=0)
    tablet = table.tablet(number)
    if "offset" not in query:
        raise InvalidRequestError(f"{exchange.path}: parameter offset is missing")
    offset = integer("offset", query["offset"], least=0)
    bytes_max = integer("max_bytes", query.get("max_bytes", str(FETCH_BYTES_DEFAULT)), least=1)
    wait_ms = integer("max_wait_ms", query.get("max_wait_ms", "0"), least=0)
    schema_id = schema_version(query.get("schema_id"), table.info)
    columns = log_column_names(query.get("columns"), table.info, schema_id)
    end_offset = None
    if "end_offset" in query:
        end_offset = integer("end_offset", query["end_offset"], least=0)
    deadline = asyncio.get_running_loop().time() + min(wait_ms, config.fetch_wait_ms_max) / 1000
    while True:
        check_offset(table, number, offset)
        end = tablet.high_watermark
        if end_offset is not None:
            end = min(end, end_offset)
        # At end_offset nothing more can come, however long the wait.
        if offset < end or (end_offset is not None and offset >= end_offset):
            break
        if not await service.wait_for_rows(exchange, table, number, deadline=deadline):
            break
        service.manager.check_open(table)
    page = await read_page(
        exchange,
        service,
        table,
        number,
        offset=offset,
        end=end,
        bytes_max=min(bytes_max, config.fetch_bytes_max),
        columns=columns,
        schema_id=schema_id,
    )
    table.read_rows += page.row_count
    service.metrics.count_sent(row_count=page.row_count, byte_count=page.byte_count)
    await exchange.answer(200, ARROW_STREAM, page.pieces)


def check_offset(table: OpenTable, bucket: int, offset: int) -> None:
    """Raise `OffsetOutOfRangeError`, naming the valid range, unless `offset` can be read from."""
    tablet = table.tablet(bucket)
    start, end = tablet.log_start_offset, tablet.high_watermark
    if not start <= offset <= end:
        raise OffsetOutOfRangeError(
            f"table '{table.path}', bucket {bucket}: offset {offset} is outside the log, which has"
            f" offsets {start} to {end}"
        )
