"""The columns of a table for files of rows, from all values of the files.

A CSV column gets the first type of a list to which every text belongs, so that a later load takes
the same texts; a number with a leading zero, as in a postal code, is a text. So is a whole number
from 2**53 beside a fraction: a double would change its last digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet as pq

from streamhouse.cli.loading.row_files import Progress, RowFile, ignored, readable
from streamhouse.core.errors import InvalidRequestError, InvalidSchemaError, SchemaMismatchError
from streamhouse.core.text.csv_rows import csv_texts
from streamhouse.core.text.utf8 import NOT_UTF8, line_outside_utf8
from streamhouse.core.types.registry import type_of

__all__ = ["schema_of_files"]

_TIMESTAMP: Final = pa.timestamp("us", "UTC")
_TEXT_TYPES: Final = (pa.int64(), pa.float64(), pa.bool_(), pa.date32(), _TIMESTAMP, pa.string())
_LEADING_ZERO: Final = r"^\s*[+-]?0[0-9]"
_LONG_NUMBER: Final = r"^\s*[+-]?[0-9]{16,}\s*$"
_EXACT_END: Final = 1 << 53
_ROW: Final = re.compile(r" in row (\d+)$")


def schema_of_files(files: Sequence[RowFile], progress: Progress = ignored) -> pa.Schema:
    """Return the columns of all the files, which have one format.

    Raises `InvalidSchemaError` if a column has values of several types.
    """
    schema = pa.schema([])
    texts = _TextColumns()
    long_numbers: set[str] = set()
    for file in files:
        what = str(file.path)
        with readable(what):
            if file.file_format == "parquet":
                schema = _joined(schema, pq.read_schema(file.path), what=what)
                progress(file.size)
                continue
            for block in file.blocks(progress, what=what):
                if file.file_format == "csv":
                    file.csv_names(block, what=what)
                    texts_of_block = csv_texts(
                        block.body,
                        what=what,
                        delimiter=file.separator,
                        lines_before=block.lines_before,
                    )
                    for rows in texts_of_block:
                        texts.add(rows)
                else:
                    rows = _json_rows(block.body, block.lines_before, what=what)
                    schema = _joined(schema, rows.schema, what=what)
                    long_numbers |= _long_numbers(rows, block.body)
                    _check_rounded(schema, long_numbers, what=what)
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
        values = type_of(t).values_of_texts(texts)
    except (pa.ArrowInvalid, SchemaMismatchError):
        return False
    return not (pa.types.is_floating(t) and _are_rounded(texts, values))


def _are_rounded(texts: pa.Array, values: pa.Array) -> bool:
    """Return whether doubles may differ from whole numbers of these texts."""
    is_long = pc.match_substring_regex(texts, _LONG_NUMBER)
    is_rounded = pc.and_(is_long, pc.greater_equal(pc.abs(values), float(_EXACT_END)))
    return bool(pc.any(is_rounded).as_py())


def _json_rows(body: bytes, lines_before: int, *, what: str) -> pa.Table:
    if damaged := line_outside_utf8(body):
        raise InvalidRequestError(f"{what}: line {lines_before + damaged} {NOT_UTF8}")
    options = pyarrow.json.ReadOptions(use_threads=False, block_size=len(body) + 1)
    try:
        return pyarrow.json.read_json(pa.BufferReader(body), read_options=options)
    except pa.ArrowInvalid as error:
        match = _ROW.search(str(error))
        reason = str(error) if match is None else str(error)[: match.start()]
        line = "" if match is None else f", line {lines_before + int(match[1]) + 1}"
        raise InvalidSchemaError(
            f"{what}{line}: {reason.removeprefix('JSON parse error: ')}; make the table with"
            " 'streamhouse create', with the types that you choose"
        ) from error


def _leaves(name: str, values: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values inside of structs and lists, with names as in "line.item"."""
    t = values.type
    if pa.types.is_struct(t):
        for index in range(t.num_fields):
            yield from _leaves(f"{name}.{t.field(index).name}", pc.struct_field(values, index))
    elif pa.types.is_list(t):
        yield from _leaves(name, pc.list_flatten(values))
    else:
        yield name, values


def _long_numbers(rows: pa.Table, body: bytes) -> set[str]:
    """Return the names of leaves with whole numbers from 2**53 on, as their texts are."""
    names = set()
    for column in rows.schema.names:
        for name, values in _leaves(column, rows[column]):
            if not pa.types.is_integer(values.type) and not pa.types.is_floating(values.type):
                continue
            if not pc.any(pc.greater_equal(pc.abs(values), _EXACT_END)).as_py():
                continue
            if pa.types.is_integer(values.type) or _has_long_text(name.rpartition(".")[2], body):
                names.add(name)
    return names


def _has_long_text(name: str, body: bytes) -> bool:
    names = (re.escape(json.dumps(name, ensure_ascii=escapes)) for escapes in (True, False))
    pattern = rf"({'|'.join(names)})\s*:\s*(\[[^]]*)?-?[0-9]{{16,}}\s*[],}}]"
    return re.search(pattern.encode(), body) is not None


def _check_rounded(schema: pa.Schema, long_numbers: set[str], *, what: str) -> None:
    rows = schema.empty_table()
    for column in schema.names if long_numbers else ():
        for name, values in _leaves(column, rows[column]):
            if name in long_numbers and pa.types.is_floating(values.type):
                raise InvalidSchemaError(
                    f"{what}: column '{name}' has whole numbers from 2**53 on, which a double"
                    " would round: make the table with 'streamhouse create', with the types that"
                    " you choose"
                )


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
