"""Rows as JSON texts, by whole columns, with the values of `row_to_json`."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.types.registry import struct_json

__all__ = ["joined", "row_texts", "with_change_names"]

_CHANGES: Final = pa.array([None, "+I", "-U", "+U", "-D"])


def row_texts(rows: pa.RecordBatch) -> pa.LargeStringArray:
    """Return every row as a JSON object."""
    if not rows.num_columns:
        return pa.array(["{}"] * rows.num_rows, pa.large_string())
    return struct_json(rows.schema.names, rows.columns)


def joined(texts: pa.Array, *, separator: str) -> pa.Buffer:
    """Return all texts as one text, with a separator between two."""
    if not len(texts):
        return pa.py_buffer(b"")
    lists = pa.LargeListArray.from_arrays(pa.array([0, len(texts)], pa.int64()), texts)
    return pc.binary_join(lists, pa.scalar(separator, pa.large_string()))[0].as_buffer()


def with_change_names(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with change types as names, in the form that an upsert accepts."""
    position = rows.schema.get_field_index(CHANGE_TYPE_COLUMN)
    if position < 0 or not pa.types.is_integer(rows.schema.field(position).type):
        return rows
    names = _CHANGES.take(rows.column(position))
    return rows.set_column(position, CHANGE_TYPE_COLUMN, names)
