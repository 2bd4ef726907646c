"""Lookups in primary key tables: many keys, one key as JSON, by prefix, and the number of rows.

Changes become visible to lookups a moment before fetches see the changes. An answer therefore waits
until all its rows can be fetched, so that a reader of both sees a consistent state.

With `at_least` the answer includes all changes below the named offsets, and has a header with the
included offsets. A standby answers lookups with `at_least` only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import pyarrow as pa

from streamhouse.core.errors import (
    RequestTooLargeError,
    RowNotFoundError,
)
from streamhouse.core.model.identity import Same
from streamhouse.core.model.offsets import INCLUDED_HEADER, buckets_to_json
from streamhouse.core.model.schema import FOUND_COLUMN, empty_batch
from streamhouse.core.model.table import VERSION_HEADER
from streamhouse.core.model.values.json_values import row_to_json
from streamhouse.core.traces.stages import stage_ended
from streamhouse.core.wire import ipc_message
from streamhouse.core.wire.request_stream import open_request
from streamhouse.storage_service.engine.keys.key_lookup import (
    KeyAnswer,
    KeyLookup,
    Keys,
    LookupTable,
    StoredRows,
)
from streamhouse.storage_service.server._request_service import RequestService
from streamhouse.storage_service.server.data._json_row import JsonRows
from streamhouse.storage_service.server.data._key_text import (
    TEXT_BODIES,
    key_rows,
    looked_up_text,
    text_form,
)
from streamhouse.storage_service.server.data._log_page import ARROW_STREAM, as_views
from streamhouse.storage_service.server.data._log_text import LogForm, accepted_form
from streamhouse.storage_service.server.http._parameters import (
    column_names,
    integer,
    offsets,
    schema_version,
    table_id,
)
from streamhouse.storage_service.server.http.body_memory import HeldBody
from streamhouse.storage_service.server.http.http_exchange import Headers, HttpExchange

__all__ = ["answer_count", "answer_lookup", "answer_prefix_lookup", "answer_row"]

MORE_KEY: Final = b"streamhouse.more"
# A row is at /v1/tables/{path}/rows/, then the key.
_KEY_SEGMENT: Final = 5
_PREFIX_LIMIT_DEFAULT: Final = 1_000
# More keys would keep the event loop busy for more than two milliseconds.
_INLINE_KEYS: Final = 2_000
_INLINE_TEXT_KEYS: Final = 100
_INLINE_BYTES: Final = 1 << 20
_LEAST: Final = ("at_least", "table_id", "schema_id")
"""The parameters of the least answer; without `at_least` a standby does not answer."""
# Those of 256 buckets; all that are kept take a few megabytes.
_LEAST_KEPT_CHARACTERS_MAX: Final = 4_096

_JSON_ROWS: Final[WeakKeyDictionary[KeyLookup, JsonRows]] = WeakKeyDictionary()


class _Answer(NamedTuple):
    """An encoded answer; `ends` as in `StoredRows`."""

    pieces: Sequence[bytes | memoryview]
    ends: Mapping[int, int]
    row_count: int
    byte_count: int


async def answer_lookup(exchange: HttpExchange, service: RequestService, *, path: str) -> None:
    """Answer the row of every key, in the order of the keys."""
    query = exchange.query(["columns", *_LEAST])
    table = service.lookup_table(path)
    lookup = table.lookup
    columns = column_names(query.get("columns"), lookup.info)
    names = None if columns is None else [*columns, FOUND_COLUMN]
    form = accepted_form(exchange)
    with service.body_memory.body(exchange.share) as memory:
        rows = await _keys(exchange, service, table, memory, what="lookup")
        await _wait_for_least(exchange, service, table, query)
        keys = partial(lookup.keys, rows)

        def pack(stored: StoredRows) -> _Answer:
            return _packed(lookup.rows(stored), names, form)

        answer = await _lookup_answer(
            exchange,
            service,
            lookup,
            keys,
            pack,
            key_count=rows.num_rows,
            inline_keys=_INLINE_KEYS if form is LogForm.ARROW else _INLINE_TEXT_KEYS,
        )
    await _answer_rows(exchange, service, table, answer, form, query, lookup)


async def answer_row(exchange: HttpExchange, service: RequestService, *, path: str) -> None:
    """Answer one row as JSON; raises `RowNotFoundError`."""
    query = exchange.query(_LEAST)
    # Parts of a key may contain percent-encoded slashes.
    segments = exchange.raw_path.split("/")[_KEY_SEGMENT:]
    table = service.lookup_table(path)
    lookup = table.lookup
    as_json = _JSON_ROWS.get(lookup) or _JSON_ROWS.setdefault(lookup, JsonRows(lookup.info))
    key = as_json.key_of(segments)
    await _wait_for_least(exchange, service, table, query)

    def pack(stored: StoredRows) -> _Answer:
        values = lookup.values(stored)
        pieces = () if values is None else (as_json.text(values),)
        return _Answer(pieces, stored.ends, len(pieces), sum(map(len, pieces)))

    answer = await _lookup_answer(
        exchange, service, lookup, lambda: lookup.key(key), pack, key_count=1
    )
    included = await _show(exchange, service, table, answer.ends, query)
    headers = [*as_json.headers, *included] if included else as_json.headers
    if not answer.row_count:
        # The header tells the client whether it wrote the key for another schema version.
        exchange.error_headers = headers
        raise RowNotFoundError(f"table '{table.path}' has no row {row_to_json(key)}")
    await exchange.answer(200, b"application/json", answer.pieces, headers=headers)


async def _lookup_answer(
    exchange: HttpExchange,
    service: RequestService,
    lookup: KeyLookup,
    keys: Callable[[], Keys],
    pack: Callable[[StoredRows], _Answer],
    *,
    key_count: int,
    inline_keys: int = _INLINE_KEYS,
) -> _Answer:
    """Look keys up: few keys in memory on the event loop, else on a worker thread."""
    if key_count <= inline_keys:
        stored = lookup.find_in_memory(keys(), bytes_max=_INLINE_BYTES)
        if stored is not None:
            answer = pack(stored)
            if service.answers.holds_at_once(exchange, answer.byte_count):
                return answer
    bytes_max = service.answers.answer_bytes_max

    def look_up() -> _Answer:
        return pack(lookup.find(keys(), bytes_max=bytes_max))

    estimate = min(key_count * lookup.least_row_bytes, bytes_max)
    return await service.answers.build(exchange, estimate, lambda _: service.run_blocking(look_up))


async def answer_prefix_lookup(
    exchange: HttpExchange, service: RequestService, *, path: str
) -> None:
    """Answer the rows of every key prefix in key order, up to `limit` rows per prefix."""
    query = exchange.query(["columns", "limit", *_LEAST])
    table = service.lookup_table(path)
    lookup = table.lookup
    columns = column_names(query.get("columns"), lookup.info)
    limit = integer("limit", query.get("limit", str(_PREFIX_LIMIT_DEFAULT)), least=1)
    form = accepted_form(exchange)
    rows_max, bytes_max = service.config.lookup_rows_max, service.answers.answer_bytes_max
    with service.body_memory.body(exchange.share) as memory:
        prefixes = await _keys(exchange, service, table, memory, what="prefix lookup")
        await _wait_for_least(exchange, service, table, query)
        if limit * prefixes.num_rows > rows_max:
            raise RequestTooLargeError(
                f"prefix lookup in '{table.path}': {prefixes.num_rows} prefixes of up to {limit}"
                f" rows; at most {rows_max} rows together (lookup_rows_max)"
            )

        def look_up() -> _Answer:
            answer = lookup.prefix_rows(prefixes, rows_max=limit, bytes_max=bytes_max)
            return _packed(answer, columns, form)

        packed = await service.answers.build(exchange, 0, lambda _: service.run_blocking(look_up))
    await _answer_rows(exchange, service, table, packed, form, query, lookup)


async def answer_count(exchange: HttpExchange, service: RequestService, *, path: str) -> None:
    """Answer the exact number of rows, as a consistent count over all buckets."""
    exchange.query(())
    await exchange.answer_json({"count": service.lookup_table(path).count_rows()})


async def _keys(
    exchange: HttpExchange,
    service: RequestService,
    table: LookupTable,
    memory: HeldBody,
    *,
    what: str,
) -> pa.RecordBatch:
    """Receive the keys of a request; `memory` counts the body's memory."""
    config = service.config
    content_type = exchange.header(b"content-type")
    form = None if content_type is None or content_type == ARROW_STREAM else text_form(content_type)
    if form is not None:
        exchange.body = form
        body = await exchange.read_body(memory)
        where = f"{what} in '{table.path}'"
        return await service.run_blocking(key_rows, body, form, table.lookup.info, where)
    exchange.text_bodies = TEXT_BODIES
    stream = open_request(
        await exchange.read_body(memory),
        what=f"{what} in '{table.path}'",
        rows_max=config.lookup_keys_max,
        batch_bytes_max=config.batch_bytes_max,
        batches_max=config.append_batches_max,
    )
    batches = [read.batch for read in stream.batches()]
    if len(batches) == 1:
        return batches[0]
    if batches:
        return pa.concat_batches(batches)
    return empty_batch(stream.schema)


async def _wait_for_least(
    exchange: HttpExchange, service: RequestService, table: LookupTable, query: Mapping[str, str]
) -> None:
    """Return once the table shows the offsets of `at_least`; call after the read of the body."""
    if "at_least" not in query:
        return
    text = query["at_least"]
    read = _kept_least if len(text) <= _LEAST_KEPT_CHARACTERS_MAX else _least_of
    info = Same(table.lookup.info)
    least = read(info, text, query.get("table_id"), query.get("schema_id"))
    if not table.shows(least):
        await service.wait_until_visible(exchange, table, least)


def _least_of(
    table: Same, at_least: str, stated_table: str | None, schema_id: str | None
) -> Mapping[int, int]:
    schema_version(schema_id, table.value)
    stated_id = table_id({} if stated_table is None else {"table_id": stated_table})
    return offsets("at_least", at_least, table.value, table_id=stated_id)


# A client that only reads repeats its parameters, and reading them takes a tenth of a small lookup.
_kept_least = functools.lru_cache(maxsize=1_024)(_least_of)


async def _show(
    exchange: HttpExchange,
    service: RequestService,
    table: LookupTable,
    ends: Mapping[int, int],
    query: Mapping[str, str],
) -> Headers:
    """Return the answer's headers once all rows up to `ends` are visible, normally at once."""
    stage_ended("find")
    if not table.shows(ends):
        await service.wait_until_visible(exchange, table, ends)
    if "at_least" not in query:
        return ()
    if len(ends) == 1:
        ((bucket, end),) = ends.items()
        included = b'{"%d": %d}' % (bucket, end)
    else:
        included = json.dumps(buckets_to_json(ends)).encode()
    return (*service.read_headers, (INCLUDED_HEADER, included))


def _packed(answer: KeyAnswer, columns: Sequence[str] | None, form: LogForm) -> _Answer:
    """Return the rows as an Arrow stream or text; the result does not refer to stored rows."""
    rows = answer.rows if columns is None else answer.rows.select(list(columns))
    if form is not LogForm.ARROW:
        pieces = looked_up_text(rows, answer.more, form)
        return _Answer(pieces, answer.ends, rows.num_rows, sum(map(len, pieces)))
    metadata = {MORE_KEY: json.dumps(list(answer.more))} if answer.more else None
    pieces = as_views(
        [
            rows.schema.with_metadata(metadata).serialize(),
            rows.serialize(),
            ipc_message.END_OF_STREAM,
        ]
    )
    return _Answer(pieces, answer.ends, rows.num_rows, sum(map(len, pieces)))


async def _answer_rows(
    exchange: HttpExchange,
    service: RequestService,
    table: LookupTable,
    answer: _Answer,
    form: LogForm,
    query: Mapping[str, str],
    lookup: KeyLookup,
) -> None:
    included = await _show(exchange, service, table, answer.ends, query)
    # The version of the answer's columns: no later answer is to have older ones.
    headers = ((VERSION_HEADER, lookup.info.version), *included)
    service.metrics.count_sent(row_count=answer.row_count, byte_count=answer.byte_count)
    await exchange.answer(200, form.value, answer.pieces, headers=headers)
