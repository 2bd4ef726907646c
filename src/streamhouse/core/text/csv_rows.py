"""CSV with a header as rows of a table.

An empty field without quotes is null, and `""` is the empty text. Arrow reads all fields as texts,
block by block; the division of rows then casts the texts, column by column.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.csv

from streamhouse.core.errors import (
    InvalidRequestError,
    RequestTooLargeError,
    SchemaMismatchError,
    UnknownColumnError,
    UnsupportedError,
)
from streamhouse.core.model.casts.column_defaults import missing_values
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN, type_name
from streamhouse.core.model.table import TableInfo
from streamhouse.core.rows.checked_rows import CheckedRows
from streamhouse.core.rows.division import divide
from streamhouse.core.text.text_rows import (
    TextBounds,
    TextRows,
    as_values,
)
from streamhouse.core.text.utf8 import NOT_UTF8, line_outside_utf8

__all__ = ["csv_line", "csv_names", "csv_texts", "divide_csv"]

_BLOCK_BYTES: Final = 1 << 20
_HEADER_BYTES_MAX: Final = 1 << 20
_COLUMNS_MAX: Final = 2_100
_ROW: Final = re.compile(r"CSV parse error: Row #(\d+): (.*)", re.DOTALL)
# A limit for the whole process. The longest row of a table has 31 MiB.
csv.field_size_limit(32 << 20)


def divide_csv(body: bytes, table: TableInfo, bounds: TextBounds) -> CheckedRows:
    """Read a body and divide its rows; raises for a body which is not CSV. Thread-safe."""
    names = _header(body, table, bounds)
    if body.count(b'"') % 2:
        # Arrow would read everything up to the end as one field, as in a truncated file.
        raise InvalidRequestError(
            f"{bounds.what}: a quote of the body is never closed; a field with quotes is written"
            ' as "a ""word"""; nothing was written'
        )
    try:
        try:
            return _divided(body, names, table, bounds, block_bytes=_BLOCK_BYTES)
        except pa.ArrowInvalid as error:
            if "straddling" not in str(error):
                raise
            # A row is longer than a block.
            return _divided(body, names, table, bounds, block_bytes=len(body) + 1)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"{bounds.what}: {_reason(body, bounds, error)}; nothing was written"
        ) from error


def _divided(
    body: bytes, names: Sequence[str], table: TableInfo, bounds: TextBounds, *, block_bytes: int
) -> CheckedRows:
    result = TextRows(bounds)
    for batch in _text_batches(body, names, block_bytes, bounds.delimiter):
        result.check(batch.num_rows, 0)
        rows = _with_all_columns(batch, table, body, result)
        checked = divide(table, rows.schema, [rows])
        result.add(checked, functools.partial(_line_of, body, result.bounds))
    return result.checked(table)


def csv_names(body: bytes, *, what: str, delimiter: str = ",") -> list[str]:
    """Return the names of a body's header; raises for a body without a header."""
    head = body[:_HEADER_BYTES_MAX]
    try:
        names: list[str] = next(_records(head.decode("utf-8-sig", "ignore"), delimiter), [])
    except csv.Error as error:
        raise InvalidRequestError(f"{what}: line 1, the header, is no CSV: {error}") from error
    if names and (line := line_outside_utf8(head[: head.find(b"\n") + 1])):
        raise InvalidRequestError(f"{what}: line {line}, the header, {NOT_UTF8}")
    if not names:
        raise InvalidRequestError(
            f"{what}: the body is empty; a CSV body begins with a header of column names"
        )
    if len(names) > _COLUMNS_MAX or (b"\n" not in head.rstrip(b"\n") and len(head) < len(body)):
        raise RequestTooLargeError(
            f"{what}: line 1, the header, has more than {_COLUMNS_MAX} columns or"
            f" {_HEADER_BYTES_MAX} bytes"
        )
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequestError(f"{what}: line 1 names column '{name[:100]}' twice")
    return names


def csv_texts(
    body: bytes, *, what: str, delimiter: str = ",", lines_before: int = 0
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a body with all fields as texts; raises for a body which is not CSV."""
    names = csv_names(body, what=what, delimiter=delimiter)
    try:
        yield from _text_batches(body, names, len(body) + 1, delimiter)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        line = line_outside_utf8(body)
        reason = (
            f"line {lines_before + line} {NOT_UTF8}" if line else f"the body is no CSV: {error}"
        )
        raise InvalidRequestError(f"{what}: {reason}") from error


def _header(body: bytes, table: TableInfo, bounds: TextBounds) -> Sequence[str]:
    """Return the columns of a body; raises for a column unknown to the table."""
    what = bounds.what
    names = csv_names(body, what=what, delimiter=bounds.delimiter)
    for name in names:
        if name == CHANGE_TYPE_COLUMN and table.is_primary_key_table:
            continue
        if bounds.key and name not in bounds.key:
            raise UnknownColumnError(
                f"{what}: line 1: {bounds.owner} has no column '{name[:100]}';"
                f" {bounds.nothing_done}"
            )
        column = table.schema.column(name, table=str(table.path))
        if pa.types.is_nested(column.type):
            raise UnsupportedError(
                f"{what}: column '{name}' is {type_name(column.type)}, for which CSV has no"
                " values; send application/x-ndjson"
            )
    return names


def _text_batches(
    body: bytes, names: Sequence[str], block_bytes: int, delimiter: str
) -> pyarrow.csv.CSVStreamingReader:
    return pyarrow.csv.open_csv(
        pa.BufferReader(body),
        read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=block_bytes),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter=delimiter, newlines_in_values=b'"' in body
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types={name: pa.string() for name in names},
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )


def _with_all_columns(
    batch: pa.RecordBatch, table: TableInfo, body: bytes, result: TextRows
) -> pa.RecordBatch:
    """Return rows with all columns; those missing from the header have their default, or null."""
    arrays, fields = [], []
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if name == CHANGE_TYPE_COLUMN and table.is_primary_key_table:
            array = array.fill_null("+U")
        elif pa.types.is_binary(table.schema.column(name, table=str(table.path)).type):
            try:
                array = as_values(array, pa.binary())
            except SchemaMismatchError as error:
                at = next(i for i, text in enumerate(array) if not _is_hex(text.as_py()))
                raise InvalidRequestError(
                    f"{result.bounds.what}:"
                    f" line {_line_of(body, result.bounds, result.row_count + at)}, column"
                    f" '{name}': {str(array[at].as_py())[:100]!r} is no hexadecimal digits; nothing"
                    " was written"
                ) from error
        arrays.append(array)
        fields.append(pa.field(name, array.type))
    for column in table.schema.columns:
        if column.name not in batch.schema.names:
            arrays.append(missing_values(column, batch.num_rows))
            fields.append(pa.field(column.name, column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _is_hex(text: str | None) -> bool:
    try:
        return text is None or len(bytes.fromhex(text)) * 2 == len(text)
    except ValueError:
        return False


def _records(text: str, delimiter: str) -> Any:
    return csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)


def _line_of(body: bytes, bounds: TextBounds, row: int) -> int:
    """Return the line at which a row begins; only used for errors."""
    return bounds.lines_before + csv_line(body, row, delimiter=bounds.delimiter)


def csv_line(body: bytes, row: int, *, delimiter: str = ",") -> int:
    """Return the line of a body at which a row begins."""
    records = _records(body.decode("utf-8-sig", "replace"), delimiter)
    begins = 1
    remaining = row + 1
    # A field above Python's limit stops the reading; this field is the refused one.
    with contextlib.suppress(csv.Error):
        for record in records:
            if record:
                if remaining == 0:
                    return begins
                remaining -= 1
            begins = records.line_num + 1
    return begins


def _reason(body: bytes, bounds: TextBounds, error: Exception) -> str:
    """Return why a body cannot be read, with the line if Arrow names the row."""
    if line := line_outside_utf8(body):
        return f"line {bounds.lines_before + line} {NOT_UTF8}"
    match = _ROW.search(str(error))
    if match is None:
        return f"the body is no CSV: {error}"
    # Arrow counts the header as row 1.
    return f"line {_line_of(body, bounds, int(match[1]) - 2)} is no CSV: {match[2]}"
