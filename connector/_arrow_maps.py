"""PySpark's `mapInArrow` for columns of any name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

__all__ = ["mapped_in_arrow"]


def mapped_in_arrow(
    frame: DataFrame,
    function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: StructType | str,
) -> DataFrame:
    """Return `frame.mapInArrow`; the frame's columns may have a dot in their names.

    PySpark itself does not find such a column.
    """
    names = frame.columns

    def named(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return function(batch.rename_columns(names) for batch in batches)

    return frame.toDF(*map(str, range(len(names)))).mapInArrow(named, schema)
