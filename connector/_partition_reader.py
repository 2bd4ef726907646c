"""Spark's side of reading splits: partitions, the readers on executors, and errors in Spark's form.

Readers of batches and of streams get planned splits; a task reads one split. A stream's partition
carries its scan context; the partitions of a batch share their reader's context.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import VariantVal

from streamhouse.core.errors import SchemaMismatchError, StreamhouseError
from streamhouse.reading.options.options import PLANNED_COLUMN, ROW_COUNT
from streamhouse.reading.scan.scan import ScanContext, Split
from streamhouse.reading.scan.split_reader import read_split

__all__ = [
    "RowCountReader",
    "SplitStreamReader",
    "StreamhouseBatchReader",
    "StreamhousePartition",
    "accept_offered_values",
    "in_schema",
    "spark_errors",
    "spark_iterator_errors",
    "unscaled",
]

# Spark's worker reads this variable when it reports an exception, and nowhere else.
_HIDE_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"

# The module in which Spark's worker turns offered filters into Python values: a named module under
# Spark's daemon, and the main program without the daemon.
_PLANNERS: Final = ("pyspark.sql.worker.data_source_pushdown_filters", "__main__")
_BEYOND_PYTHON: Final = object()

_P = ParamSpec("_P")
_T = TypeVar("_T")


def spark_errors(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Show `StreamhouseError`s of a method called by Spark as a sentence, without a traceback.

    Every unexpected exception is a bug and keeps the traceback.
    """

    @functools.wraps(method)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except StreamhouseError as error:
            raise _shown_error(error) from None

    return wrapped


def spark_iterator_errors(
    method: Callable[_P, Iterator[_T]],
) -> Callable[_P, Iterator[_T]]:
    """Do the work of `spark_errors` for a method whose iterator Spark consumes later."""

    @functools.wraps(method)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> Iterator[_T]:
        try:
            yield from method(*args, **kwargs)
        except StreamhouseError as error:
            raise _shown_error(error) from None

    return wrapped


class _OfferedValue(VariantVal):
    """A literal of a filter that Spark offers; a literal that Python cannot hold equals nothing."""

    def toPython(self) -> Any:
        try:
            return super().toPython()
        except (OverflowError, ValueError, KeyError):
            return _BEYOND_PYTHON


def accept_offered_values() -> None:
    """Make a Spark worker that plans a scan accept filters with any literal.

    PySpark 4.3 turns the literals into Python values before a source sees the filters. The
    conversion fails on a timestamp or date beyond the year 9999, though only Spark evaluates the
    filter. The worker asks for the reader first, so a reader can prevent the failure. A second call
    changes nothing.
    """
    for name in _PLANNERS:
        worker: Any = sys.modules.get(name)
        to_variant = getattr(worker, "deserializeVariant", None)
        if to_variant is None or hasattr(to_variant, "__wrapped__"):
            continue

        @functools.wraps(to_variant)
        def offered(literal: dict[str, Any], to_variant: Any = to_variant) -> VariantVal:
            variant = to_variant(literal)
            return _OfferedValue(variant.value, variant.metadata)

        worker.deserializeVariant = offered


def _shown_error(error: StreamhouseError) -> StreamhouseError:
    os.environ[_HIDE_TRACEBACK] = "1"
    shown = type(error)(f"[{error.code}] {error.message}")
    return shown.with_traceback(error.__traceback__)


class StreamhousePartition(InputPartition):
    """A split on the way to a task; a stream's partition carries the scan context."""

    def __init__(self, split: Split, context: ScanContext | None = None) -> None:
        super().__init__(None)
        self.split = split
        self.context = context

    def __repr__(self) -> str:
        return f"StreamhousePartition({len(self.split.pieces)} pieces)"


class StreamhouseBatchReader(DataSourceReader):
    """Reads the splits of a finished plan; Spark expects `schema` of every batch.

    If `schema` has the column `PLANNED_COLUMN`, the column is the last; the splits lack it.
    """

    def __init__(self, context: ScanContext, splits: Sequence[Split], schema: pa.Schema) -> None:
        self._context = context
        self._is_planned_afresh = schema.names[-1:] == [PLANNED_COLUMN]
        self._schema = schema
        self._splits = splits

    def __getstate__(self) -> dict[str, Any]:
        # Pickled into every task; each task gets its own split from Spark.
        return self.__dict__ | {"_splits": ()}

    @spark_errors
    def partitions(self) -> list[InputPartition]:
        """Return one partition a split."""
        return [StreamhousePartition(split) for split in self._splits]

    @spark_iterator_errors
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one split."""
        # Spark replaces an empty plan by one partition without a value.
        if isinstance(partition, StreamhousePartition):
            rows = read_split(partition.split, self._context, is_beginning=True)
            if self._is_planned_afresh:
                rows = _with_planned(rows)
            yield from in_schema(rows, self._schema)


class _RowCountPartition(InputPartition):
    """A number of rows known without a read."""

    def __init__(self, row_count: int) -> None:
        super().__init__(None)
        self.row_count = row_count


class RowCountReader(StreamhouseBatchReader):
    """Counts rows: `row_count` rows are known from the plan, tasks count the rows of the splits.

    Yields one row a partition, with the number.
    """

    def __init__(
        self, context: ScanContext, splits: Sequence[Split], schema: pa.Schema, *, row_count: int
    ) -> None:
        super().__init__(context, splits, schema)
        self._row_count = row_count

    @spark_errors
    def partitions(self) -> list[InputPartition]:
        """Return a partition for the known rows, and a partition per split."""
        return [_RowCountPartition(self._row_count), *super().partitions()]

    @spark_iterator_errors
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the number of one partition's rows."""
        if isinstance(partition, _RowCountPartition):
            count = partition.row_count
        else:
            assert isinstance(partition, StreamhousePartition)
            rows = read_split(partition.split, self._context, is_beginning=True)
            count = sum(batch.num_rows for batch in rows)
        batch = pa.RecordBatch.from_pydict({ROW_COUNT: [count]})
        batches = iter([batch])
        yield from in_schema(
            _with_planned(batches) if self._is_planned_afresh else batches, self._schema
        )


class SplitStreamReader(DataSourceStreamReader):
    """Reads partitions that carry their context; `_schema` is the schema of the rows."""

    _schema: pa.Schema

    def __getstate__(self) -> dict[str, Any]:
        # A task needs only the schema: each partition carries its context.
        return {"_schema": self._schema}

    @spark_iterator_errors
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one split."""
        assert isinstance(partition, StreamhousePartition)
        assert partition.context is not None, "a stream's partitions carry their context"
        yield from in_schema(read_split(partition.split, partition.context), self._schema)

    def stop(self) -> None:
        """Nothing to do: the connection ends with the process."""


def _with_planned(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches with `PLANNED_COLUMN`, which is true in each row."""
    for batch in batches:
        yield batch.append_column(PLANNED_COLUMN, pa.repeat(True, batch.num_rows))


def in_schema(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the batches under exactly `schema`: Spark compares names, types and nullability."""
    for batch in batches:
        if batch.schema.equals(schema):
            yield batch
            continue
        _check_nulls(batch, schema)
        arrays = [
            _in_type(array, field.type) for array, field in zip(batch.columns, schema, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _in_type(array: pa.Array, data_type: pa.DataType) -> pa.Array:
    if array.type.equals(data_type):
        return array
    if pa.types.is_decimal128(array.type) and pa.types.is_int64(data_type):
        return unscaled(array)
    return array.cast(data_type)


def unscaled(decimals: pa.Decimal128Array) -> pa.Int64Array:
    """Return decimals of up to 18 digits without their point: 1.25 of two decimal places is 125."""
    validity, values = decimals.buffers()
    if values is None:
        return pa.nulls(len(decimals), pa.int64())
    # A decimal is 16 bytes, the lower half first; up to 18 digits the upper half is only the sign.
    words = np.frombuffer(values, dtype="<i8")
    first = 2 * decimals.offset
    numbers = np.ascontiguousarray(words[first : first + 2 * len(decimals) : 2])
    if not decimals.null_count:
        return pa.array(numbers)
    if decimals.offset:
        validity = pa.array(numbers, mask=decimals.is_null().to_numpy(False)).buffers()[0]
    return pa.Array.from_buffers(pa.int64(), len(numbers), [validity, pa.py_buffer(numbers)])


def _check_nulls(batch: pa.RecordBatch, schema: pa.Schema) -> None:
    for field, array in zip(schema, batch.columns, strict=True):
        if not field.nullable and array.null_count:
            raise SchemaMismatchError(
                f"column '{field.name}' was NOT NULL when this DataFrame was loaded, and newer rows"
                " have nulls in it: load it again, or start the stream again"
            )
