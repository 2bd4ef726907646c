"""The lineage of rows in format version 3: columns that keep a row's id when the row is moved.

A row has the id `first_row_id` of its file plus its position, and the sequence number of its file,
unless the file's own columns say otherwise (Iceberg spec, "Row Lineage"). A file of rows from other
files has both columns. pyarrow and numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.model.lake.facts import ROW_ID_COLUMN, UPDATED_COLUMN
from streamhouse.core.model.values.numpy_arrays import integer_array
from streamhouse.lake.files._field_ids import FIELD_ID_KEY
from streamhouse.lake.files.projection import FileColumns

__all__ = [
    "FileLineage",
    "lineage_columns",
    "row_ids",
    "with_lineage_fields",
    "with_row_ids",
]

_ROW_ID: Final = pa.field(ROW_ID_COLUMN, pa.int64(), metadata={FIELD_ID_KEY: b"2147483540"})
_UPDATED: Final = pa.field(UPDATED_COLUMN, pa.int64(), metadata={FIELD_ID_KEY: b"2147483539"})


@dataclass(frozen=True, slots=True)
class FileLineage:
    """What the rows of a data file inherit; no id in a file from before format version 3."""

    first_row_id: int | None
    sequence_number: int


def with_lineage_fields(schema: pa.Schema) -> pa.Schema:
    """Return a schema of lake files with the columns of lineage behind its own."""
    return schema.append(_ROW_ID).append(_UPDATED)


def with_row_ids(rows: pa.Table, ids: pa.Array) -> pa.Table:
    """Return rows of a new file with both columns: a row without an id is a new row.

    The rows change in the commit of the file, whose sequence number they inherit.
    """
    changed_now = pa.nulls(rows.num_rows, pa.int64())
    return rows.append_column(_ROW_ID, ids).append_column(_UPDATED, changed_now)


def row_ids(rows: pa.Table, first_row_id: int | None, *, first_row: int) -> pa.Array:
    """Return the ids of `rows` of a file; null in a file that has no ids yet.

    The rows have the columns of the file's names. `first_row` is the position of the first of the
    rows in the file.
    """
    count = rows.num_rows
    inherited = (
        pa.nulls(count, pa.int64())
        if first_row_id is None
        else integer_array(
            np.arange(first_row_id + first_row, first_row_id + first_row + count), pa.int64()
        )
    )
    return _stored_or_inherited(rows, _ROW_ID, inherited)


def lineage_columns(rows: pa.Table, lineage: FileLineage, *, first_row: int) -> list[pa.Array]:
    """Return both columns for `rows` of a file, all columns as the file has them.

    `first_row` is the position of the first of the rows in the file.
    """
    inherited = pa.repeat(pa.scalar(lineage.sequence_number, pa.int64()), rows.num_rows)
    return [
        row_ids(rows, lineage.first_row_id, first_row=first_row),
        _stored_or_inherited(rows, _UPDATED, inherited),
    ]


def _stored_or_inherited(rows: pa.Table, field: pa.Field, inherited: pa.Array) -> pa.Array:
    position = FileColumns(rows.schema).position(int(field.metadata[FIELD_ID_KEY]), field.name)
    if position is None:
        return inherited
    return pc.coalesce(rows.column(position).combine_chunks(), inherited)
