"""Common parts of NDJSON and CSV bodies: limits, and columns of texts as columns of values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from streamhouse.core.errors import RequestTooLargeError, SchemaMismatchError
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN, empty_batch
from streamhouse.core.model.table import TableInfo
from streamhouse.core.rows.checked_rows import CheckedRows, joined
from streamhouse.core.types.registry import type_of

__all__ = [
    "TextBounds",
    "TextRows",
    "as_values",
    "nested_bytes",
    "nothing_done",
    "width_of",
]


def nothing_done(*, is_delete: bool, can_reject: bool = True) -> str:
    """Return the end of a row's refusal: rows before the bad row are not stored either."""
    if is_delete:
        return "nothing was deleted"
    keep = ", and on_error=reject would keep such rows" if can_reject else ""
    return f"nothing was written{keep}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBounds:
    """The limits of a body: rows, and the bytes of the rows in Arrow."""

    what: str
    """The beginning of error messages, as in "append to 'db.t'"."""
    rows_max: int
    bytes_max: int
    is_rejecting: bool
    """Whether bad rows are stored as rejected; else the first bad row refuses the body."""
    key: tuple[str, ...] = ()
    """The key columns of a delete, whose rows have no other columns."""
    can_reject: bool = True
    """Whether the caller has the option `on_error=reject`."""
    lines_before: int = 0
    """The lines before the body, if the body is a part of a file."""
    delimiter: str = ","
    """The character between the fields of CSV."""

    @property
    def owner(self) -> str:
        """The owner of the columns, for error messages."""
        return f"the key ({', '.join(self.key)})" if self.key else "the table"

    @property
    def nothing_done(self) -> str:
        """The end of a refusal."""
        return nothing_done(is_delete=bool(self.key), can_reject=self.can_reject)


@dataclass(slots=True)
class TextRows:
    """The rows read from a body so far; raises `RequestTooLargeError` above the limits."""

    bounds: TextBounds
    parts: list[CheckedRows] = field(default_factory=list)
    row_count: int = 0
    byte_count: int = 0

    def add(self, checked: CheckedRows, line_of: Callable[[int], int]) -> None:
        """Add the next rows; a misfit raises `SchemaMismatchError` unless misfits are kept.

        `line_of` returns the line of the row at a position in the body.
        """
        if checked.misfits and not self.bounds.is_rejecting:
            position, misfit = checked.first_misfit()
            column = "" if misfit.column is None else f", column '{misfit.column}'"
            raise SchemaMismatchError(
                f"{self.bounds.what}: line {line_of(self.row_count + position)}{column}:"
                f" {misfit.reason}; {self.bounds.nothing_done}"
            )
        self.parts.append(checked)
        self.row_count += checked.row_count
        self.byte_count += checked.rows.nbytes
        self.check(0, 0)

    def check(self, row_count: int, byte_count: int) -> None:
        """Raise if this many more rows and bytes exceed the limits."""
        bounds = self.bounds
        if self.row_count + row_count > bounds.rows_max:
            raise RequestTooLargeError(
                f"{bounds.what}: more than {bounds.rows_max} rows in one request; send fewer"
            )
        if self.byte_count + byte_count > bounds.bytes_max:
            raise RequestTooLargeError(
                f"{bounds.what}: the rows take more than {bounds.bytes_max} bytes when they are"
                " read (body_bytes_max); send less at once"
            )

    def checked(self, table: TableInfo) -> CheckedRows:
        """Return all rows."""
        parts = self.parts or [CheckedRows(empty_batch(table.schema.to_arrow()), {})]
        if len({tuple(part.rows.schema.names) for part in parts}) > 1:
            # In a part without change types, all rows are upserts.
            parts = [replace(part, rows=_with_changes(part.rows)) for part in parts]
        return joined(parts)


def _with_changes(batch: pa.RecordBatch) -> pa.RecordBatch:
    if CHANGE_TYPE_COLUMN in batch.schema.names:
        return batch
    return batch.append_column(CHANGE_TYPE_COLUMN, pa.array(["+U"] * batch.num_rows, pa.string()))


def width_of(types: Iterable[pa.DataType]) -> int:
    """Return the most bytes of a row without values in columns of these types."""
    return sum(_width(t) for t in types)


def nested_bytes(row: Mapping[str, Any], types: Mapping[str, pa.DataType]) -> int:
    """Return the approximate bytes in Arrow of the elements in a row's lists and maps.

    A null in a list takes as many bytes as any other element, but only four letters of JSON.
    """
    return sum(
        _elements_bytes(row[name], t)
        for name, t in types.items()
        if pa.types.is_nested(t) and row.get(name) is not None
    )


def _elements_bytes(value: Any, t: pa.DataType) -> int:
    if pa.types.is_struct(t):
        return nested_bytes(value, {f.name: f.type for f in t}) if isinstance(value, dict) else 0
    if not isinstance(value, list | dict):
        return 0
    if pa.types.is_map(t):
        inner = t.item_type
        items = list(value.values()) if isinstance(value, dict) else [_item(p) for p in value]
    else:
        inner, items = t.value_type, list(value)
    inside = 0
    if pa.types.is_nested(inner):
        inside = sum(_elements_bytes(item, inner) for item in items if item is not None)
    return len(items) * _width(inner) + inside


def _item(pair: Any) -> Any:
    return pair[1] if isinstance(pair, list) and len(pair) > 1 else None


def _width(t: pa.DataType) -> int:
    if pa.types.is_struct(t):
        return 1 + sum(_width(t.field(i).type) for i in range(t.num_fields))
    try:
        return 1 + (int(t.bit_width) + 7) // 8
    except ValueError:
        return 9


def as_values(texts: pa.Array, t: pa.DataType) -> pa.Array:
    """Return texts as values of the simple type `t`; nulls stay nulls.

    Raises `ArrowInvalid` or `SchemaMismatchError` for a text without a value of `t`.
    """
    return type_of(t).values_of_texts(texts)
