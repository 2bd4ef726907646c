"""The columns of a table for files of rows, from all values of the files.

A CSV column gets the first type of a list to which every text belongs, so that a later load takes
the same texts; a number with a leading zero, as in a postal code, is a text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet as pq

from streamhouse.cli.loading.row_files import Progress, RowFile, ignored, readable
from streamhouse.core.errors import InvalidSchemaError, SchemaMismatchError
from streamhouse.core.text.csv_rows import csv_texts
from streamhouse.core.types.registry import type_of

__all__ = ["schema_of_files"]

_TIMESTAMP: Final = pa.timestamp("us", "UTC")
_TEXT_TYPES: Final = (pa.int64(), pa.float64(), pa.bool_(), pa.date32(), _TIMESTAMP, pa.string())
_LEADING_ZERO: Final = r"^\s*[+-]?0[0-9]"
_ROW: Final = re.compile(r" in row (\d+)$")


def schema_of_files(files: Sequence[RowFile], progress: Progress = ignored) -> pa.Schema:
    """Return the columns of all the files, which have one format.

    Raises `InvalidSchemaError` if a column has values of several types.
    """
    schema = pa.schema([])
    texts = _TextColumns()
    for file in files:
        what = str(file.path)
        with readable(what):
            if file.file_format == "parquet":
                schema = _joined(schema, pq.read_schema(file.path), what=what)
                progress(file.size)
                continue
            for block in file.blocks(progress, what=what):
                if file.file_format == "csv":
                    for rows in csv_texts(block.body, what=what):
                        texts.add(rows)
                else:
                    rows_schema = _json_schema(block.body, block.lines_before, what=what)
                    schema = _joined(schema, rows_schema, what=what)
    is_text = files[0].file_format != "parquet"
    fields = [pa.field(name, t) for name, t in texts.types()] or [
        field.with_type(_stored(field.type, is_text=is_text)) for field in schema
    ]
    if not fields:
        raise InvalidSchemaError(f"{files[0].path} has no columns to make a table of")
    return pa.schema(fields)


class _TextColumns:
    """The columns of CSV: of each the types to which all texts so far belong."""

    def __init__(self) -> None:
        self._candidates: dict[str, tuple[pa.DataType, ...]] = {}
        self._has_values: set[str] = set()

    def add(self, rows: pa.RecordBatch) -> None:
        """Drop the types to which a text of these rows does not belong."""
        for name, column in zip(rows.schema.names, rows.columns, strict=True):
            types = self._candidates.get(name, _TEXT_TYPES)
            self._candidates[name] = tuple(t for t in types if _is_of(column, t))
            if column.null_count < len(column):
                self._has_values.add(name)

    def types(self) -> Iterator[tuple[str, pa.DataType]]:
        """Yield each column with its type; of a column without a value the type is string."""
        for name, types in self._candidates.items():
            yield name, types[0] if name in self._has_values else pa.string()


def _is_of(texts: pa.Array, t: pa.DataType) -> bool:
    is_number = pa.types.is_integer(t) or pa.types.is_floating(t)
    if is_number and pc.any(pc.match_substring_regex(texts, _LEADING_ZERO)).as_py():
        return False
    try:
        type_of(t).values_of_texts(texts)
    except (pa.ArrowInvalid, SchemaMismatchError):
        return False
    return True


def _json_schema(body: bytes, lines_before: int, *, what: str) -> pa.Schema:
    options = pyarrow.json.ReadOptions(use_threads=False, block_size=len(body) + 1)
    try:
        return pyarrow.json.read_json(pa.BufferReader(body), read_options=options).schema
    except pa.ArrowInvalid as error:
        match = _ROW.search(str(error))
        reason = str(error) if match is None else str(error)[: match.start()]
        line = "" if match is None else f", line {lines_before + int(match[1]) + 1}"
        raise InvalidSchemaError(
            f"{what}{line}: {reason.removeprefix('JSON parse error: ')}; make the table with"
            " 'streamhouse create', with the types that you choose"
        ) from error


def _joined(schema: pa.Schema, other: pa.Schema, *, what: str) -> pa.Schema:
    try:
        return pa.unify_schemas([schema, other.remove_metadata()], promote_options="permissive")
    except pa.ArrowException as error:
        raise InvalidSchemaError(
            f"{what}: a column has values of several types: {error}; make the table with"
            " 'streamhouse create', with the types that you choose"
        ) from error


def _stored(t: pa.DataType, *, is_text: bool) -> pa.DataType:
    """Return the type of a table's column for values of a file; a time in a text is of UTC."""
    if pa.types.is_null(t):
        return pa.string()
    if pa.types.is_dictionary(t):
        return _stored(t.value_type, is_text=is_text)
    if pa.types.is_timestamp(t):
        return pa.timestamp("us", "UTC" if t.tz or is_text else None)
    if pa.types.is_unsigned_integer(t):
        return pa.int64() if t.bit_width > 16 else pa.int32()
    if pa.types.is_struct(t):
        return pa.struct([f.with_type(_stored(f.type, is_text=is_text)) for f in t])
    if pa.types.is_list(t) or pa.types.is_large_list(t):
        return pa.list_(t.value_field.with_type(_stored(t.value_type, is_text=is_text)))
    return t
