"""Reads: pages and exact ranges of the log, and rows by key."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from streamhouse.client._json_rows import JsonRows
from streamhouse.client.http._transport import HttpTransport
from streamhouse.client.positions._reached_offsets import ReachedOffsets
from streamhouse.client.values._python_rows import keys_as_arrow
from streamhouse.client.values.arguments import names
from streamhouse.client.writing._request_batches import bounded_batches, plain
from streamhouse.core.errors import (
    CorruptDataError,
    RequestTooLargeError,
    SchemaMismatchError,
    UnsupportedError,
)
from streamhouse.core.model.identity import Same
from streamhouse.core.model.offsets import Offset, buckets_to_json, table_of_offsets
from streamhouse.core.model.schema import FOUND_COLUMN, empty_batch
from streamhouse.core.model.table import VERSION_HEADER, TableInfo, table_id_of
from streamhouse.core.model.values.notebook import html_of_rows
from streamhouse.core.types.logical_type import OutsideOfPythonError
from streamhouse.core.wire.arrow_body import (
    BatchAddress,
    decode_fetch_body,
    encode_append_body,
)

__all__ = [
    "FETCH_BYTES_DEFAULT",
    "LogBatch",
    "cut",
    "fetch",
    "fingerprint_at",
    "lookup",
    "lookup_one",
    "named_columns",
    "named_table",
    "offsets_to_text",
    "prefix_lookup",
    "read_range",
]

FETCH_BYTES_DEFAULT: Final = 8 << 20
_NOT_FOUND: Final = 404


# Not frozen: a frozen value takes a microsecond more, and a fetch makes one for each batch.
@dataclass(slots=True, kw_only=True)
class LogBatch:
    """Consecutive rows of one bucket of `table`.

    Row i of `data` has offset `base_offset + i`. `timestamp_us` is the time at which the rows
    became durable in the service, in microseconds since the epoch; it never decreases within a
    bucket. Offsets carry their table's id (`Offset`).
    """

    bucket: int
    base_offset: int
    timestamp_us: int
    data: pa.RecordBatch
    table: str = ""

    def __repr__(self) -> str:
        return (
            f"LogBatch('{self.table}', bucket {self.bucket}, offsets {self.base_offset} to"
            f" {self.end_offset})"
        )

    def _repr_html_(self) -> str:
        """Return a notebook's view: the first rows."""
        return html_of_rows(repr(self), self.data)

    @property
    def table_id(self) -> int | None:
        """The id of the table, to keep with an offset."""
        return table_of_offsets((self.base_offset,), what="a batch")

    @property
    def end_offset(self) -> int:
        """The offset after the last row."""
        return self.base_offset + int(self.data.num_rows)


def fetch(
    transport: HttpTransport,
    path: str,
    bucket: int,
    offset: int,
    *,
    columns: Sequence[str] | None,
    max_bytes: int,
    max_wait_ms: int,
    end_offset: int | None,
    reached: ReachedOffsets,
    table_id: int | None,
    schema_id: int | None = None,
    are_stored: bool = False,
) -> list[LogBatch]:
    """See `StorageClient.fetch`; without `table_id` no rows are expected below `offset`.

    With `are_stored` the owner has shown rows at `offset`: any process may answer.
    """
    query = {
        **named_table(table_id),
        "offset": str(offset),
        "max_bytes": str(max_bytes),
        **named_columns(columns),
    }
    # Each parameter costs some microseconds.
    if max_wait_ms:
        query["max_wait_ms"] = str(max_wait_ms)
    if end_offset is not None:
        query["end_offset"] = str(end_offset)
    if schema_id is not None:
        query["schema_id"] = str(schema_id)
    if fingerprints := reached.at(path, {bucket: offset}):
        query["fingerprint"] = fingerprints[bucket]
    url = f"/v1/tables/{path}/buckets/{bucket}/fetch"
    answer = transport.fetch_from_any(url, query) if are_stored and table_id is not None else None
    if answer is None:
        answer = transport.request(
            "GET", url, query=query, is_repeatable=True, wait_s=max_wait_ms / 1000
        )
    body = decode_fetch_body(pa.py_buffer(answer.data))
    if body is None:
        raise CorruptDataError(f"fetch of '{path}' bucket {bucket} answered an empty body")
    reached.note(path, body.reached)
    answer_table_id = table_id_of(answer.headers)
    cuts = (
        cut(path, address, batch, start=offset, end=end_offset, table_id=answer_table_id)
        for address, batch in body.batches
    )
    parts = [part for part in cuts if part is not None]
    if parts:
        transport.any_process.note_fetched(bucket, parts[-1].end_offset)
    return parts


def fingerprint_at(
    transport: HttpTransport,
    path: str,
    bucket: int,
    offset: int,
    *,
    table_id: int,
    expected: str | None,
) -> str | None:
    """See `StorageClient.fingerprint_at`."""
    # A fetch that ends where it begins returns only the fingerprint.
    query = {"offset": str(offset), "end_offset": str(offset), **named_table(table_id)}
    if expected is not None:
        query["fingerprint"] = expected
    url = f"/v1/tables/{path}/buckets/{bucket}/fetch"
    answer = transport.request("GET", url, query=query, is_repeatable=True)
    body = decode_fetch_body(pa.py_buffer(answer.data))
    return None if body is None else body.reached.get(bucket, (offset, None))[1]


def read_range(
    transport: HttpTransport,
    path: str,
    bucket: int,
    start: int,
    end: int,
    *,
    columns: Sequence[str] | None,
    page_bytes: int,
    reached: ReachedOffsets,
    table_id: int,
    schema_id: int | None = None,
) -> Iterator[LogBatch]:
    """See `StorageClient.read_range`."""
    position = start
    while position < end:
        page = fetch(
            transport,
            path,
            bucket,
            position,
            columns=columns,
            max_bytes=page_bytes,
            max_wait_ms=0,
            end_offset=end,
            reached=reached,
            table_id=table_id,
            schema_id=schema_id,
            are_stored=True,
        )
        if not page:
            raise CorruptDataError(
                f"table '{path}', bucket {bucket}: no rows at offset {position}, wanted up to {end}"
            )
        for batch in page:
            if batch.base_offset != position:
                raise CorruptDataError(
                    f"table '{path}', bucket {bucket}: rows at {batch.base_offset} follow offset"
                    f" {position}"
                )
            position = batch.end_offset
            yield batch


def cut(
    path: str,
    address: BatchAddress,
    batch: pa.RecordBatch,
    *,
    start: int,
    end: int | None,
    table_id: int | None,
) -> LogBatch | None:
    """Return the part of a stored batch in [start, end), or None if it is empty."""
    first = max(start - address.base_offset, 0)
    last = address.row_count if end is None else min(end - address.base_offset, address.row_count)
    if first >= last:
        return None
    is_whole = first == 0 and last == address.row_count
    base_offset = address.base_offset + first
    return LogBatch(
        table=path,
        bucket=address.bucket,
        base_offset=base_offset if table_id is None else Offset(base_offset, table_id),
        timestamp_us=address.timestamp_us,
        data=batch if is_whole else batch.slice(first, last - first),
    )


def offsets_to_text(offsets: Mapping[int, int]) -> str:
    """Return bucket -> offset as the JSON object of query parameters."""
    return json.dumps(buckets_to_json(offsets))


def lookup(
    transport: HttpTransport,
    path: str,
    keys: pa.Table | pa.RecordBatch,
    *,
    columns: Sequence[str] | None = None,
    table: TableInfo | None = None,
) -> pa.Table:
    """See `StorageClient.lookup`; with `table` any process may answer."""
    batches = list(bounded_batches(keys)) or [_whole(keys)]
    url, query = f"/v1/tables/{path}/lookup", named_columns(columns)
    tables = [_post_keys(transport, url, query, rows, table=table) for rows in batches]
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables)


def prefix_lookup(
    transport: HttpTransport,
    path: str,
    keys: pa.Table | pa.RecordBatch,
    *,
    limit: int,
    columns: Sequence[str] | None,
    table: TableInfo | None = None,
) -> pa.Table:
    """See `StorageClient.prefix_lookup`; with `table` any process may answer."""
    query = {"limit": str(limit), **named_columns(columns)}
    url = f"/v1/tables/{path}/prefix_lookup"
    answer = _post_keys(transport, url, query, _whole(keys), table=table)
    return answer.replace_schema_metadata(None)


def lookup_one(
    transport: HttpTransport,
    table: TableInfo,
    key: Mapping[str, Any],
    *,
    describe: Callable[[], TableInfo],
) -> dict[str, Any] | None:
    """See `StorageClient.lookup_one`; `describe` is called when `table` is stale."""
    name = str(table.path)
    _check_key(table, key)
    form = _form_of(Same(table))
    part = form.url_part(key)
    if part is None:
        keys = _key_of(table, key)
        part = form.url_part_of_plain(keys)
        if part is None:
            return _lookup_one_by_batch(transport, table, keys, key)
    url = f"/v1/tables/{name}/rows/{part}"
    answer = transport.read("GET", url, table=table, accepted_statuses=(_NOT_FOUND,))
    if answer.headers.get(VERSION_HEADER) != table.version:
        # In another schema version the URL may name another row, and a value may differ.
        table = describe()
        _check_key(table, key)
        return _lookup_one_by_batch(transport, table, _key_of(table, key), key)
    if answer.status == _NOT_FOUND:
        return None
    try:
        return form.row(answer.data)
    except OutsideOfPythonError as error:
        raise _outside_of_python(name, key) from error
    except (ValueError, TypeError) as error:
        raise CorruptDataError(f"{url}: the answer is no row of the table: {error}") from error


def _lookup_one_by_batch(
    transport: HttpTransport, table: TableInfo, keys: pa.RecordBatch, key: Mapping[str, Any]
) -> dict[str, Any] | None:
    name = str(table.path)
    answer = lookup(transport, name, keys, table=table)
    try:
        row: dict[str, Any] = answer.to_pylist()[0]
    except (OverflowError, ValueError) as error:
        raise _outside_of_python(name, key) from error
    return row if row.pop(FOUND_COLUMN) else None


@functools.lru_cache(maxsize=256)
def _form_of(table: Same) -> JsonRows:
    return JsonRows(table.value)


def _check_key(table: TableInfo, key: Mapping[str, Any]) -> None:
    """Raise unless `key` has the key columns of `table`."""
    if not table.is_primary_key_table:
        raise UnsupportedError(
            f"table '{table.path}' has no primary key: cannot look up rows in it"
        )
    key_columns = table.descriptor.primary_key
    if key.keys() != set(key_columns):
        raise SchemaMismatchError(
            f"table '{table.path}': lookup_one takes the key columns ({', '.join(key_columns)}),"
            f" not ({', '.join(key)})"
        )


def _key_of(table: TableInfo, key: Mapping[str, Any]) -> pa.RecordBatch:
    name = str(table.path)
    schema = table.schema.select(table.descriptor.primary_key, table=name).to_arrow()
    try:
        return pa.RecordBatch.from_pylist([dict(key)], schema=schema)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        # Names the column and its type.
        return keys_as_arrow(table, [key])


def _outside_of_python(name: str, key: Mapping[str, Any]) -> UnsupportedError:
    return UnsupportedError(
        f"table '{name}': the row {key} has a date or timestamp outside of the years 1 to"
        " 9999, which Python cannot hold; use lookup, which answers Arrow"
    )


def named_columns(columns: Sequence[str] | None) -> dict[str, str]:
    """Return the query parameter with the requested columns."""
    if columns is None:
        return {}
    return {"columns": json.dumps(names(columns, argument="columns"))}


def named_table(table_id: int | None) -> dict[str, str]:
    """Return the query parameter with the table id of offsets."""
    return {} if table_id is None else {"table_id": str(table_id)}


def _post_keys(
    transport: HttpTransport,
    url: str,
    query: Mapping[str, str],
    keys: pa.RecordBatch,
    *,
    table: TableInfo | None = None,
) -> pa.Table:
    body = encode_append_body(keys.schema, [(None, 0, keys)])
    try:
        answer = transport.read("POST", url, query=query, body=body, table=table)
    except RequestTooLargeError:
        # The size of the rows is unknown before the lookup.
        if keys.num_rows < 2:
            raise
        half = keys.num_rows // 2
        halves = (keys.slice(0, half), keys.slice(half))
        parts = [_post_keys(transport, url, query, part, table=table) for part in halves]
        return pa.concat_tables(parts)
    try:
        return pa.ipc.open_stream(pa.py_buffer(answer.data)).read_all()
    except (pa.ArrowException, OSError) as error:
        raise CorruptDataError(f"{url}: the answer is no Arrow stream: {error}") from error


def _whole(keys: pa.Table | pa.RecordBatch) -> pa.RecordBatch:
    if isinstance(keys, pa.RecordBatch):
        return plain(keys)
    batches = keys.combine_chunks().to_batches()
    return plain(batches[0] if batches else empty_batch(keys.schema))
