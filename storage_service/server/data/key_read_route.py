"""Lookups in primary key tables: many keys, one key as JSON, by prefix, and the number of rows.

An answer waits until everything it shows can be fetched as well: changes are applied a moment
before they are published, and a reader of both must never see one without the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from streamhouse.storage_service.engine.keys.key_lookup import (
    KeyAnswer,
    lookup_one,
    lookup_rows,
    prefix_rows,
)
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.keys.row_reader import RowReader
from streamhouse.storage_service.errors import (
    RequestTooLargeError,
    RowNotFoundError,
    UnavailableError,
    UnsupportedError,
)
from streamhouse.storage_service.kv.lookup import least_row_bytes
from streamhouse.storage_service.model.schema import FOUND_COLUMN
from streamhouse.storage_service.server.data.json_row import json_writers, key_reader, row_to_json
from streamhouse.storage_service.server.data.log_page import ARROW_STREAM, as_views
from streamhouse.storage_service.server.http.http_exchange import HttpExchange
from streamhouse.storage_service.server.http.parameters import column_names, integer
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.wire import ipc_message
from streamhouse.storage_service.wire.request_stream import open_request

__all__ = ["answer_count", "answer_lookup", "answer_prefix_lookup", "answer_row", "row_in_memory"]

MORE_KEY: Final = b"streamhouse.more"
_PREFIX_LIMIT_DEFAULT: Final = 1_000
# Longer lookups would keep the event loop busy for milliseconds.
_INLINE_KEYS: Final = 16
_PUBLICATION_WAIT_S: Final = 30.0


class _RowsAnswer(NamedTuple):
    """An answer as it is sent; `ends` as in `KeyAnswer`."""

    pieces: Sequence[bytes | memoryview]
    ends: Mapping[int, int]
    row_count: int
    byte_count: int


async def answer_lookup(exchange: HttpExchange, service: Service, *, path: str) -> None:
    """Answer the row of every key, in the order of the keys."""
    query = exchange.query(["columns"])
    table = _key_table(service, path)
    columns = column_names(query.get("columns"), table.info)
    names = None if columns is None else [*columns, FOUND_COLUMN]
    await _answer_rows(exchange, service, await _looked_up(exchange, service, table, names))


async def _looked_up(
    exchange: HttpExchange, service: Service, table: KeyTable, names: Sequence[str] | None
) -> _RowsAnswer:
    bytes_max = service.answers.one_bytes_max
    async with _keys(exchange, service, table, what="lookup") as keys:

        def look_up() -> _RowsAnswer:
            answer = lookup_rows(table.info, table.key_buckets, keys, bytes_max=bytes_max)
            return _packed(answer, names)

        async def build(_: int) -> tuple[_RowsAnswer, int]:
            if keys.num_rows <= _INLINE_KEYS and _is_in_memory(table):
                found = look_up()
            else:
                found = await service.run_blocking(look_up)
            return found, found.byte_count

        estimate = 0
        if keys.num_rows > _INLINE_KEYS:
            estimate = keys.num_rows * least_row_bytes(table.info.schema.to_arrow())
        found = await service.answers.build(exchange, min(estimate, bytes_max), build)
    await _wait_until_visible(exchange, service, table, found.ends)
    return found


async def answer_prefix_lookup(exchange: HttpExchange, service: Service, *, path: str) -> None:
    """Answer the rows under every prefix of the key, each in key order, up to `limit` a prefix."""
    query = exchange.query(["columns", "limit"])
    table = _key_table(service, path)
    columns = column_names(query.get("columns"), table.info)
    limit = integer("limit", query.get("limit", str(_PREFIX_LIMIT_DEFAULT)), least=1)
    found = await _found_under(exchange, service, table, columns, limit)
    await _answer_rows(exchange, service, found)


async def _found_under(
    exchange: HttpExchange,
    service: Service,
    table: KeyTable,
    columns: Sequence[str] | None,
    limit: int,
) -> _RowsAnswer:
    rows_max, bytes_max = service.config.lookup_rows_max, service.answers.one_bytes_max
    async with _keys(exchange, service, table, what="prefix lookup") as prefixes:
        if limit * prefixes.num_rows > rows_max:
            raise RequestTooLargeError(
                f"prefix lookup in '{table.path}': {prefixes.num_rows} prefixes of up to {limit}"
                f" rows; at most {rows_max} rows together (lookup_rows_max)"
            )

        def look_up() -> _RowsAnswer:
            answer = prefix_rows(
                table.info, table.key_buckets, prefixes, rows_max=limit, bytes_max=bytes_max
            )
            return _packed(answer, columns)

        async def build(_: int) -> tuple[_RowsAnswer, int]:
            found = await service.run_blocking(look_up)
            return found, found.byte_count

        found = await service.answers.build(exchange, 0, build)
    await _wait_until_visible(exchange, service, table, found.ends)
    return found


async def answer_row(
    exchange: HttpExchange, service: Service, *, path: str, segments: Sequence[str]
) -> None:
    """Answer one row as JSON; raises `RowNotFoundError`."""
    exchange.query(())
    body = row_in_memory(service, path=path, segments=segments)
    if body is not None:
        service.answers.hold_built(exchange, len(body))
        await exchange.answer_small(200, b"application/json", body)
        return
    table = _key_table(service, path)
    key = _row_reader(table).key_of(segments)
    if _is_in_memory(table):
        answer = lookup_one(table.info, table.key_buckets, key)
    else:
        answer = await service.run_blocking(lookup_one, table.info, table.key_buckets, key)
    await _wait_until_visible(exchange, service, table, answer.ends)
    if answer.row is None:
        raise RowNotFoundError(f"table '{table.path}' has no row {row_to_json(key)}")
    body = json.dumps(row_to_json(answer.row)).encode()
    service.answers.hold_built(exchange, len(body))
    await exchange.answer_small(200, b"application/json", body)


def row_in_memory(service: Service, *, path: str, segments: Sequence[str]) -> bytes | None:
    """Return one row as JSON if that takes no waiting, for the disk or for a publication."""
    reader = _row_reader(_key_table(service, path))
    return reader.find(reader.key_of(segments))


def _row_reader(table: KeyTable) -> RowReader:
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


def _key_table(service: Service, path: str) -> KeyTable:
    table = service.table(path)
    if not isinstance(table, KeyTable):
        raise UnsupportedError(
            f"table '{table.path}' has no primary key, so rows cannot be looked up in it; fetch"
            " its log"
        )
    return table


def _is_in_memory(table: KeyTable) -> bool:
    return all(bucket.rows.is_loaded for bucket in table.key_buckets)


@contextlib.asynccontextmanager
async def _keys(
    exchange: HttpExchange, service: Service, table: KeyTable, *, what: str
) -> AsyncIterator[pa.RecordBatch]:
    """Receive the keys of a request, and hold their memory while they are used."""
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
            yield batches[0]
        elif batches:
            yield pa.concat_batches(batches)
        else:
            none = [pa.nulls(0, t) for t in stream.schema.types]
            yield pa.RecordBatch.from_arrays(none, schema=stream.schema)


async def _wait_until_visible(
    exchange: HttpExchange, service: Service, table: KeyTable, ends: Mapping[int, int]
) -> None:
    """Return when fetches see all up to `ends`; normally at once."""
    for number, end in ends.items():
        bucket = table.key_buckets[number]
        while bucket.log.high_watermark < end:
            started = asyncio.get_running_loop().time()
            waiter = table.wakeups.waiter(number, timeout_s=_PUBLICATION_WAIT_S)
            await exchange.wait(waiter)
            service.manager.check_open(table)
            bucket.check_usable()
            if asyncio.get_running_loop().time() - started >= _PUBLICATION_WAIT_S:
                raise UnavailableError(f"{bucket.where} is busy writing; try again later")


def _packed(answer: KeyAnswer, columns: Sequence[str] | None) -> _RowsAnswer:
    """Return the rows as one Arrow stream; what they were looked up in is not kept by it."""
    rows = answer.rows if columns is None else answer.rows.select(list(columns))
    metadata = {MORE_KEY: json.dumps(list(answer.more))} if answer.more else None
    pieces = as_views(
        [
            rows.schema.with_metadata(metadata).serialize(),
            rows.serialize(),
            ipc_message.END_OF_STREAM,
        ]
    )
    return _RowsAnswer(pieces, answer.ends, rows.num_rows, sum(map(len, pieces)))


async def _answer_rows(exchange: HttpExchange, service: Service, found: _RowsAnswer) -> None:
    service.metrics.count_sent(row_count=found.row_count, byte_count=found.byte_count)
    await exchange.answer(200, ARROW_STREAM, found.pieces)
