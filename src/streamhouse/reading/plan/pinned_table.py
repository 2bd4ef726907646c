"""Reading a table without Spark: all at once, batch after batch, or only the number of rows.

A `PinnedTable` is a table at one instant. All reads of it, however many, have the rows of the
instant.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa

from streamhouse.client import StorageClient
from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.table_state import TableState
from streamhouse.core.model.values.notebook import html_of_schema
from streamhouse.reading.options.options import ReadOptions, ShapeOptions
from streamhouse.reading.plan._key_table_read import plan_key_table_changes
from streamhouse.reading.plan._read_cut import ReadPlan
from streamhouse.reading.plan._splits_read import read_splits, stream_splits
from streamhouse.reading.plan.batch_read import plan_batch_read
from streamhouse.reading.plan.iceberg_read import source_state
from streamhouse.reading.plan.metadata_tables import metadata_rows, metadata_schema
from streamhouse.reading.plan.row_count import plan_row_count
from streamhouse.reading.plan.row_form import shape_columns, table_columns
from streamhouse.reading.scan.scan import ScanColumn

__all__ = ["PinnedTable", "TableScan", "count_rows", "read_table", "scan_table"]

_SPLIT_BYTES_MAX: Final = 16 << 20
"""A local file of the lake is mapped while a split of it is read: what was read counts as memory of
the process until then."""


@dataclass(frozen=True, slots=True)
class PinnedTable:
    """A table, or a part of a table, at one instant, with the options of the reads."""

    client: StorageClient
    options: ReadOptions
    state: TableState

    @classmethod
    def of(cls, client: StorageClient, options: ReadOptions) -> PinnedTable:
        """Ask the service how the table is now."""
        name = options.connection.name
        if name.is_iceberg:
            state = source_state(client, name, columns=options.columns)
        else:
            state = client.table_state(str(name.path))
        return cls(client, options, state)

    def narrowed(self, columns: Sequence[str], where: str | None) -> PinnedTable:
        """Return the table with these columns and rows only."""
        return replace(self, options=replace(self.options, columns=tuple(columns), where=where))

    @property
    def metadata(self) -> pa.Table | None:
        """The rows of a table about a table; None for any other."""
        name = self.options.connection.name
        if not name.is_metadata:
            return None
        schema = metadata_schema(name.part, self.options.columns)
        return metadata_rows(self.client, self.state, name.part).select(schema.names)

    @property
    def output(self) -> tuple[ScanColumn, ...]:
        """The columns of the rows."""
        shape = ShapeOptions(
            connection=self.options.connection,
            columns=self.options.columns,
            include_metadata=self.options.include_metadata,
            read_change_feed=None,
            is_spark_form=self.options.change_options is not None,
        )
        return shape_columns(self.state.table, shape)

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the rows."""
        name = self.options.connection.name
        if name.is_metadata:
            return metadata_schema(name.part, self.options.columns)
        return pa.schema([column.to_arrow() for column in self.output])

    def plan(self) -> ReadPlan:
        """Plan reading the rows."""
        return plan_batch_read(self.client, self.state, self.options, self.output)

    def rows(self) -> pa.Table:
        """Read all rows into memory."""
        if (described := self.metadata) is not None:
            return described
        plan = self.plan()
        return pa.Table.from_batches(
            read_splits(self.client, plan), schema=plan.context.output_schema
        )

    def changes_since(self, ends: Mapping[int, int]) -> pa.Table:
        """Read the changes of the keys that were changed from the offsets `ends` on.

        Rows are the table's newer rows and the deleted rows, which differ by `__change_type`, the
        last column; a key with both is in the table. For tables with a primary key. Only the log is
        read: `OffsetOutOfRangeError` says that the log does not have all changes any more.
        """
        assert self.options.columns is not None, "which columns are told"
        output = table_columns(
            self.state.table,
            columns=[*self.options.columns, CHANGE_TYPE_COLUMN],
            include_metadata=False,
            has_change_type=True,
        )
        plan = plan_key_table_changes(self.client, self.state, self.options, output, ends)
        return pa.Table.from_batches(
            read_splits(self.client, plan), schema=plan.context.output_schema
        )

    def batches(self) -> Generator[pa.RecordBatch]:
        """Plan now, and return a generator of the rows, in no particular order."""
        if (described := self.metadata) is not None:
            return (batch for batch in described.to_batches())
        few_bytes = min(self.options.max_split_bytes, _SPLIT_BYTES_MAX)
        plan = replace(self, options=replace(self.options, max_split_bytes=few_bytes)).plan()
        return (batch for _, batch in stream_splits(self.client, plan))


def read_table(client: StorageClient, options: ReadOptions) -> pa.Table:
    """Read a table, or a part of it, into memory."""
    return PinnedTable.of(client, options).rows()


def count_rows(client: StorageClient, options: ReadOptions) -> int:
    """Count the rows of a read; a row is read only if nothing else gives its number."""
    table = PinnedTable.of(client, options)
    if (described := table.metadata) is not None:
        return int(described.num_rows)
    counted = plan_row_count(client, table.state, options)
    uncounted = ReadPlan(context=counted.context, splits=counted.splits)
    read = sum(int(batch.num_rows) for _, batch in stream_splits(client, uncounted))
    return counted.row_count + read


def scan_table(client: StorageClient, options: ReadOptions, *, limit: int | None) -> TableScan:
    """Plan a read whose rows come batch after batch; with `limit` no more rows than that."""
    is_number = isinstance(limit, int) and not isinstance(limit, bool)
    if limit is not None and not (is_number and limit >= 0):
        raise InvalidRequestError(
            f"scan: 'limit' is {limit!r}, but must be a number of rows, 0 or more"
        )
    table = PinnedTable.of(client, options)
    batches = table.batches()
    return TableScan(table.schema, batches if limit is None else _first(batches, limit))


def _first(batches: Generator[pa.RecordBatch], limit: int) -> Generator[pa.RecordBatch]:
    try:
        while limit > 0 and (batch := next(batches, None)) is not None:
            yield batch.slice(0, limit)
            limit -= batch.num_rows
    finally:
        batches.close()


class TableScan:
    """A table's rows as they come, in bounded memory: used as a `pyarrow.RecordBatchReader`.

    All libraries that take Arrow streams take a scan: pyarrow, DuckDB, Polars, pandas. Rows come
    once. Closing a scan early, also by leaving a `with`, ends all reading at once; closing again
    does nothing.

    A scan is no `pyarrow.RecordBatchReader`, because a closed `RecordBatchReader` would keep the
    rows read ahead. `pyarrow.RecordBatchReader.from_stream(scan)` makes a reader of a scan.
    """

    def __init__(self, schema: pa.Schema, batches: Generator[pa.RecordBatch]) -> None:
        self._schema = schema
        self._batches = batches
        self._is_closed = False

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of every batch."""
        return self._schema

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        return self.read_next_batch()

    def read_next_batch(self) -> pa.RecordBatch:
        """Return the next batch; raises `StopIteration` after the last one."""
        if self._is_closed:
            raise InvalidRequestError("this scan is closed; scan the table again")
        return next(self._batches)

    def read_all(self) -> pa.Table:
        """Return all remaining rows as one table."""
        return pa.Table.from_batches(self, schema=self._schema)

    def read_pandas(self, **options: Any) -> Any:
        """Return all remaining rows as a pandas DataFrame; `options` are those of `to_pandas`."""
        return self.read_all().to_pandas(**options)

    def close(self) -> None:
        """End the reading; nothing is open and no row is kept afterwards."""
        self._is_closed = True
        self._batches.close()

    def __enter__(self) -> TableScan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return the remaining rows as a stream of Arrow's C interface."""
        reader = pa.RecordBatchReader.from_batches(self._schema, self)
        return reader.__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the columns, since rows come once."""
        state = "closed" if self._is_closed else "its rows come once: read_all(), read_pandas()"
        return html_of_schema(f"TableScan; {state}", self._schema)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else ", ".join(self._schema.names)
        return f"TableScan({state})"
