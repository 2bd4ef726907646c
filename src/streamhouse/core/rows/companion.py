"""The table with the rejected rows of another table: its name, its columns, and its rows.

A companion is a primary key table, `t__rejected` for `t`, also called `t$rejected`. Its rows are
the open work: a successful retry deletes the row here and writes the row into `t` together.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa

from streamhouse.core.errors import InvalidRequestError, UnsupportedError
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import (
    REJECTED_SUFFIX,
    TableDescriptor,
    TableInfo,
    TablePath,
)
from streamhouse.core.rows._row_text import row_of
from streamhouse.core.rows.checked_rows import CheckedRows

__all__ = [
    "ID_COLUMN",
    "REJECTED",
    "check_companion",
    "companion_descriptor",
    "companion_of",
    "in_opening_order",
    "is_rejecting",
    "rejected_path",
    "rejected_rows",
    "table_of",
]

ROW_TEXT_MAX: Final = 1 << 20
"""The most characters stored of a row; a longer row is cut, and cannot be retried."""
_REASON_TEXT_MAX: Final = 1_000
_BATCH_ROWS: Final = 4_096
# Without a lake, only the log has the rejected rows.
_KEPT: Final = {"table.log.ttl": "3650d"}
_LAKE: Final = "table.datalake.enabled"

ID_COLUMN: Final = "id"
REJECTED: Final = pa.schema(
    [
        pa.field(ID_COLUMN, pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("column", pa.string()),
        pa.field("source", pa.string()),
        pa.field("source_row", pa.int64()),
        pa.field("rejected_at", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("operation", pa.string(), nullable=False),
        pa.field("row", pa.string(), nullable=False),
        pa.field("is_whole", pa.bool_(), nullable=False),
    ]
)
"""The columns of a companion; `row` is JSON."""


def is_rejecting(path: TablePath) -> bool:
    """Whether a table is, by its name, a companion with rejected rows."""
    return path.table.endswith(REJECTED_SUFFIX)


def rejected_path(path: TablePath) -> TablePath:
    """Return the path of the companion of `path`."""
    if is_rejecting(path):
        raise UnsupportedError(
            f"table '{path}' has the rejected rows of another table, and none of its own"
        )
    return TablePath(path.database, path.table + REJECTED_SUFFIX)


def companion_of(path: TablePath) -> TablePath | None:
    """Return the path of the companion of `path`; None if `path` is a companion."""
    return None if is_rejecting(path) else rejected_path(path)


def table_of(companion: TablePath) -> TablePath | None:
    """Return the table of a companion, by its name; None if `companion` is not a companion."""
    if not is_rejecting(companion):
        return None
    return TablePath(companion.database, companion.table.removesuffix(REJECTED_SUFFIX))


def in_opening_order(tables: Iterable[TableInfo]) -> list[TableInfo]:
    """Return tables in the order in which a start opens them.

    Opening a table continues its interrupted commits. The companion must be open first, because a
    commit may write to the companion.
    """
    return sorted(tables, key=lambda info: not is_rejecting(info.path))


def companion_descriptor(info: TableInfo) -> TableDescriptor:
    """Return the descriptor of the companion of `info`; the companion is tiered if `info` is."""
    lake = info.descriptor.properties.get(_LAKE)
    return TableDescriptor(
        path=rejected_path(info.path),
        schema=Schema.from_arrow(REJECTED),
        primary_key=(ID_COLUMN,),
        properties=_KEPT | ({} if lake is None else {_LAKE: lake}),
    )


def check_companion(info: TableInfo) -> None:
    """Raise `InvalidRequestError` if the table with the name of a companion is not a companion."""
    has = {column.name: column.type for column in info.schema.columns}
    types = {field.name: field.type for field in REJECTED}
    is_keyed = info.descriptor.primary_key == (ID_COLUMN,)
    if not is_keyed or any(has.get(name) != t for name, t in types.items()):
        raise InvalidRequestError(
            f"table '{info.path}' has the name of the table for rejected rows, but other columns;"
            " drop the table, or write without on.error = reject"
        )


def rejected_rows(
    checked: CheckedRows, *, operation: str, source: str, first_row: int
) -> Iterator[pa.RecordBatch]:
    """Yield misfits as rows of a companion; `first_row` is the number of the row at position 0."""
    misfits = iter(checked.misfits.items())
    now_us = time.time_ns() // 1_000
    while batch := list(itertools.islice(misfits, _BATCH_ROWS)):
        batch_id = secrets.token_hex(8)
        texts = [_text_of(checked.original_of(position)) for position, _ in batch]
        columns = [
            [f"{batch_id}/{number:08}" for number in range(len(batch))],
            [misfit.reason[:_REASON_TEXT_MAX] for _, misfit in batch],
            [misfit.column for _, misfit in batch],
            [source] * len(batch),
            [first_row + position for position, _ in batch],
            pa.array([now_us] * len(batch), pa.int64()).cast(REJECTED.field("rejected_at").type),
            [operation] * len(batch),
            [text[:ROW_TEXT_MAX] for text in texts],
            [len(text) <= ROW_TEXT_MAX for text in texts],
        ]
        arrays = [
            column if isinstance(column, pa.Array) else pa.array(column, field.type)
            for column, field in zip(columns, REJECTED, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=REJECTED)


def _text_of(row: Mapping[str, Any]) -> str:
    """Return a row as JSON for storage; half of a surrogate pair is escaped."""
    values = row_of(row)
    text = json.dumps(values, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(values)
    return text
