"""What all stream readers share: on executors they are nothing but a way to read splits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from streamhouse.connector.format.spark_errors import spark_iterator_errors
from streamhouse.connector.scan.spark_reader import StreamhousePartition, in_schema
from streamhouse.connector.scan.split_reader import read_split

__all__ = ["SplitStreamReader"]


class SplitStreamReader(DataSourceStreamReader):
    """Reads partitions that carry all they need; `_schema` is that of the rows."""

    _schema: pa.Schema

    def __getstate__(self) -> dict[str, Any]:
        # Tasks need nothing but the schema: each partition carries its context.
        return {"_schema": self._schema}

    @spark_iterator_errors
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one split."""
        assert isinstance(partition, StreamhousePartition)
        assert partition.context is not None, "a stream's partitions carry their context"
        yield from in_schema(read_split(partition.split, partition.context), self._schema)

    def stop(self) -> None:
        """Nothing to do: the connection ends with the process."""
