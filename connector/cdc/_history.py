"""Slowly changing dimensions, type 2: every version of every row, with the time of its validity.

The rows come from `table$changelog`. One write has one time. If one write changes a key several
times, only the last change is a version: no reader ever saw the earlier changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from streamhouse.core.errors import InvalidRequestError, UnknownColumnError
from streamhouse.core.model.schema import (
    BUCKET_COLUMN,
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
)
from streamhouse.reading.options.quoted_names import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["scd2"]

_NEEDED: Final = (CHANGE_TYPE_COLUMN, BUCKET_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN)
_ADDED: Final = ("valid_from", "valid_to", "is_current")


def scd2(changes: DataFrame, keys: Sequence[str] | str) -> DataFrame:
    """Return the versions of all rows of a changelog, as a batch.

    Args:
        changes: `spark.read.format("streamhouse").load("db.table$changelog")`, or a part of it.
        keys: the table's primary key columns.

    Returns:
        the table's columns, then `valid_from` (inclusive), `valid_to` (exclusive, null for the
        current version) and `is_current`. A deleted row has no current version.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    names = [keys] if isinstance(keys, str) else list(keys)
    _check(changes, names)
    data = [name for name in changes.columns if name not in _NEEDED]
    # A key stays in one bucket, and offsets order the changes of a bucket.
    order = Window.partitionBy(*[f.col(quoted(name)) for name in names]).orderBy(
        BUCKET_COLUMN, OFFSET_COLUMN
    )
    # The old row (-U) adds nothing to the change that replaces it.
    new_rows = changes.where(f.col(CHANGE_TYPE_COLUMN) != "-U")
    versions = new_rows.select(
        *[f.col(quoted(name)) for name in data],
        f.col(TIMESTAMP_COLUMN).alias("valid_from"),
        f.lead(TIMESTAMP_COLUMN).over(order).alias("valid_to"),
        f.col(CHANGE_TYPE_COLUMN).alias(CHANGE_TYPE_COLUMN),
    )
    is_version = (f.col(CHANGE_TYPE_COLUMN) != "-D") & (
        f.col("valid_to").isNull() | (f.col("valid_to") != f.col("valid_from"))
    )
    return versions.where(is_version).select(
        *[f.col(quoted(name)) for name in data],
        "valid_from",
        "valid_to",
        f.col("valid_to").isNull().alias("is_current"),
    )


def _check(changes: DataFrame, keys: Sequence[str]) -> None:
    if changes.isStreaming:
        raise InvalidRequestError(
            "scd2 orders all changes of a key, which a stream cannot: call it with a batch, inside"
            " foreachBatch or over spark.read"
        )
    missing = [name for name in _NEEDED if name not in changes.columns]
    if missing:
        raise UnknownColumnError(
            f"scd2 takes the rows of 'table$changelog', and column '{missing[0]}' is missing"
            f" (columns: {', '.join(changes.columns)})"
        )
    for name in keys:
        if name not in changes.columns:
            raise UnknownColumnError(
                f"scd2: the changes have no key column '{name}'"
                f" (columns: {', '.join(changes.columns)})"
            )
    if not keys:
        raise InvalidRequestError("scd2 needs the primary key columns, as in keys=['id']")
    clashing = [name for name in _ADDED if name in changes.columns]
    if clashing:
        raise InvalidRequestError(
            f"scd2 adds column '{clashing[0]}', which the table has: rename it"
        )
