"""Tables of a service as datasets for one statement of DuckDB.

DuckDB asks a table, as an Arrow dataset, for the columns and rows of a statement. DuckDB does not
know the row count of a dataset and joins datasets in any order; an intermediate result may then be
millions of times larger than the final result. For a statement with joins, small tables are read
into memory first, and large tables report their row count.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds

from streamhouse.client import STOP
from streamhouse.core.errors import (
    InvalidPredicateError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.reading.duckdb._arrow_filter import Condition, condition_of
from streamhouse.reading.plan._read_cut import ReadPlan
from streamhouse.reading.plan._splits_read import read_splits
from streamhouse.reading.plan.pinned_table import PinnedTable

__all__ = ["Counted", "TableDataset", "check_not_stopped", "counted"]

SMALL_BYTES: Final = 32 << 20
"""About how large the rows of a table may be that is read into memory as a whole."""

_TEXT_BYTES, _NESTED_BYTES = 24, 64


@dataclass(frozen=True, slots=True)
class Counted:
    """A table with about how many rows it has.

    `rows` are all rows of a small table, read by `plan`; a plan without rows means kept rows.
    """

    row_count: int
    rows: pa.Table | None
    plan: ReadPlan | None = None


def counted(
    table: PinnedTable, columns: Container[str] | None, is_kept: Callable[[ReadPlan], bool]
) -> Counted:
    """Return the approximate row count of a table, and the rows of a small table that is not kept.

    `columns` are in lower case (None: all); at least one column is read.
    """
    check_not_stopped()
    if (described := table.metadata) is not None:
        return Counted(int(described.num_rows), described)
    if columns is not None:
        names = table.schema.names
        table = table.narrowed([n for n in names if n.lower() in columns] or names[:1], None)
    plan = table.plan()
    if is_kept(plan):
        return Counted(0, None, plan)
    count = sum(piece.row_count for split in plan.splits for piece in split.pieces)
    schema = plan.context.output_schema
    if count * sum(map(_width, schema.types)) > SMALL_BYTES:
        return Counted(count, None)
    rows = pa.Table.from_batches(read_splits(table.client, plan), schema=schema)
    return Counted(rows.num_rows, rows, plan)


def check_not_stopped() -> None:
    """Raise `UnavailableError` if the caller has cancelled the query."""
    stop = STOP.get()
    if stop is not None and stop.is_set():
        raise UnavailableError("query: it was broken off")


def _width(data_type: pa.DataType) -> int:
    try:
        return int(data_type.bit_width) // 8 + 1
    except ValueError:
        return _NESTED_BYTES if pa.types.is_nested(data_type) else _TEXT_BYTES


class TableDataset(ds.Dataset):  # type: ignore[misc]  # pyarrow has no types
    """A table as a dataset, which DuckDB asks for columns and rows.

    DuckDB relies on the conditions given to `scanner`, and does not filter again.
    """

    def __init__(self, table: PinnedTable) -> None:
        # No dataset of pyarrow's own is behind this one.
        self._table = table
        # DuckDB asks from threads of its own, which have no context of ours.
        self._stop = STOP.get()
        self.failure: StreamhouseError | None = None

    @property
    def schema(self) -> pa.Schema:
        return self._table.schema

    def scanner(
        self,
        columns: Sequence[str] | None = None,
        filter: Any = None,  # noqa: A002 - pyarrow's name
        **_: Any,
    ) -> _TableScanner:
        names = self.schema.names if columns is None else list(columns)
        return _TableScanner(pa.schema([self.schema.field(name) for name in names]), self, filter)

    def batches(self, schema: pa.Schema, condition: Any) -> Generator[pa.RecordBatch]:
        try:
            rows, is_exact = self._planned(schema, condition)
            with closing(rows):
                for batch in rows:
                    if self._stop is not None and self._stop.is_set():
                        return
                    columns = batch.select(schema.names)
                    yield columns if is_exact else columns.filter(condition)
        except StreamhouseError as error:
            self.failure = error
            raise

    def _planned(self, schema: pa.Schema, kept: Any) -> tuple[Generator[pa.RecordBatch], bool]:
        everything = Condition(None, is_exact=kept is None)
        condition = everything if kept is None else condition_of(str(kept), schema)
        try:
            narrowed = self._table.narrowed(schema.names, condition.where)
            return narrowed.batches(), condition.is_exact
        except InvalidPredicateError:
            return self._table.narrowed(schema.names, None).batches(), kept is None


class _TableScanner:
    """The result of `Dataset.scanner`, with the methods that DuckDB uses."""

    def __init__(self, schema: pa.Schema, dataset: TableDataset, condition: Any) -> None:
        self._schema = schema
        self._dataset = dataset
        self._kept = condition

    def to_reader(self) -> pa.RecordBatchReader:
        batches = self._dataset.batches(self._schema, self._kept)
        return pa.RecordBatchReader.from_batches(self._schema, batches)
