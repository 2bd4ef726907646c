"""Spark's side of a batch read: planned when Spark asks for the reader, read split by split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from streamhouse.connector.format.spark_errors import spark_errors, spark_iterator_errors
from streamhouse.connector.scan.scan import ScanContext, Split
from streamhouse.connector.scan.split_reader import read_split

__all__ = ["StreamhouseBatchReader", "StreamhousePartition", "in_schema"]


class StreamhousePartition(InputPartition):
    """One split on its way to a task; streams carry the context along, batch readers share it."""

    def __init__(self, split: Split, context: ScanContext | None = None) -> None:
        super().__init__(None)
        self.split = split
        self.context = context

    def __repr__(self) -> str:
        return f"StreamhousePartition({len(self.split.pieces)} pieces)"


class StreamhouseBatchReader(DataSourceReader):
    """Reads the splits of a finished plan; `schema` is what Spark expects of every batch."""

    def __init__(self, context: ScanContext, splits: Sequence[Split], schema: pa.Schema) -> None:
        self._context = context
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
            yield from in_schema(read_split(partition.split, self._context), self._schema)


def in_schema(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the batches under exactly `schema`: Spark compares names, types and nullability."""
    for batch in batches:
        if batch.schema.equals(schema):
            yield batch
            continue
        arrays = [
            array if array.type.equals(field.type) else array.cast(field.type)
            for array, field in zip(batch.columns, schema, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)
