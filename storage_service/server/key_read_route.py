"""Lookups in primary key tables: many keys, one key as JSON, by prefix, and the number of rows.

An answer waits until everything it shows can be fetched as well: changes are applied a moment
before they are published, and a reader of both must never see one without the other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from streamhouse.storage_service.errors import (
    RequestTooLargeError,
    RowNotFoundError,
    UnavailableError,
    UnsupportedError,
)
from streamhouse.storage_service.model.schema import FOUND_COLUMN
from streamhouse.storage_service.server.http_exchange import HttpExchange
from streamhouse.storage_service.server.json_row import json_writers, key_reader, row_to_json
from streamhouse.storage_service.server.log_page import ARROW_STREAM, as_views
from streamhouse.storage_service.server.parameters import column_names, integer
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.tablet.key_lookup import (
    KeyAnswer,
    RowAnswer,
    lookup_one,
    lookup_rows,
    prefix_rows,
)
from streamhouse.storage_service.tablet.open_table import OpenTable
from streamhouse.storage_service.tablet.row_reader import RowReader
from streamhouse.storage_service.wire import ipc_message
from streamhouse.storage_service.wire.request_stream import open_request

__all__ = ["answer_count", "answer_lookup", "answer_prefix_lookup", "answer_row", "row_in_memory"]

MORE_KEY: Final = b"streamhouse.more"
_PREFIX_LIMIT_DEFAULT: Final = 1_000
# Longer lookups would keep the event loop busy for milliseconds.
_INLINE_KEYS: Final = 16
_PUBLICATION_WAIT_S: Final = 30.0


async def answer_lookup(exchange: HttpExchange, service: Service, *, path: str) -> None:
    """Answer the row of every key, in the order of the keys."""
    query = exchange.query(["columns"])
    table = _key_table(service, path)
    columns = column_names(query.get("columns"), table.info)
    keys = await _read_keys(exchange, service, table, what="lookup")

    def look_up() -> KeyAnswer:
        return lookup_rows(table.info, table.key_buckets, keys)

    if keys.num_rows <= _INLINE_KEYS and _is_in_memory(table):
        answer = look_up()
    else:
        answer = await service.run_blocking(look_up)
    await _wait_until_visible(exchange, service, table, answer)
    names = None if columns is None else [*columns, FOUND_COLUMN]
    await _answer_rows(exchange, service, answer, names)


async def answer_prefix_lookup(exchange: HttpExchange, service: Service, *, path: str) -> None:
    """Answer the rows under every prefix of the key, each in key order, up to `limit` a prefix."""
    query = exchange.query(["columns", "limit"])
    table = _key_table(service, path)
    columns = column_names(query.get("columns"), table.info)
    limit = integer("limit", query.get("limit", str(_PREFIX_LIMIT_DEFAULT)), least=1)
    prefixes = await _read_keys(exchange, service, table, what="prefix lookup")
    rows_max = service.config.lookup_rows_max
    if limit * prefixes.num_rows > rows_max:
        raise RequestTooLargeError(
            f"prefix lookup in '{table.path}': {prefixes.num_rows} prefixes of up to {limit} rows;"
            f" at most {rows_max} rows together (lookup_rows_max)"
        )

    def look_up() -> KeyAnswer:
        return prefix_rows(table.info, table.key_buckets, prefixes, rows_max=limit)

    answer = await service.run_blocking(look_up)
    await _wait_until_visible(exchange, service, table, answer)
    await _answer_rows(exchange, service, answer, columns)


async def answer_row(
    exchange: HttpExchange, service: Service, *, path: str, segments: Sequence[str]
) -> None:
    """Answer one row as JSON; raises `RowNotFoundError`."""
    exchange.query(())
    body = row_in_memory(service, path=path, segments=segments)
    if body is not None:
        await exchange.answer_small(200, b"application/json", body)
        return
    table = _key_table(service, path)
    key = _row_reader(table).key_of(segments)
    if _is_in_memory(table):
        answer = lookup_one(table.info, table.key_buckets, key)
    else:
        answer = await service.run_blocking(lookup_one, table.info, table.key_buckets, key)
    await _wait_until_visible(exchange, service, table, answer)
    if answer.row is None:
        raise RowNotFoundError(f"table '{table.path}' has no row {row_to_json(key)}")
    await exchange.answer_json(row_to_json(answer.row))


def row_in_memory(service: Service, *, path: str, segments: Sequence[str]) -> bytes | None:
    """Return one row as JSON if that takes no waiting, for the disk or for a publication."""
    reader = _row_reader(_key_table(service, path))
    return reader.find(reader.key_of(segments))


def _row_reader(table: OpenTable) -> RowReader:
    if table.row_reader is None:
        table.row_reader = RowReader(
            table.info,
            table.key_buckets,
            json_of=json_writers(table.info.schema),
            key_of=key_reader(table.info),
        )
    return table.row_reader


async def answer_count(exchange: HttpExchange, service: Service, *, path: str) -> None:
    """Answer how many rows the table has: exact, and one cut across its buckets."""
    exchange.query(())
    table = _key_table(service, path)
    for bucket in table.key_buckets:
        bucket.check_usable()
    await exchange.answer_json({"count": sum(bucket.row_count for bucket in table.key_buckets)})


def _key_table(service: Service, path: str) -> OpenTable:
    table = service.table(path)
    if not table.info.is_primary_key_table:
        raise UnsupportedError(
            f"table '{table.path}' has no primary key, so rows cannot be looked up in it; fetch"
            " its log"
        )
    return table


def _is_in_memory(table: OpenTable) -> bool:
    return all(bucket.rows.is_loaded for bucket in table.key_buckets)


async def _read_keys(
    exchange: HttpExchange, service: Service, table: OpenTable, *, what: str
) -> pa.RecordBatch:
    config = service.config
    async with service.held_body(exchange) as body:
        stream = open_request(
            body,
            what=f"{what} in '{table.path}'",
            rows_max=config.lookup_keys_max,
            batch_bytes_max=config.batch_bytes_max,
            batches_max=config.append_batches_max,
        )
        batches = [read.batch for read in stream.batches()]
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return pa.RecordBatch.from_pylist([], schema=stream.schema)
    return pa.concat_batches(batches)


async def _wait_until_visible(
    exchange: HttpExchange, service: Service, table: OpenTable, answer: KeyAnswer | RowAnswer
) -> None:
    """Return when fetches see all that `answer` may show; normally at once."""
    for number, end in answer.ends.items():
        bucket = table.key_buckets[number]
        while bucket.log.high_watermark < end:
            started = asyncio.get_running_loop().time()
            waiter = table.wakeups.waiter(number, timeout_s=_PUBLICATION_WAIT_S)
            await exchange.wait(waiter)
            service.manager.check_open(table)
            bucket.check_usable()
            if asyncio.get_running_loop().time() - started >= _PUBLICATION_WAIT_S:
                raise UnavailableError(f"{bucket.where} is busy writing; try again later")


async def _answer_rows(
    exchange: HttpExchange, service: Service, answer: KeyAnswer, columns: Sequence[str] | None
) -> None:
    rows = answer.rows if columns is None else answer.rows.select(list(columns))
    metadata = {MORE_KEY: json.dumps(list(answer.more))} if answer.more else None
    pieces = as_views(
        [
            rows.schema.with_metadata(metadata).serialize(),
            rows.serialize(),
            ipc_message.END_OF_STREAM,
        ]
    )
    service.metrics.count_sent(
        row_count=rows.num_rows, byte_count=sum(len(piece) for piece in pieces)
    )
    await exchange.answer(200, ARROW_STREAM, pieces)
