"""Rows by key: upsert, delete, look up, count."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from streamhouse.storage_service.client.append_writer import AppendWriter, WriterPool
from streamhouse.storage_service.client.request_batches import (
    bounded_batches,
    plain,
    rows_by_bucket,
)
from streamhouse.storage_service.client.transport import HttpTransport
from streamhouse.storage_service.errors import (
    CorruptDataError,
    InvalidRequestError,
    NotFoundError,
    RequestTooLargeError,
    SchemaMismatchError,
    UnknownColumnError,
    UnsupportedError,
)
from streamhouse.storage_service.model.conform import check_schema
from streamhouse.storage_service.model.schema import CHANGE_TYPE_COLUMN, FOUND_COLUMN
from streamhouse.storage_service.model.schema_change import in_current_version, version_of
from streamhouse.storage_service.model.table import TableInfo, TablePath
from streamhouse.storage_service.wire.arrow_body import encode_append_body

__all__ = ["KeyValueCalls"]

_T = TypeVar("_T")


class KeyValueCalls:
    """The calls of `StorageClient` for primary key tables."""

    _transport: HttpTransport
    _tables: dict[TablePath, TableInfo]

    def __init__(self) -> None:
        self._writers = WriterPool()

    def describe_table(self, path: str) -> TableInfo:
        """Return the table; `StorageClient` does."""
        raise NotImplementedError

    def upsert(
        self,
        path: str,
        data: pa.Table | pa.RecordBatch,
        *,
        columns: Sequence[str] | None = None,
        writer: AppendWriter | None = None,
    ) -> dict[int, tuple[int, int]]:
        """Insert rows, and replace those with the same primary key; on return that is visible.

        Columns are matched by name. Rows of one key take effect in their order. Large data is sent
        in several requests, each of them atomic. Retries inside the call apply nothing twice.

        Args:
            data: rows; a column `__change_type` (`+I`, `-U`, `+U`, `-D`, or Debezium's `c`, `r`,
                `u`, `d`) makes it a change stream, whose `-D` rows delete.
            columns: update only these columns, the key among them: existing rows keep the others,
                new rows have null there. `data` has exactly these columns.
            writer: as for `append`.

        Returns:
            bucket -> (start, end) of the changes in the changelog, for the buckets rows went to; an
            empty range where no row was different.

        Raises:
            SchemaMismatchError, UnknownColumnError: nothing of the request in question is applied.
        """
        query = {} if columns is None else {"columns": json.dumps(list(columns))}

        def send(table: TableInfo) -> dict[int, tuple[int, int]]:
            self._check_upsert(table, data.schema, columns)
            return self._write(table, data, verb="upsert", query=query, writer=writer)

        return self._with_table(path, send)

    def delete(
        self,
        path: str,
        keys: pa.Table | pa.RecordBatch,
        *,
        writer: AppendWriter | None = None,
    ) -> dict[int, tuple[int, int]]:
        """Delete the rows with these keys, those that exist; `keys` has the key columns only.

        Otherwise as `upsert`.
        """

        def send(table: TableInfo) -> dict[int, tuple[int, int]]:
            _check_key_table(table, "delete from")
            check_schema(keys.schema, _key_schema(table), table=str(table.path))
            return self._write(table, keys, verb="delete", query={}, writer=writer)

        return self._with_table(path, send)

    def lookup(
        self, path: str, keys: pa.Table | pa.RecordBatch, *, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return one row for each key, in the order of `keys`, all null where there is none.

        The column `__found` says which are there. Acknowledged writes are seen.
        """
        query = {} if columns is None else {"columns": json.dumps(list(columns))}
        parsed = TablePath.parse(path)
        batches = list(bounded_batches(keys)) or [_whole(keys)]
        answers = [self._ask(f"/v1/tables/{parsed}/lookup", query, rows) for rows in batches]
        return pa.concat_tables(answers)

    def lookup_one(self, path: str, **key: Any) -> dict[str, Any] | None:
        """Return the row with this key, as in `lookup_one("airlines", carrier="UA")`, or None."""

        def ask(table: TableInfo) -> dict[str, Any] | None:
            _check_key_table(table, "look up rows in")
            schema = _key_schema(table).to_arrow()
            if set(key) != set(schema.names):
                raise SchemaMismatchError(
                    f"table '{table.path}': lookup_one takes the key columns"
                    f" ({', '.join(schema.names)}), not ({', '.join(key)})"
                )
            try:
                keys = pa.RecordBatch.from_pylist([key], schema=schema)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise SchemaMismatchError(
                    f"table '{table.path}': the key {key} does not fit its columns: {error}"
                ) from error
            found = self.lookup(str(table.path), keys)
            try:
                row: dict[str, Any] = found.to_pylist()[0]
            except (OverflowError, ValueError) as error:
                raise UnsupportedError(
                    f"table '{table.path}': the row {key} has a date or timestamp outside of the"
                    " years 1 to 9999, which Python cannot hold; use lookup, which answers Arrow"
                ) from error
            return row if row.pop(FOUND_COLUMN) else None

        return self._with_table(path, ask)

    def prefix_lookup(
        self,
        path: str,
        keys: pa.Table | pa.RecordBatch,
        *,
        limit: int = 1_000,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """Return the rows whose leading key columns equal a row of `keys`, in key order.

        Prefix after prefix, at most `limit` rows of each.
        """
        query = {"limit": str(limit)}
        if columns is not None:
            query["columns"] = json.dumps(list(columns))
        url = f"/v1/tables/{TablePath.parse(path)}/prefix_lookup"
        return self._ask(url, query, _whole(keys)).replace_schema_metadata(None)

    def count(self, path: str) -> int:
        """Return how many rows the table has, exactly."""
        answer = self._transport.request_json("GET", f"/v1/tables/{TablePath.parse(path)}/count")
        return int(answer["count"])

    def _ask(self, url: str, query: Mapping[str, str], keys: pa.RecordBatch) -> pa.Table:
        body = encode_append_body(keys.schema, [(None, 0, keys)])
        try:
            answer = self._transport.request(
                "POST", url, query=query, body=body, is_repeatable=True
            )
        except RequestTooLargeError:
            # Nobody knows how large the rows are before they are found.
            if keys.num_rows < 2:
                raise
            half = keys.num_rows // 2
            halves = (keys.slice(0, half), keys.slice(half))
            return pa.concat_tables([self._ask(url, query, part) for part in halves])
        try:
            return pa.ipc.open_stream(pa.py_buffer(answer)).read_all()
        except (pa.ArrowException, OSError) as error:
            raise CorruptDataError(f"{url}: the answer is no Arrow stream: {error}") from error

    def _with_table(self, path: str, call: Callable[[TableInfo], _T]) -> _T:
        """Call with what is remembered of the table, and again if that turns out to be stale."""
        known = self._tables.get(TablePath.parse(path))
        try:
            return call(known or self.describe_table(path))
        except (NotFoundError, SchemaMismatchError, UnknownColumnError, InvalidRequestError):
            if known is None or (fresh := self.describe_table(path)) == known:
                raise
            return call(fresh)

    def _check_upsert(
        self, table: TableInfo, given: pa.Schema, columns: Sequence[str] | None
    ) -> None:
        _check_key_table(table, "upsert into")
        name = str(table.path)
        if CHANGE_TYPE_COLUMN in given.names:
            # Deletes alone need no other columns than the key: the service sees which they are.
            return
        if columns is None:
            wanted = table.schema_version(version_of(table, given))
        else:
            wanted = table.schema.select(columns, table=name)
        check_schema(given, wanted, table=name)

    def _write(
        self,
        table: TableInfo,
        data: pa.Table | pa.RecordBatch,
        *,
        verb: str,
        query: Mapping[str, str],
        writer: AppendWriter | None,
    ) -> dict[int, tuple[int, int]]:
        own = writer or self._writers.take(table.table_id)
        offsets: dict[int, tuple[int, int]] = {}
        # A call that fails leaves its writer's sequences unknown: the writer is dropped with it.
        is_whole = verb == "upsert" and not query
        for given in bounded_batches(data):
            rows = in_current_version(table, given) if is_whole else given
            for bucket, span in self._send(table, rows, verb, query, own).items():
                offsets[bucket] = (offsets.get(bucket, span)[0], span[1])
        if writer is None:
            self._writers.give_back(table.table_id, own)
        return offsets

    def _send(
        self,
        table: TableInfo,
        rows: pa.RecordBatch,
        verb: str,
        query: Mapping[str, str],
        writer: AppendWriter,
    ) -> dict[int, tuple[int, int]]:
        by_node: dict[str, list[tuple[int | None, int, pa.RecordBatch]]] = {}
        for bucket, part in rows_by_bucket(table, rows).items():
            parts = by_node.setdefault(table.nodes.get(bucket, ""), [])
            parts.append((bucket, writer.next_sequence(bucket), part))
        offsets: dict[int, tuple[int, int]] = {}
        repeats: list[None] = []
        for node, parts in by_node.items():
            answer = self._transport.request(
                "POST",
                f"/v1/tables/{table.path}/{verb}",
                query={**query, "writer_id": f"{writer.writer_id:x}"},
                body=encode_append_body(rows.schema, parts),
                is_repeatable=True,
                node=node,
                on_repeat=lambda: repeats.append(None),
            )
            for text, (start, end) in json.loads(answer)["buckets"].items():
                offsets[int(text)] = (int(start), int(end))
                # What changed nothing was not stored, and its sequence is still the next.
                if end > start:
                    writer.advance(int(text))
        if repeats and any(start == end for start, end in offsets.values()):
            # An attempt that still arrives may take the sequence: the next write must not have it.
            writer.renew()
        return offsets


def _check_key_table(table: TableInfo, what: str) -> None:
    if not table.is_primary_key_table:
        raise UnsupportedError(f"table '{table.path}' has no primary key: cannot {what} it")


def _key_schema(table: TableInfo) -> Any:
    return table.schema.select(table.descriptor.primary_key, table=str(table.path))


def _whole(keys: pa.Table | pa.RecordBatch) -> pa.RecordBatch:
    if isinstance(keys, pa.RecordBatch):
        return plain(keys)
    batches = keys.combine_chunks().to_batches()
    return plain(batches[0] if batches else pa.RecordBatch.from_pylist([], schema=keys.schema))
