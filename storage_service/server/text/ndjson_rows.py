"""NDJSON, one JSON object a line, as rows of a table.

Arrow reads whole runs of lines with the table's types. A run that it does not read is halved until
the lines that it does not know are among few: only these are read by Python, as the JSON rows of
other routes are. So `"NaN"`, a map or a text for a number costs some microseconds, and what is
wrong has the number of its line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from streamhouse.storage_service.errors import (
    InvalidRequestError,
    RequestTooLargeError,
    SchemaMismatchError,
)
from streamhouse.storage_service.model.rejected.division import Divided, divide, divide_rows
from streamhouse.storage_service.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.storage_service.model.table import TableInfo
from streamhouse.storage_service.server.text.text_rows import (
    DividedText,
    TextBounds,
    as_values,
    row_width,
)

__all__ = ["divide_ndjson", "json_object_lines"]

_RUN_BYTES: Final = 1 << 20
_RUN_WIDTH: Final = 16 << 20
"""So many bytes may rows of a run take that have no values."""
_LINES_MAX: Final = 4_000_000
# Halving further takes longer than reading so few lines by Python.
_RUN_LINES_MIN: Final = 64
_ODD_LINES_MAX: Final = 65_536
_FLOAT_MAX: Final = 3.4028235677973366e38
_BLANK: Final = re.compile(rb"[ \t\r]*")
_MARK: Final = b"\xef\xbb\xbf"


def divide_ndjson(body: bytes, table: TableInfo, bounds: TextBounds) -> Divided:
    """Read a body and divide its rows; raises for a line that is no JSON object. On any thread."""
    lines = _Lines(body, what=bounds.what)
    reader = _Reader(body, lines, table, bounds)
    width = row_width(table)
    step = max(_RUN_WIDTH // width, 1)
    first = 0
    while first < len(lines):
        end = min(lines.until(first, _RUN_BYTES), first + step)
        reader.read(first, end)
        first = end
    return reader.result.divided()


def json_object_lines(body: bytes, *, what: str, rows_max: int) -> list[Mapping[str, Any]]:
    """Return the objects of a small body's lines; raises for a line that is none."""
    lines = _Lines(body, what=what)
    if len(lines) > rows_max:
        raise RequestTooLargeError(f"{what}: {len(lines)} rows in one request; at most {rows_max}")
    return [_object(lines.text(at), line=lines.number(at), what=what) for at in range(len(lines))]


class _Lines:
    """The lines of a body that are not blank."""

    def __init__(self, body: bytes, *, what: str) -> None:
        if body.count(b"\n") > _LINES_MAX:
            raise RequestTooLargeError(f"{what}: more than {_LINES_MAX} lines; send fewer")
        self._body = body
        data = np.frombuffer(body, np.uint8)
        ends = np.flatnonzero(data == ord("\n"))
        if body and not body.endswith(b"\n"):
            ends = np.append(ends, len(body))
        starts = np.append(np.zeros(min(len(ends), 1), ends.dtype), ends[:-1] + 1)
        if len(starts) and body.startswith(_MARK):
            starts[0] = len(_MARK)
        # Few lines are so short that they may be blank ones.
        kept = np.ones(len(starts), np.bool_)
        for at in np.flatnonzero(data[np.minimum(starts, len(body) - 1)] <= ord(" ")):
            kept[at] = _BLANK.fullmatch(body, int(starts[at]), int(ends[at])) is None
        self._numbers = np.flatnonzero(kept)
        self._starts, self._ends = starts[kept], ends[kept]

    def __len__(self) -> int:
        return len(self._starts)

    def number(self, at: int) -> int:
        """Return the number of a line, from 1 on, blank ones counted."""
        return int(self._numbers[at]) + 1

    def text(self, first: int, end: int | None = None) -> bytes:
        """Return lines."""
        last = first if end is None else end - 1
        return self._body[int(self._starts[first]) : int(self._ends[last])]

    def until(self, first: int, bytes_max: int) -> int:
        """Return how far lines from `first` on have so many bytes; one line at least."""
        end = int(np.searchsorted(self._ends, self._starts[first] + bytes_max, side="right"))
        return max(end, first + 1)


class _Reader:
    """Reads runs of lines into `result`."""

    def __init__(self, body: bytes, lines: _Lines, table: TableInfo, bounds: TextBounds) -> None:
        self.result = DividedText(bounds)
        self._lines = lines
        self._table = table
        self._width = row_width(table)
        self._odd_lines = 0
        self._read_as: dict[str, pa.DataType] | None = {}
        for column in table.schema.columns:
            t = _read_type(column.type)
            if t is None:
                self._read_as = None
                break
            self._read_as[column.name] = t
        if self._read_as is not None and table.is_primary_key_table:
            mark = f'"{CHANGE_TYPE_COLUMN}"'.encode()
            if mark in body:
                self._read_as[CHANGE_TYPE_COLUMN] = pa.string()

    def read(self, first: int, end: int) -> None:
        """Read lines, in halves if they are not all plain."""
        waiting = [(first, end)]
        while waiting:
            first, end = waiting.pop()
            rows = self._arrow_rows(first, end)
            if rows is not None:
                self._add(divide(self._table, rows.schema, [rows]), first, end)
            elif self._read_as is None or end - first <= _RUN_LINES_MIN:
                self._read_one_by_one(first, end)
            else:
                half = (first + end) // 2
                waiting += [(half, end), (first, half)]

    def _read_one_by_one(self, first: int, end: int) -> None:
        bounds = self.result.bounds
        self._odd_lines += end - first
        if self._odd_lines > _ODD_LINES_MAX:
            raise RequestTooLargeError(
                f"{bounds.what}: more than {_ODD_LINES_MAX} lines have values that take long to"
                " read, as maps do, and texts in place of numbers; send fewer at once"
            )
        self.result.check(end - first, 0)
        rows = []
        for at in range(first, end):
            line = self._lines.number(at)
            row = _object(self._lines.text(at), line=line, what=bounds.what)
            rows.append(_plain_row(row, self._table))
        self._add(divide_rows(self._table, rows, whose=bounds.whose), first, end)

    def _add(self, divided: Divided, first: int, end: int) -> None:
        if divided.bad and not self.result.bounds.is_rejecting:
            number, bad = divided.bad[0]
            line = self._lines.number(first + number + bad[0].position)
            raise self.result.refusal(line, bad[0])
        self.result.add(divided, end - first)

    def _arrow_rows(self, first: int, end: int) -> pa.RecordBatch | None:
        """Return lines as rows of the table; None if some are not plain, or none at all."""
        if self._read_as is None:
            return None
        text = self._lines.text(first, end)
        self.result.check(end - first, (end - first) * self._width)
        # Several objects may be in one line: that many rows would be made of it.
        if text.count(b"{") * self._width > 4 * _RUN_WIDTH:
            return None
        try:
            read = _arrow_table(text, pa.schema(list(self._read_as.items())))
            if read.num_rows != end - first:
                return None
            rows = read.combine_chunks().to_batches()[0]
            rows.validate(full=True)
            return _with_values(rows, self._table)
        except (pa.ArrowException, SchemaMismatchError, UnicodeDecodeError):
            return None


def _arrow_table(text: bytes, schema: pa.Schema) -> pa.Table:
    return pyarrow.json.read_json(
        pa.BufferReader(text),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(text) + 1),
        parse_options=pyarrow.json.ParseOptions(
            explicit_schema=schema, newlines_in_values=False, unexpected_field_behavior="error"
        ),
    )


def _read_type(t: pa.DataType) -> pa.DataType | None:
    """Return the type that Arrow reads a column as; None if it does not."""
    if _is_text(t):
        return pa.string()
    if pa.types.is_list(t):
        # Arrow reads dates as numbers, and bytes as letters: below, too.
        return t if _is_plain(t.value_type) else None
    if pa.types.is_struct(t):
        return t if all(_is_plain(t.field(i).type) for i in range(t.num_fields)) else None
    return t if _is_plain(t) else None


def _is_plain(t: pa.DataType) -> bool:
    return bool(
        pa.types.is_boolean(t)
        or pa.types.is_integer(t)
        or pa.types.is_float64(t)
        or pa.types.is_float32(t)
        or pa.types.is_decimal(t)
        or pa.types.is_string(t)
    )


def _is_text(t: pa.DataType) -> bool:
    return bool(pa.types.is_date(t) or pa.types.is_timestamp(t) or pa.types.is_binary(t))


def _with_values(rows: pa.RecordBatch, table: TableInfo) -> pa.RecordBatch:
    """Return rows as they are read with the table's types."""
    arrays, fields = [], []
    types = {column.name: column.type for column in table.schema.columns}
    for name, array in zip(rows.schema.names, rows.columns, strict=True):
        t = types.get(name, array.type)
        if array.type != t:
            array = as_values(array, t)
        elif name == CHANGE_TYPE_COLUMN and name not in types:
            array = array.fill_null("+U")
        _check_finite(array)
        arrays.append(array)
        fields.append(pa.field(name, t))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _check_finite(array: pa.Array) -> None:
    """Raise for numbers that JSON does not have: they were too large, or are seen one by one."""
    t = array.type
    if pa.types.is_list(t):
        _check_finite(array.flatten())
    elif pa.types.is_struct(t):
        for part in array.flatten():
            _check_finite(part)
    elif pa.types.is_floating(t) and pc.any(pc.invert(pc.is_finite(array))).as_py():
        raise SchemaMismatchError("a number is too large")


def _object(text: bytes, *, line: int, what: str) -> Mapping[str, Any]:
    try:
        row = json.loads(text, parse_float=Decimal, parse_constant=_no_constant)
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise InvalidRequestError(
            f"{what}: line {line} is no JSON: {error}; nothing was written"
        ) from error
    if not isinstance(row, dict):
        raise InvalidRequestError(
            f"{what}: line {line} is no JSON object of column to value; nothing was written"
        )
    return row


def _no_constant(text: str) -> Any:
    raise ValueError(f'{text} is none; write "{text}"')


def _plain_row(row: Mapping[str, Any], table: TableInfo) -> Mapping[str, Any]:
    """Return a row whose numbers are floats again where the table has no decimals."""
    types = {column.name: column.type for column in table.schema.columns}
    return {
        name: _floats(value, float32=_is_of(types.get(name), pa.types.is_float32))
        if not _is_of(types.get(name), pa.types.is_decimal)
        else value
        for name, value in row.items()
    }


def _is_of(t: pa.DataType | None, is_kind: Any) -> bool:
    """Whether a type, or one inside it, is of a kind."""
    if t is None:
        return False
    inside: Sequence[pa.DataType] = [t.field(i).type for i in range(t.num_fields)]
    return bool(is_kind(t)) or any(_is_of(part, is_kind) for part in inside)


def _floats(value: Any, *, float32: bool) -> Any:
    """Return a value with floats in place of decimals; as a text what no float can be."""
    if isinstance(value, list):
        return [_floats(item, float32=float32) for item in value]
    if isinstance(value, dict):
        return {name: _floats(item, float32=float32) for name, item in value.items()}
    if isinstance(value, Decimal):
        number = float(value)
        is_right = abs(number) < (_FLOAT_MAX if float32 else float("inf"))
        return number if is_right else f"{value} (too large)"
    return value
