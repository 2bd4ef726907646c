"""Changes in Spark's form: `_change_type`, `_commit_version` and `_commit_timestamp`.

The columns are made of the columns of our changelog, row by row, as rows are read: nothing is
stored twice. Net changes are one change a key, of all changes of a split: all changes of a key are
in one split, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.model.changelog import (
    APPEND,
    CHANGE_TYPE_NAMES,
    DELETE,
    INSERT,
    UPDATE_AFTER,
    UPDATE_BEFORE,
)
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN, TIMESTAMP_COLUMN
from streamhouse.reading.scan.scan import ScanContext

__all__ = ["in_spark_form"]

_SPARK_NAMES: Final = {
    True: ("insert", "insert", "update_preimage", "update_postimage", "delete"),
    False: ("insert", "insert", "delete", "insert", "delete"),
}
"""The names by our codes, with and without updates."""
_FOLDED_ROWS_MIN: Final = 200_000
_ROW: Final = "__row"


def in_spark_form(
    batches: Iterable[pa.RecordBatch], context: ScanContext
) -> Iterator[pa.RecordBatch]:
    """Yield the changes with exactly the columns of the result."""
    assert context.change_form is not None
    if context.change_form.net_keys:
        batches = _net_changes(batches, context.change_form.net_keys, context.batch_rows)
    names = pa.array(_SPARK_NAMES[context.change_form.has_updates], pa.string())
    for batch in batches:
        arrays = []
        for column in context.output:
            array = batch.column(column.base or column.name)
            if column.base == CHANGE_TYPE_COLUMN:
                array = names.take(_codes(array))
            elif column.base == TIMESTAMP_COLUMN:
                array = array.cast(column.type)
            arrays.append(array)
        yield pa.RecordBatch.from_arrays(arrays, schema=context.output_schema)


def _codes(names: pa.Array) -> pa.Array:
    return pc.index_in(names, value_set=pa.array(CHANGE_TYPE_NAMES, names.type))


def _net_changes(
    batches: Iterable[pa.RecordBatch], keys: Sequence[str], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    """Yield the net change of each key, in the order of the changes; memory grows with the keys."""
    waiting: list[pa.RecordBatch] = []
    rows, rows_max = 0, _FOLDED_ROWS_MIN
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        if rows > rows_max:
            # Only the first and the last change of a key matter.
            table = pa.Table.from_batches(waiting)
            first, last = _ends(table, keys)
            waiting = table.take(np.unique(np.concatenate([first, last]))).to_batches()
            rows = sum(kept.num_rows for kept in waiting)
            rows_max = max(_FOLDED_ROWS_MIN, 2 * rows)
    if waiting:
        yield from _folded(pa.Table.from_batches(waiting), keys).to_batches(batch_rows)


def _folded(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Return the net changes of a table: Spark's matrix of whether a row existed before and after.

    A row that neither existed nor exists has no change; one that did both is an update, even if its
    values are the same again.
    """
    first, last = _ends(table, keys)
    codes = _codes(table.column(CHANGE_TYPE_COLUMN).combine_chunks()).to_numpy()
    existed = np.isin(codes[first], (UPDATE_BEFORE, DELETE))
    exists = np.isin(codes[last], (APPEND, INSERT, UPDATE_AFTER))
    rows = np.concatenate([first[existed], last[exists]])
    kinds = np.concatenate(
        [
            np.where(exists, UPDATE_BEFORE, DELETE)[existed],
            np.where(existed, UPDATE_AFTER, INSERT)[exists],
        ]
    )
    order = np.argsort(rows)
    position = table.schema.get_field_index(CHANGE_TYPE_COLUMN)
    names = pa.array(CHANGE_TYPE_NAMES, pa.string()).take(pa.array(kinds[order]))
    return table.take(rows[order]).set_column(position, table.schema.field(position), names)


def _ends(
    table: pa.Table, keys: Sequence[str]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the rows of the first and of the last change of each key."""
    numbered = table.select(list(keys)).append_column(_ROW, pa.array(np.arange(table.num_rows)))
    ends = numbered.group_by(list(keys), use_threads=False).aggregate(
        [(_ROW, "min"), (_ROW, "max")]
    )
    return ends.column(f"{_ROW}_min").to_numpy(), ends.column(f"{_ROW}_max").to_numpy()
