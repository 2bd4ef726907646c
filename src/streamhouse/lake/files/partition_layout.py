"""How rows of a bucket fall into lake partitions: the fields of the spec, and their values by row.

Values are what Iceberg stores: days since the epoch for dates, microseconds for timestamps.
Everything is computed a column at a time by Iceberg's own transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.core.model.lake.limits import time_units
from streamhouse.core.model.lake.partition_fields import (
    LakePartitionField,
)
from streamhouse.core.model.partitioning import Clustering
from streamhouse.core.model.schema import BUCKET_COLUMN
from streamhouse.core.model.table import TableDescriptor
from streamhouse.core.model.values.numpy_arrays import integer_array, integer_values
from streamhouse.core.types.registry import type_of

__all__ = [
    "PartitionValues",
    "lake_clustering",
    "split_by_partition",
]

PartitionValues = tuple[Any, ...]
"""One value per field of the partitioning, None where the source is null."""


def lake_clustering(descriptor: TableDescriptor, *, role: LakeRole) -> Clustering:
    """Return the order of rows in a file: only a batch layout has an order."""
    layout = descriptor.batch_layout() if role is LakeRole.BATCH else None
    return Clustering() if layout is None else layout.clustering


def split_by_partition(
    rows: pa.Table, fields: Sequence[LakePartitionField], *, bucket: int
) -> Iterator[tuple[PartitionValues, pa.Table]]:
    """Yield the rows of each partition, in their order; `rows` are all of one bucket.

    Rows of a single partition are passed on unchanged; otherwise each part owns its memory: a small
    part keeps no large table alive.
    """
    columns = [
        None if f.source == BUCKET_COLUMN else _values(rows.column(f.source), f) for f in fields
    ]
    varying = [column for column in columns if column is not None]
    if not varying or rows.num_rows == 0:
        if rows.num_rows:
            yield tuple(bucket for _ in fields), rows
        return
    encoded = [_encode(column) for column in varying]
    codes = encoded[0][0]
    for column_codes, dictionary in encoded[1:]:
        codes = codes * (len(dictionary) + 1) + column_codes
        # Renumbering keeps the product of many fields within 64 bits.
        codes = np.unique(codes, return_inverse=True)[1].astype(np.int64)
    _, first_rows, counts = np.unique(codes, return_index=True, return_counts=True)
    order = None if len(counts) == 1 else np.argsort(codes, kind="stable")
    start = 0
    for first_row, end in zip(first_rows.tolist(), np.cumsum(counts).tolist(), strict=True):
        values = iter([dictionary[int(code[first_row])] for code, dictionary in encoded])
        partition = tuple(bucket if column is None else next(values) for column in columns)
        part = rows if order is None else rows.take(integer_array(order[start:end], pa.int64()))
        yield partition, part
        start = end


def _encode(column: pa.Array) -> tuple[np.ndarray[Any, np.dtype[np.int64]], list[Any]]:
    """Return a number per row and the value each number stands for, null included."""
    encoded = column.dictionary_encode(null_encoding="encode")
    return integer_values(encoded.indices).astype(np.int64), encoded.dictionary.to_pylist()


def _values(column: pa.ChunkedArray, field: LakePartitionField) -> pa.Array:
    """Return the field's value of every row, in Iceberg's own representation."""
    source = column.combine_chunks()
    if isinstance(source, pa.ChunkedArray):
        source = pa.concat_arrays(source.chunks)
    return _TRANSFORMS[field.transform](_aligned(source), field.parameter)


def _identity(source: pa.Array, _: int | None) -> pa.Array:
    if pa.types.is_date32(source.type):
        return source.view(pa.int32())
    return source.view(pa.int64()) if pa.types.is_timestamp(source.type) else source


def _bucket(source: pa.Array, parameter: int | None) -> pa.Array:
    # The transforms have no stubs and their package no pyiceberg: it costs 3 ms to import.
    from pyiceberg_core import transform  # noqa: PLC0415 - pyiceberg_core is for transforms alone

    return transform.bucket(source, parameter)


def _truncate(source: pa.Array, width: int | None) -> pa.Array:
    """Return Iceberg's `truncate`, never below the lowest value of the type.

    Iceberg's own libraries wrap a lower result around to the highest values, or fail.
    """
    from pyiceberg_core import transform  # noqa: PLC0415 - pyiceberg_core is for transforms alone

    assert width is not None
    least = type_of(source.type).least
    if least is None:
        return transform.truncate(source, width)
    low = pa.scalar(least, source.type)
    truncated = transform.truncate(source, width)
    # A truncated value is above its source only after a wrap-around.
    is_wrapped = pc.or_(pc.greater(truncated, source), pc.less(truncated, low))
    return pc.if_else(is_wrapped, low, truncated)


def _time_unit(unit: str) -> Callable[[pa.Array, int | None], pa.Array]:
    """Return the transform to whole units since 1970.

    Iceberg's library knows the years -262143 to 262142 only and gives null for others, and wraps
    hours around in 32 bits. An hour beyond 32 bits becomes the nearest.
    """

    def transform(source: pa.Array, _: int | None) -> pa.Array:
        stored = source.view(type_of(source.type).stored_view)
        numbers = integer_values(stored.fill_null(0)).astype(np.int64)
        units = time_units(numbers, source.type, unit)
        return pc.if_else(
            source.is_valid(), integer_array(units, pa.int32()), pa.scalar(None, pa.int32())
        )

    return transform


_TRANSFORMS: Final[dict[str, Callable[[pa.Array, int | None], pa.Array]]] = {
    "identity": _identity,
    "bucket": _bucket,
    "truncate": _truncate,
    **{unit: _time_unit(unit) for unit in ("year", "month", "day", "hour")},
}


def _aligned(column: pa.Array) -> pa.Array:
    """Return a column at aligned addresses: Iceberg's library panics at others.

    Arrow itself reads any address, and columns of a message have any, decimals mostly multiples of
    eight bytes.
    """
    bytes_ = 16 if pa.types.is_decimal(column.type) else 8
    if all(buffer is None or buffer.address % bytes_ == 0 for buffer in column.buffers()):
        return column
    # Concatenation with an empty slice copies the column.
    return pa.concat_arrays([column, column.slice(0, 0)])
