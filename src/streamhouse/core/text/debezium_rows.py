"""The values of Debezium's envelopes and of their keys, in the types of a table's columns.

An envelope is `{op, before, after, source}`, alone or as the payload beside its schema.

- Fields without a column are left out. As the caller says, a column's name matches in any case; the
  very name comes first.
- A time is a text or a number since 1970: days, or microseconds (or milliseconds, as the caller
  says), or the unit of the schema beside the envelope. A text without a zone is a time of UTC.
- Bytes are base64. Decimals are texts or numbers.
- A value without a form in its column is a misfit with the column's name: a number of time outside
  of the years 1 to 9999 (mostly a count in another unit), in a write Debezium's placeholder for a
  value unchanged by an update, and, as the caller says, a text for another number or a boolean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.records.unavailable_value import UnavailableValue
from streamhouse.core.model.schema import empty_batch
from streamhouse.core.model.values.calendar import DAYS, MICROSECONDS
from streamhouse.core.rows._row_text import column_of
from streamhouse.core.rows.checked_rows import Misfit, Misfits, ReadRows
from streamhouse.core.rows.division import read_rows
from streamhouse.core.text.base64_columns import from_base64
from streamhouse.core.text.json_objects import (
    JsonTexts,
    arrow_rows,
    check_finite,
    joined_runs,
    runs_of,
    texts_of,
)
from streamhouse.core.text.json_reading import json_object
from streamhouse.core.text.text_rows import as_values, nested_bytes, width_of
from streamhouse.core.types.registry import type_of

__all__ = ["DELETE", "OPERATIONS", "ROW_PARTS", "SOURCE", "WRITES", "EnvelopeReader"]

WRITES: Final = ("c", "r", "u")
DELETE: Final = "d"
OPERATIONS: Final = (*WRITES, DELETE, "t", "m")
"""Every `op` of Debezium; `t` is a truncated table, `m` a message of the database's log."""
ROW_PARTS: Final = ("before", "after")
SOURCE: Final = {
    **dict.fromkeys(("lsn", "ts_us", "ts_ms", "pos", "row"), pa.int64()),
    "file": pa.string(),
}
"""The fields of the part `source` that give a change's position in the database's log."""
_UNITS: Final = {
    "io.debezium.time.Timestamp": "ms",
    "org.apache.kafka.connect.data.Timestamp": "ms",
    "io.debezium.time.MicroTimestamp": "us",
    "io.debezium.time.NanoTimestamp": "ns",
}
"""Type names of times -> unit."""
_BEFORE_SCHEMA: Final = re.compile(rb'\{[ \t\r\n]*"schema"[ \t\r\n]*:[ \t\r\n]*')
_DECODER: Final = json.JSONDecoder()
_PER_US: Final = 1_000
_NO_NUMBERS: Final = ("NaN", "Infinity", "-Infinity")
"""Debezium's texts for numbers outside of JSON."""
_INT64: Final = range(-(1 << 63), 1 << 63)
# In ASCII a letter and its capital differ by this bit.
_CASE_BIT: Final = 0x20
_Units = Mapping[str, str]
_Types = Mapping[str, pa.DataType]


class EnvelopeReader:
    """Reads the columns `types` in each of the `parts` of envelopes, or in keys.

    The results are columns named `part.column`, with `op`, `has_before` and `has_after`. Without
    parts the texts are keys, and the results have the columns' names.

    Args:
        parts: of `before`, `after` and `source`; the columns of `source` are `SOURCE`, a field of
            another type is null.
        check: receives the number of rows and bytes before reading, and raises above a limit.
        what: the beginning of error messages.
        unit: the unit of a timestamp that comes as a number without a schema, `us` or `ms`.
        reads_texts: whether a text may be a number or a boolean, as in all JSON of the Kafka door;
            a decimal is always also a text.
        any_case: whether names match in any case; the search takes an eighth of the reading.
        unavailable: the placeholder for values unchanged by an update.
    """

    def __init__(
        self,
        types: _Types,
        *,
        parts: Sequence[str],
        check: Callable[[int, int], None],
        what: str,
        unit: str = "us",
        reads_texts: bool = False,
        any_case: bool = False,
        unavailable: UnavailableValue | None = None,
    ) -> None:
        self._types = types
        self._parts = parts
        self._check = check
        self._what = what
        self._unit = unit
        self._reads_texts = reads_texts
        self._unavailable = unavailable or UnavailableValue()
        self._columns = {name.lower(): name for name in types} if any_case else {}
        self._unit_marks = [name.encode() for name, other in _UNITS.items() if other != unit]
        self._width = width_of(types.values()) * 2 * max(len(parts), 1)
        # Debezium's default first: days and microseconds as numbers, times with a zone as texts.
        guesses = [
            self._schema(lambda t: not _has_zone(t)),
            self._schema(lambda _: False),
            self._schema(lambda _: True),
        ]
        self._guesses = [guess for guess in guesses if guess is not None]
        fields = [("op", pa.string()), *((f"has_{part}", pa.bool_()) for part in ROW_PARTS)]
        for part in parts:
            fields += [(f"{part}.{name}", t) for name, t in self._types_of(part).items()]
        self._result = pa.schema(fields if parts else list(types.items()))

    def _types_of(self, part: str) -> _Types:
        return SOURCE if part == "source" else self._types

    def _schema(self, is_number: Callable[[pa.DataType], bool]) -> pa.Schema | None:
        """Return Arrow's schema for reading; `is_number` selects the times that are numbers."""
        row = []
        for name, t in self._types.items():
            read_as = pa.int64() if _is_time(t) and is_number(t) else type_of(t).arrow_json_type
            if read_as is None:
                return None
            row.append(pa.field(name, read_as))
        inner = row
        if self._parts:
            inner = [pa.field("op", pa.string())]
            for part in self._parts:
                inside = list(SOURCE.items()) if part == "source" else row
                inner.append(pa.field(part, pa.struct(inside)))
        return pa.schema([*inner, pa.field("payload", pa.struct(inner))])

    def rows(self, values: pa.BinaryArray) -> ReadRows:
        """Return the columns of all values, without null values."""
        if not len(values):
            return ReadRows(empty_batch(self._result), {})
        data = values.buffers()[2]
        has_arrays = any(pa.types.is_list(t) for t in self._types.values())
        has_placeholders = bool(self._parts) and self._unavailable.may_be_in(
            b"" if data is None else data.to_pybytes(), has_arrays=has_arrays
        )
        texts = texts_of(values)
        read = joined_runs(
            runs_of(
                texts,
                width=self._width,
                read=lambda start, end: self._read(texts, start, end),
                read_few=lambda start, end: self._read_few(texts, start, end),
                what=self._what,
            )
        )
        if not has_placeholders:
            return read
        return ReadRows(read.rows, {**read.misfits, **self._placeholders(values, read.rows)})

    def _placeholders(self, values: pa.BinaryArray, rows: pa.RecordBatch) -> Misfits:
        """Return the writes with Debezium's placeholder in a column of the table."""
        misfits: Misfits = {}
        unavailable = self._unavailable
        is_write = pc.is_in(rows.column("op"), value_set=pa.array(WRITES))
        for at in np.flatnonzero(is_write.to_numpy(zero_copy_only=False)).tolist():
            text = values[at].as_py()
            if unavailable.may_be_in(text):
                after = self._named(_object(_unwrapped(json_object(text)).get("after")))
                if columns := unavailable.columns_of(after):
                    misfits[at] = Misfit(columns[0], unavailable.reason)
        return misfits

    def _read(self, texts: JsonTexts, first: int, end: int) -> ReadRows | None:
        units = self._units_of_run(texts, first, end)
        if units is None:
            return None
        for guess in self._guesses:
            rows = arrow_rows(texts, first, end, guess, width=self._width, unexpected="ignore")
            if rows is None:
                continue
            try:
                columns, nulls = self._columns_of(rows, units)
            except (pa.ArrowException, SchemaMismatchError):
                continue
            if self._columns and nulls and self._has_other_names(texts, first, end, nulls):
                return None
            # The next run probably has the same form.
            self._guesses = [guess, *(schema for schema in self._guesses if schema is not guess)]
            return ReadRows(columns, {})
        return None

    def _has_other_names(self, texts: JsonTexts, first: int, end: int, nulls: set[str]) -> bool:
        """Whether one of the columns `nulls` has a value under its name in another case."""
        run = texts.run(first, end)
        data = b"" if run is None else run.to_pybytes()
        folded = (np.frombuffer(data, np.uint8) | _CASE_BIT).tobytes()
        suspects = set()
        for name in nulls:
            quoted = json.dumps(name, ensure_ascii=False).encode()
            folded_name = bytes(byte | _CASE_BIT for byte in quoted)
            if not name.isascii() or data.count(quoted) != folded.count(folded_name):
                suspects.add(name.lower())
        for at in range(first, end) if suspects else ():
            envelope = _unwrapped(json_object(texts.text(at)))
            rows = [_object(envelope.get(x)) for x in ROW_PARTS] if self._parts else [envelope]
            if any(x.lower() in suspects and x not in self._types for row in rows for x in row):
                return True
        return False

    def _units_of_run(self, texts: JsonTexts, first: int, end: int) -> _Units | None:
        """Return the units in the schema beside the envelopes; None if the schemas differ."""
        run = texts.run(first, end)
        if run is None:
            return None
        data = run.to_pybytes()
        if not any(mark in data for mark in self._unit_marks):
            return {}
        head, schema = _schema_before(texts.text(first))
        if schema is None or not texts.begin_with(head, first, end):
            return None
        return self._units({"schema": schema})

    def _units(self, envelope: Mapping[str, Any]) -> _Units:
        """Return the units of columns in the schema beside an envelope."""
        schema = envelope.get("schema")
        if self._parts:
            schema = next((f for f in _fields(schema) if f.get("field") == "after"), None)
        names = {
            str(f.get("field")): f.get("name", _object(f.get("items")).get("name"))
            for f in _fields(schema)
        }
        return {
            column: _UNITS[kind]
            for column, kind in self._named(names).items()
            if isinstance(kind, str) and kind in _UNITS
        }

    def _named(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a row by column; the very name of a column comes first."""
        types, columns = self._types, self._columns
        named = {}
        for name, value in row.items():
            if name in types:
                named[name] = value
            elif (column := columns.get(name.lower())) is not None and column not in row:
                named[column] = value
        return named

    def _columns_of(self, rows: pa.RecordBatch, units: _Units) -> tuple[pa.RecordBatch, set[str]]:
        """Return the columns of the result, and which are null in a present part."""
        payload = rows.column("payload")
        inside = dict(zip([f.name for f in payload.type], payload.flatten(), strict=True))
        nulls = set()

        def part(name: str) -> pa.Array:
            outside = rows.column(name)
            return (
                outside
                if payload.null_count == len(payload)
                else pc.coalesce(inside[name], outside)
            )

        def value(array: pa.Array, column: str, absent: int = 0) -> pa.Array:
            if array.null_count > absent:
                nulls.add(column)
            return _value(array, self._types[column], units.get(column, self._unit))

        if not self._parts:
            arrays = [value(part(name), name) for name in self._types]
            return pa.RecordBatch.from_arrays(arrays, schema=self._result), nulls
        arrays = [part("op"), *(part(name).is_valid() for name in ROW_PARTS)]
        for name in self._parts:
            whole = part(name)
            children = whole.flatten()
            if name == "source":
                arrays += children
            else:
                arrays += [
                    value(array, column, whole.null_count)
                    for array, column in zip(children, self._types, strict=True)
                ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._result), nulls

    def _read_few(self, texts: JsonTexts, first: int, end: int) -> ReadRows:
        misfits: Misfits = {}
        envelopes: list[Mapping[str, Any]] = []
        units: list[_Units] = []
        for at in range(first, end):
            try:
                envelope = json_object(texts.text(at))
            except ValueError as error:
                part = "value" if self._parts else "key"
                misfits[at - first] = Misfit(None, f"the {part} {error}")
                envelope = {}
            units.append(self._units(envelope))
            envelopes.append(_unwrapped(envelope))
        if not self._parts:
            read = self._rows(envelopes, units)
            return ReadRows(read.rows, {**read.misfits, **misfits})
        ops, no_texts = column_of([e.get("op") for e in envelopes], pa.string())
        for at in no_texts:
            shown = ascii(envelopes[at]["op"])[:100]
            reason = f"the value is no envelope of Debezium: its op is {shown}"
            misfits.setdefault(at, Misfit(None, reason))
        arrays = [ops]
        arrays += [pa.array([isinstance(e.get(p), dict) for e in envelopes]) for p in ROW_PARTS]
        for part in self._parts:
            objects = [_object(e.get(part)) for e in envelopes]
            if part == "source":
                arrays += read_rows(SOURCE, [_position(source) for source in objects]).rows.columns
                continue
            read = self._rows(objects, units)
            misfits = {**read.misfits, **misfits}
            arrays += read.rows.columns
        return ReadRows(pa.RecordBatch.from_arrays(arrays, schema=self._result), misfits)

    def _rows(self, rows: Sequence[Mapping[str, Any]], units: Sequence[_Units]) -> ReadRows:
        types = self._types
        plain = [
            {
                name: self._plain(value, types[name], row_units.get(name, self._unit))
                for name, value in self._named(row).items()
            }
            for row, row_units in zip(rows, units, strict=True)
        ]
        nested = sum(nested_bytes(row, types) for row in plain)
        self._check(len(plain), nested)
        return read_rows(types, plain)

    def _plain(self, value: Any, t: pa.DataType, unit: str) -> Any:
        """Return a JSON value in the table's own JSON form.

        A value without a form becomes a text with the reason, which no type reads.
        """
        if pa.types.is_nested(t):
            return self._plain_parts(value, t, unit)
        if isinstance(value, str):
            if pa.types.is_binary(t):
                try:
                    return from_base64(pa.array([value]))[0].as_py()
                except (SchemaMismatchError, UnicodeEncodeError):
                    return f"{value} (no base64)"
            if not self._reads_texts and _is_number(t, value):
                return f"{value} (a text)"
        elif _is_time(t) and isinstance(value, int | Decimal) and not isinstance(value, bool):
            return _plain_time(value, t, unit)
        return value

    def _plain_parts(self, value: Any, t: pa.DataType, unit: str) -> Any:
        """Return a JSON value with plain parts, without fields unknown to the column's structs."""
        if pa.types.is_struct(t) and isinstance(value, dict):
            types_by_name = {field.name: field.type for field in t}
            return {
                name: self._plain(inner, types_by_name[name], unit)
                for name, inner in value.items()
                if name in types_by_name
            }
        if pa.types.is_list(t) and isinstance(value, list):
            return [self._plain(item, t.value_type, unit) for item in value]
        if pa.types.is_map(t) and isinstance(value, dict):
            return {name: self._plain(item, t.item_type, unit) for name, item in value.items()}
        if pa.types.is_map(t) and isinstance(value, list):
            types = (t.key_type, t.item_type)
            return [
                [self._plain(*part, unit) for part in zip(pair, types, strict=True)]
                if isinstance(pair, list) and len(pair) == len(types)
                else pair
                for pair in value
            ]
        return value


def _schema_before(text: bytes) -> tuple[bytes, Any]:
    """Return the schema at the beginning of an envelope, and the text up to the schema's end.

    The schema is None if the envelope begins with another member.
    """
    begin = _BEFORE_SCHEMA.match(text)
    if begin is None:
        return b"", None
    try:
        schema_text = text[begin.end() :].decode()
        schema, end = _DECODER.raw_decode(schema_text)
    except (ValueError, RecursionError):
        return b"", None
    return text[: begin.end()] + schema_text[:end].encode(), schema


def _fields(schema: Any) -> list[Mapping[str, Any]]:
    """Return the fields of a Kafka Connect schema; none for other values."""
    fields = schema.get("fields") if isinstance(schema, dict) else None
    return [f for f in fields if isinstance(f, dict)] if isinstance(fields, list) else []


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _unwrapped(envelope: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an envelope with the members of its payload, if any."""
    payload = _object(envelope.get("payload"))
    return {**envelope, **{name: value for name, value in payload.items() if value is not None}}


def _position(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `SOURCE` with a value of their type."""
    return {
        name: value
        for name, t in SOURCE.items()
        if (isinstance(value := source.get(name), str) and pa.types.is_string(t))
        or (type(value) is int and value in _INT64 and pa.types.is_integer(t))
    }


def _is_time(t: pa.DataType) -> bool:
    return bool(pa.types.is_date(t) or pa.types.is_timestamp(t))


def _has_zone(t: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(t) and t.tz is not None)


def _is_number(t: pa.DataType, text: str) -> bool:
    """Whether values of a type are no texts in JSON; NaN and infinities are always texts."""
    if pa.types.is_floating(t):
        return text not in _NO_NUMBERS
    return bool(pa.types.is_integer(t) or pa.types.is_boolean(t))


def _value(array: pa.Array, t: pa.DataType, unit: str) -> pa.Array:
    """Return Arrow's values as values of a column; numbers of time count in `unit`."""
    if pa.types.is_binary(t):
        return from_base64(array)
    if _is_time(t) and pa.types.is_integer(array.type):
        if pa.types.is_timestamp(t) and unit == "ms":
            array = pc.multiply_checked(array, _PER_US)
        elif pa.types.is_timestamp(t) and unit == "ns":
            ns = array.fill_null(0).to_numpy(zero_copy_only=False)
            array = pc.if_else(array.is_valid(), pa.array(ns // _PER_US), None)
        first, last = DAYS if pa.types.is_date(t) else MICROSECONDS
        # `pc.min_max` takes ten times as long.
        counts = array.fill_null(0).to_numpy(zero_copy_only=False)
        if len(counts) and not first <= counts.min() <= counts.max() <= last:
            raise SchemaMismatchError("a number is outside of the years 1 to 9999")
        return array.cast(pa.int32()).view(t) if pa.types.is_date(t) else array.view(t)
    check_finite(array)
    return array if array.type == t else as_values(array, t)


def _plain_time(value: int | Decimal, t: pa.DataType, unit: str) -> Any:
    if isinstance(value, Decimal):
        return f"{value} (no whole number)"
    number, (first, last) = value, DAYS
    if pa.types.is_timestamp(t):
        number = {"ms": value * _PER_US, "us": value, "ns": value // _PER_US}[unit]
        first, last = MICROSECONDS
    return number if first <= number <= last else f"{value} (outside of the years 1 to 9999)"
