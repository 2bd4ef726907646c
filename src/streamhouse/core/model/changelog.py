"""The changelog of a primary key table: its change types, its columns and the retraction rule.

A changelog is the log of a primary key table. Each row is one change: all columns of the table,
then `__change_type` and `__retracts`.

    +I  a new row            -U  the row before an update (only in a full image)
    -D  a deleted row        +U  the row after an update

`__retracts` is the offset of the replaced row version. `+U` and `-D` have a `__retracts`; `-U` has
none, so a cut between a `-U` and its `+U` still shows the old version.

The retraction rule, used by union reads and by tiering: a version `+I` or `+U` at offset p lives
until some change retracts p. The rule never needs a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import CorruptDataError, SchemaMismatchError
from streamhouse.core.model.schema import (
    CHANGE_TYPE_COLUMN,
    RETRACTS_COLUMN,
    Schema,
    type_name,
)
from streamhouse.core.model.values.sorted_values import distinct

__all__ = [
    "APPEND",
    "CHANGELOG_FIELDS",
    "CHANGE_TYPE_NAMES",
    "DELETE",
    "INSERT",
    "OPERATION_DELETE",
    "OPERATION_NONE",
    "OPERATION_UPSERT",
    "UPDATE_AFTER",
    "UPDATE_BEFORE",
    "FoldedTail",
    "change_type_names",
    "changelog_schema",
    "fold_tail",
    "operations_of",
    "replaced_before",
]

# Codes cross the wire and lie on disk: never renumbered.
APPEND: Final = 0
INSERT: Final = 1
UPDATE_BEFORE: Final = 2
UPDATE_AFTER: Final = 3
DELETE: Final = 4

CHANGE_TYPE_NAMES: Final = ("+A", "+I", "-U", "+U", "-D")
"""The short names, by code."""

CHANGELOG_FIELDS: Final = (
    pa.field(CHANGE_TYPE_COLUMN, pa.int8(), nullable=False),
    pa.field(RETRACTS_COLUMN, pa.int64(), nullable=True),
)
"""The columns of a changelog batch after the table's columns."""

OPERATION_UPSERT: Final = 0
OPERATION_DELETE: Final = 1
OPERATION_NONE: Final = 2

_OPERATION_OF_CODE: Final = np.array(
    [OPERATION_UPSERT, OPERATION_UPSERT, OPERATION_NONE, OPERATION_UPSERT, OPERATION_DELETE],
    dtype=np.int8,
)
# The `op` of a Debezium event: create, read (snapshot), update, delete.
_DEBEZIUM: Final = {"c": INSERT, "r": INSERT, "u": UPDATE_AFTER, "d": DELETE}
# The values of `_change_type`: of Spark's CHANGES and Delta, of Iceberg and Fluss.
_FOREIGN: Final = {
    "insert": INSERT,
    "delete": DELETE,
    "update_preimage": UPDATE_BEFORE,
    "update_postimage": UPDATE_AFTER,
    "update_before": UPDATE_BEFORE,
    "update_after": UPDATE_AFTER,
}
_CODE_OF_NAME: Final = (
    {name: code for code, name in enumerate(CHANGE_TYPE_NAMES)} | _DEBEZIUM | _FOREIGN
)


def changelog_schema(schema: Schema) -> pa.Schema:
    """Return the Arrow schema of the changelog of a table with `schema`."""
    return pa.schema([*schema.to_arrow(), *CHANGELOG_FIELDS])


def change_type_names(codes: pa.Array) -> pa.Array:
    """Return `+I`, `-U`, ... for codes, as a string array."""
    return pa.array(CHANGE_TYPE_NAMES, pa.string()).take(codes)


def operations_of(change_types: pa.Array, *, table: str) -> npt.NDArray[np.int8]:
    """Return the operation of each change of a change stream: upsert, delete or none.

    Accepts the names (`+I`, `-U`, `+U`, `-D`, and `+A`), Debezium's `c`, `r`, `u`, `d`, the values
    of Spark, Delta and Iceberg in any case (`insert`, `UPDATE_AFTER`), and our codes. A `-U` is no
    operation: the following `+U` replaces the row. Raises `SchemaMismatchError` naming the first
    row with another value.
    """
    if pa.types.is_dictionary(change_types.type):
        change_types = change_types.cast(change_types.type.value_type)
    if pa.types.is_integer(change_types.type):
        codes = np.asarray(change_types.fill_null(-1).to_numpy(zero_copy_only=False))
    else:
        codes = _codes_of_names(change_types, table=table)
    wrong = np.flatnonzero((codes < 0) | (codes >= len(CHANGE_TYPE_NAMES)))
    if len(wrong):
        row = int(wrong[0])
        raise SchemaMismatchError(
            f"table '{table}': {CHANGE_TYPE_COLUMN} of row {row} is"
            f" {change_types[row].as_py()!r}; use +I, -U, +U or -D (or c, r, u, d, or insert,"
            " update_preimage, update_postimage, delete)"
        )
    operations: npt.NDArray[np.int8] = _OPERATION_OF_CODE[codes]
    return operations


def _codes_of_names(names: pa.Array, *, table: str) -> npt.NDArray[np.int64]:
    if not (pa.types.is_string(names.type) or pa.types.is_large_string(names.type)):
        raise SchemaMismatchError(
            f"table '{table}': {CHANGE_TYPE_COLUMN} must be a string (+I, -U, +U, -D) or a code,"
            f" not {type_name(names.type)}"
        )
    known_names = pa.array(_CODE_OF_NAME, names.type)
    position = pc.index_in(names, value_set=known_names)
    if position.null_count > names.null_count:
        in_lower = pc.index_in(pc.utf8_lower(names), value_set=known_names)
        position = pc.coalesce(position, in_lower)
    position = position.fill_null(len(known_names))
    codes = np.array([*_CODE_OF_NAME.values(), -1], dtype=np.int64)
    name_codes: npt.NDArray[np.int64] = codes[position.to_numpy()]
    return name_codes


@dataclass(frozen=True, slots=True)
class FoldedTail:
    """The effect of a piece of changelog on earlier rows, and its surviving rows.

    `retracted`: the offsets below the boundary which are no longer live, ascending, without
    repeats. `survives`: for each row of the piece, whether the row is a version still live at its
    end.
    """

    retracted: npt.NDArray[np.int64]
    survives: npt.NDArray[np.bool_]


def fold_tail(
    change_types: npt.NDArray[np.int8],
    retracts: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    *,
    boundary: int,
) -> FoldedTail:
    """Fold a piece of one bucket's changelog which starts at `boundary`.

    The piece holds every relevant change from `boundary` to its end in offset order; `-U` may be
    left out. `retracts` holds -1 where the column is null.
    """
    assert len(change_types) == len(retracts) == len(offsets)
    assert len(offsets) == 0 or offsets[0] >= boundary
    retracted = retracts[retracts >= 0]
    below = distinct(retracted[retracted < boundary])
    survives = (change_types == INSERT) | (change_types == UPDATE_AFTER) | (change_types == APPEND)
    inside = retracted[retracted >= boundary]
    if len(inside):
        # A version missing from the piece was cut off with the earlier rows, or filtered out.
        positions = np.searchsorted(offsets, inside)
        positions[positions == len(offsets)] = 0
        survives[positions[offsets[positions] == inside]] = False
    return FoldedTail(below, survives)


def replaced_before(retracts: npt.NDArray[np.int64], *, boundary: int) -> npt.NDArray[np.int64]:
    """Return for each change the version before `boundary` that its row had; -1 for a new row.

    `retracts` is as in `fold_tail`, of every change from `boundary` on. A row that changed several
    times since is followed back through all its versions.

    Raises `CorruptDataError` for a change that retracts itself or a later one.
    """
    positions = np.arange(len(retracts), dtype=np.int64)
    older = retracts - boundary
    is_wrong = older >= positions
    if is_wrong.any():
        position = int(np.argmax(is_wrong))
        raise CorruptDataError(
            f"the change at offset {boundary + position} retracts offset {retracts[position]},"
            " which is not before it; restore the log from a copy"
        )
    oldest = np.where(older >= 0, older, positions)
    # Each step doubles the number of versions stepped over.
    while not np.array_equal(further := oldest[oldest], oldest):
        oldest = further
    return retracts[oldest]
