"""The table that has the rejected rows of another: its name, its columns, a row of it.

It is a primary key table, `t__rejected` for `t`, which is also called `t$rejected`. What it has is
what is left to do: a row that is tried again and fits is deleted here as it is written there.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from typing import Final

import pyarrow as pa

from streamhouse.core.errors import InvalidRequestError, UnsupportedError
from streamhouse.core.model.rejected.row_splitter import BadRow
from streamhouse.core.model.rejected.row_text import row_of
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import (
    REJECTED_SUFFIX,
    TableDescriptor,
    TableInfo,
    TablePath,
)

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
"""Characters kept of a row; one that has more is cut, and cannot be tried again."""
_REASON_TEXT_MAX: Final = 1_000
# Of a table that is in no lake: nobody but the log has what was rejected.
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
"""The columns of such a table; `row` is JSON."""


def is_rejecting(path: TablePath) -> bool:
    """Whether a table has, by its name, the rejected rows of another."""
    return path.table.endswith(REJECTED_SUFFIX)


def rejected_path(path: TablePath) -> TablePath:
    """Return the table that has the rejected rows of `path`."""
    if is_rejecting(path):
        raise UnsupportedError(
            f"table '{path}' has the rejected rows of another table, and none of its own"
        )
    return TablePath(path.database, path.table + REJECTED_SUFFIX)


def companion_of(path: TablePath) -> TablePath | None:
    """Return the table that has the rejected rows of `path`; None: it has those of another."""
    return None if is_rejecting(path) else rejected_path(path)


def table_of(companion: TablePath) -> TablePath | None:
    """Return the table whose rejected rows `companion` has, by its name; None: it has none."""
    if not is_rejecting(companion):
        return None
    return TablePath(companion.database, companion.table.removesuffix(REJECTED_SUFFIX))


def in_opening_order(tables: Iterable[TableInfo]) -> list[TableInfo]:
    """Return tables in the order in which a start opens them.

    A commit that was interrupted goes on when its table is opened. The table of its rejected rows,
    which it may commit to, is open by then.
    """
    return sorted(tables, key=lambda info: not is_rejecting(info.path))


def companion_descriptor(info: TableInfo) -> TableDescriptor:
    """Return what the table of the rejected rows of `info` is made of; it is tiered if that is."""
    lake = info.descriptor.properties.get(_LAKE)
    return TableDescriptor(
        path=rejected_path(info.path),
        schema=Schema.from_arrow(REJECTED),
        primary_key=(ID_COLUMN,),
        properties=_KEPT | ({} if lake is None else {_LAKE: lake}),
    )


def check_companion(info: TableInfo) -> None:
    """Raise `InvalidRequestError` if a table with such a name is another one."""
    has = {column.name: column.type for column in info.schema.columns}
    wanted = {field.name: field.type for field in REJECTED}
    is_keyed = info.descriptor.primary_key == (ID_COLUMN,)
    if not is_keyed or any(has.get(name) != t for name, t in wanted.items()):
        raise InvalidRequestError(
            f"table '{info.path}' is in the way: rejected rows are kept under this name, and its"
            " columns are others; drop it, or write without on.error = reject"
        )


def rejected_rows(
    bad: Sequence[BadRow],
    *,
    operation: str,
    source: str,
    first_row: int,
    now_us: int,
) -> pa.RecordBatch:
    """Return rows as the table of rejected rows has them; `first_row` is the number of row 0."""
    batch_id = secrets.token_hex(8)
    texts = [_text_of(row) for row in bad]
    columns = [
        [f"{batch_id}/{number:08}" for number in range(len(bad))],
        [row.reason[:_REASON_TEXT_MAX] for row in bad],
        [row.column for row in bad],
        [source] * len(bad),
        [first_row + row.position for row in bad],
        pa.array([now_us] * len(bad), pa.int64()).cast(REJECTED.field("rejected_at").type),
        [operation] * len(bad),
        [text[:ROW_TEXT_MAX] for text in texts],
        [len(text) <= ROW_TEXT_MAX for text in texts],
    ]
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, field.type)
        for column, field in zip(columns, REJECTED, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=REJECTED)


def _text_of(row: BadRow) -> str:
    """Return a row as JSON that can be stored: half a surrogate pair is no text."""
    values = row_of(row.values)
    text = json.dumps(values, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(values)
    return text
