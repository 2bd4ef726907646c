"""Debezium's envelopes as changes of rows, in agreement with `streamhouse.cdc.debezium` in Spark.

- `c`, `r` and `u` become their `after`; `d` deletes its `before`, or the record's key.
- A tombstone, the empty record behind a delete, and a message (`m`) become nothing.
- `t` (truncate) and invalid envelopes are misfits with a reason.
- A `u` with a new key in `after` also deletes the row of the key in `before`.

`core/text/debezium_rows.py` reads the values of envelopes and keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.rows.checked_rows import Misfit, ReadRows
from streamhouse.core.text.debezium_rows import (
    DELETE,
    OPERATIONS,
    ROW_PARTS,
    WRITES,
    EnvelopeReader,
)
from streamhouse.storage_service.kafka.values._draft import (
    Draft,
    DraftBounds,
    MovedRows,
    differing_rows,
    spread_out,
)

__all__ = ["debezium_draft", "debezium_keys"]

_UPDATE: Final = "u"
_TRUNCATED: Final = (
    "the source's table was truncated, which no row can express: empty the table yourself, then"
    " produce the records after this one"
)


def debezium_draft(
    values: pa.BinaryArray,
    types: Mapping[str, pa.DataType],
    bounds: DraftBounds,
    *,
    key: Sequence[str],
) -> Draft:
    """Return the draft of rows from envelopes; `types` are the columns, `key` the key columns."""
    # Rows before and after, each alone and as payload.
    bounds.check(types, 4 * len(values))
    reader = EnvelopeReader(
        types, parts=ROW_PARTS, check=bounds.check_bytes, what=bounds.what, reads_texts=True
    )
    read = spread_out(values, reader.rows)
    rows = read.rows
    ops = rows.column("op")
    is_write = _is_in(ops, WRITES)
    is_delete = _is_in(ops, (DELETE,))
    is_known = _is_in(ops, OPERATIONS)
    is_there = values.is_valid().to_numpy(zero_copy_only=False)
    has_after = rows.column("has_after").fill_null(False).to_numpy(zero_copy_only=False)
    truncates = np.flatnonzero(_is_in(ops, ("t",))).tolist()
    misfits = dict.fromkeys(truncates, Misfit(None, _TRUNCATED))
    for at in np.flatnonzero(is_there & ~is_known).tolist():
        misfits[at] = Misfit(None, f"the value is no envelope of Debezium: its op is {ops[at]}")
    for at in np.flatnonzero(is_write & ~has_after).tolist():
        misfits[at] = Misfit(None, f"the envelope of a change '{ops[at]}' has no 'after'")
    from_before = pa.array(is_delete)
    columns = {
        name: pc.if_else(from_before, rows.column(f"before.{name}"), rows.column(f"after.{name}"))
        if is_delete.any()
        else rows.column(f"after.{name}")
        for name in types
    }
    return Draft(
        columns=columns,
        misfits={**misfits, **read.misfits},
        deletes=is_delete,
        skipped=~is_there | _is_in(ops, ("m",)),
        moved=_moved(rows, ops, key),
    )


def _moved(rows: pa.RecordBatch, ops: pa.Array, key: Sequence[str]) -> MovedRows | None:
    """Return the updates with a new key for the row."""
    is_moved = np.zeros(len(ops), np.bool_)
    for name in key:
        before, after = rows.column(f"before.{name}"), rows.column(f"after.{name}")
        if before.null_count < len(before):
            is_moved[differing_rows(before, after)] = True
    if not is_moved.any():
        return None
    # An old row without a part of the key does not identify a row.
    for name in key:
        is_moved &= rows.column(f"before.{name}").is_valid().to_numpy(zero_copy_only=False)
    places = np.flatnonzero(is_moved & _is_in(ops, (_UPDATE,)))
    indices = pa.array(places)
    return MovedRows(places, {name: rows.column(f"before.{name}").take(indices) for name in key})


def debezium_keys(
    keys: pa.BinaryArray, types: Mapping[str, pa.DataType], bounds: DraftBounds
) -> ReadRows:
    """Return keys as columns `types`: objects, alone or as the payload beside their schema."""
    bounds.check(types, 2 * len(keys))
    reader = EnvelopeReader(
        types, parts=(), check=bounds.check_bytes, what=bounds.what, reads_texts=True
    )
    return spread_out(keys, reader.rows)


def _is_in(ops: pa.Array, names: Sequence[str]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    is_member = pc.is_in(ops, value_set=pa.array(names, pa.string()))
    return np.asarray(is_member.to_numpy(zero_copy_only=False))
