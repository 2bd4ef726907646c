"""What a task does to Spark's batches before they are sent: the table's types, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from streamhouse.storage_service.errors import SchemaMismatchError
from streamhouse.storage_service.model.schema import (
    BUCKET_COLUMN,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
)

__all__ = ["CHANGELOG_COLUMNS", "RowShape"]

CHANGELOG_COLUMNS = frozenset({BUCKET_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN})
"""What rows of a `$changelog` carry besides the table's columns and their change type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """How rows leave a task: `types` of the columns by name, without those in `dropped`.

    `filled` are columns that the rows lack; they become null.
    """

    types: pa.Schema
    dropped: frozenset[str] = frozenset()
    filled: tuple[pa.Field, ...] = ()

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the batch to send.

        Timestamps arrive labelled with the session's time zone; the instants are right, and the
        label becomes the table's.
        """
        arrays, fields = [], []
        for field, array in zip(batch.schema, batch.columns, strict=True):
            if field.name in self.dropped:
                continue
            position = self.types.get_field_index(field.name)
            wanted = array.type if position < 0 else self.types.field(position).type
            try:
                arrays.append(array if array.type == wanted else array.cast(wanted))
            except pa.ArrowInvalid as error:
                raise SchemaMismatchError(f"column '{field.name}': {error}") from error
            fields.append(pa.field(field.name, wanted))
        for field in self.filled:
            arrays.append(pa.nulls(batch.num_rows, field.type))
            fields.append(field)
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
