"""Debezium's envelopes as changes of rows, in agreement with `streamhouse.cdc.debezium` in Spark.

An envelope is `{op, before, after}`, alone or as the payload beside its schema.

- `c`, `r` and `u` become their `after`; `d` deletes its `before`, or the record's key.
- A tombstone, the empty record behind a delete, and a message (`m`) become nothing.
- `t` (truncate) and invalid envelopes are misfits with a reason.
- A time is a text or a number since 1970, in days or microseconds, or in the unit of the schema
  beside the envelope. MySQL columns with at most three digits of a second are milliseconds.
- Bytes are base64.
- A `u` with a new key in `after` also deletes the row of the key in `before`.
- A write with Debezium's placeholder for an unchanged value is a misfit: the placeholder is not the
  value.
- Fields without a column are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.records.unavailable_value import UnavailableValue
from streamhouse.core.model.schema import empty_batch
from streamhouse.core.rows.checked_rows import Misfit, Misfits, ReadRows
from streamhouse.core.rows.division import read_rows
from streamhouse.core.rows.row_text import column_of
from streamhouse.core.text.base64_columns import from_base64
from streamhouse.core.text.json_objects import (
    JsonTexts,
    arrow_rows,
    check_finite,
    joined_runs,
    runs_of,
)
from streamhouse.core.text.json_reading import json_object
from streamhouse.core.text.text_rows import as_values, nested_bytes, width_of
from streamhouse.core.types.registry import type_of
from streamhouse.storage_service.kafka.values._draft import (
    Draft,
    DraftBounds,
    MovedRows,
    differing_rows,
    spread_out,
)
from streamhouse.storage_service.kafka.values._json_columns import texts_of

__all__ = ["debezium_draft", "debezium_keys"]

_WRITES: Final = ("c", "r", "u")
_UPDATE: Final = "u"
_DELETE: Final = "d"
_OTHER: Final = ("t", "m")
_TRUNCATED: Final = (
    "the source's table was truncated, which no row can express: empty the table yourself, then"
    " produce the records after this one"
)
_ROW_PARTS: Final = ("before", "after")
_UNITS: Final = {
    "io.debezium.time.Timestamp": "ms",
    "org.apache.kafka.connect.data.Timestamp": "ms",
    "io.debezium.time.NanoTimestamp": "ns",
}
"""Type names of times in other units than microseconds -> unit."""
_UNIT_MARKS: Final = tuple(name.encode() for name in _UNITS)
_BEFORE_SCHEMA: Final = re.compile(rb'\{[ \t\r\n]*"schema"[ \t\r\n]*:[ \t\r\n]*')
_DECODER: Final = json.JSONDecoder()
_PER_US: Final = 1_000
_UNAVAILABLE: Final = UnavailableValue()
_Units = Mapping[str, str]


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
    reader = _Reader(types, parts=_ROW_PARTS, bounds=bounds, record_part="value")
    read = spread_out(values, reader.rows)
    rows = read.rows
    ops = rows.column("op")
    is_write = _is_in(ops, _WRITES)
    is_delete = _is_in(ops, (_DELETE,))
    is_known = is_write | is_delete | _is_in(ops, _OTHER)
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
        misfits={**misfits, **read.misfits, **_unavailable(values, is_write, types)},
        deletes=is_delete,
        skipped=~is_there | _is_in(ops, ("m",)),
        moved=_moved(rows, ops, key),
    )


def _unavailable(
    values: pa.BinaryArray,
    is_write: np.ndarray[Any, np.dtype[np.bool_]],
    types: Mapping[str, pa.DataType],
) -> Misfits:
    """Return the writes with Debezium's placeholder in a column of the table."""
    misfits: Misfits = {}
    data = values.buffers()[2]
    has_arrays = any(pa.types.is_list(t) for t in types.values())
    if data is None or not _UNAVAILABLE.may_be_in(data.to_pybytes(), has_arrays=has_arrays):
        return misfits
    for at in np.flatnonzero(is_write).tolist():
        text = values[at].as_py()
        if _UNAVAILABLE.may_be_in(text):
            after = _object(_unwrapped(json_object(text)).get("after"))
            row = {name: value for name, value in after.items() if name in types}
            if columns := _UNAVAILABLE.columns_of(row):
                misfits[at] = Misfit(columns[0], _UNAVAILABLE.reason)
    return misfits


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
    reader = _Reader(types, parts=(), bounds=bounds, record_part="key")
    return spread_out(keys, reader.rows)


def _is_in(ops: pa.Array, names: Sequence[str]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    is_member = pc.is_in(ops, value_set=pa.array(names, pa.string()))
    return np.asarray(is_member.to_numpy(zero_copy_only=False))


class _Reader:
    """Reads objects with the columns `types` in each of `parts`, or in the object itself.

    The results are columns named `part.column`, with `op` and `has_after`. Without parts the
    results have the columns' names.
    """

    def __init__(
        self,
        types: Mapping[str, pa.DataType],
        *,
        parts: Sequence[str],
        bounds: DraftBounds,
        record_part: str,
    ) -> None:
        self._types = types
        self._parts = parts
        self._bounds = bounds
        self._record_part = record_part
        self._width = width_of(types.values()) * 2 * max(len(parts), 1)
        # Debezium's default first: days and microseconds as numbers, times with a zone as texts.
        guesses = [
            self._schema(lambda t: not _has_zone(t)),
            self._schema(lambda _: False),
            self._schema(lambda _: True),
        ]
        self._guesses = [guess for guess in guesses if guess is not None]
        names = [f"{part}.{name}" for part in parts for name in types] or list(types)
        flags = [("op", pa.string()), ("has_after", pa.bool_())] if parts else []
        row_types = list(types.values()) * max(len(parts), 1)
        self._result = pa.schema([*flags, *zip(names, row_types, strict=True)])

    def _schema(self, is_number: Any) -> pa.Schema | None:
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
            inner += [pa.field(part, pa.struct(row)) for part in self._parts]
        return pa.schema([*inner, pa.field("payload", pa.struct(inner))])

    def rows(self, values: pa.BinaryArray) -> ReadRows:
        """Return the columns of all values, without null values."""
        if not len(values):
            return ReadRows(empty_batch(self._result), {})
        texts = texts_of(values)
        runs = runs_of(
            texts,
            width=self._width,
            read=lambda start, end: self._read(texts, start, end),
            read_few=lambda start, end: self._read_few(texts, start, end),
            what=self._bounds.what,
        )
        return joined_runs(runs)

    def _read(self, texts: JsonTexts, first: int, end: int) -> ReadRows | None:
        units = self._units_of_run(texts, first, end)
        if units is None:
            return None
        for guess in self._guesses:
            rows = arrow_rows(texts, first, end, guess, width=self._width, unexpected="ignore")
            if rows is None:
                continue
            try:
                columns = self._columns_of(rows, units)
            except (pa.ArrowException, SchemaMismatchError):
                continue
            # The next run probably has the same form.
            self._guesses = [guess, *(schema for schema in self._guesses if schema is not guess)]
            return ReadRows(columns, {})
        return None

    def _units_of_run(self, texts: JsonTexts, first: int, end: int) -> _Units | None:
        """Return the units in the schema beside the envelopes; None if the schemas differ."""
        run = texts.run(first, end)
        if run is None:
            return None
        data = run.to_pybytes()
        if not any(mark in data for mark in _UNIT_MARKS):
            return {}
        head, schema = _schema_before(texts.text(first))
        if schema is None or not texts.begin_with(head, first, end):
            return None
        return self._units({"schema": schema})

    def _units(self, envelope: Mapping[str, Any]) -> _Units:
        """Return the units of times in the schema beside an envelope, except microseconds."""
        schema = envelope.get("schema")
        if self._parts:
            schema = next((f for f in _fields(schema) if f.get("field") == "after"), None)
        return {
            str(field.get("field")): _UNITS[name]
            for field in _fields(schema)
            if isinstance(name := field.get("name"), str) and name in _UNITS
        }

    def _columns_of(self, rows: pa.RecordBatch, units: _Units) -> pa.RecordBatch:
        payload = rows.column("payload")
        inside = dict(zip([f.name for f in payload.type], payload.flatten(), strict=True))

        def part(name: str) -> pa.Array:
            outside = rows.column(name)
            return (
                outside
                if payload.null_count == len(payload)
                else pc.coalesce(inside[name], outside)
            )

        if not self._parts:
            arrays = [_value(part(name), t, units.get(name)) for name, t in self._types.items()]
            return pa.RecordBatch.from_arrays(arrays, schema=self._result)
        arrays = [part("op"), part("after").is_valid()]
        for name in self._parts:
            children = part(name).flatten()
            arrays += [
                _value(array, t, units.get(column))
                for array, (column, t) in zip(children, self._types.items(), strict=True)
            ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._result)

    def _read_few(self, texts: JsonTexts, first: int, end: int) -> ReadRows:
        misfits: Misfits = {}
        envelopes: list[Mapping[str, Any]] = []
        units: list[_Units] = []
        for at in range(first, end):
            try:
                envelope = json_object(texts.text(at))
            except ValueError as error:
                misfits[at - first] = Misfit(None, f"the {self._record_part} {error}")
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
        has_after = [isinstance(e.get("after"), dict) for e in envelopes]
        arrays = [ops, pa.array(has_after)]
        for part in self._parts:
            read = self._rows([_object(e.get(part)) for e in envelopes], units)
            misfits = {**read.misfits, **misfits}
            arrays += read.rows.columns
        return ReadRows(pa.RecordBatch.from_arrays(arrays, schema=self._result), misfits)

    def _rows(self, rows: Sequence[Mapping[str, Any]], units: Sequence[_Units]) -> ReadRows:
        types = self._types
        plain = [
            {
                name: _plain(value, types[name], row_units.get(name))
                for name, value in row.items()
                if name in types
            }
            for row, row_units in zip(rows, units, strict=True)
        ]
        nested = sum(nested_bytes(row, types) for row in plain)
        self._bounds.check_bytes(len(plain), nested)
        return read_rows(types, plain)


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


def _is_time(t: pa.DataType) -> bool:
    return bool(pa.types.is_date(t) or pa.types.is_timestamp(t))


def _has_zone(t: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(t) and t.tz is not None)


def _value(array: pa.Array, t: pa.DataType, unit: str | None) -> pa.Array:
    """Return Arrow's values as values of a column; numbers of time count in `unit`."""
    if pa.types.is_binary(t):
        return from_base64(array)
    if _is_time(t) and pa.types.is_integer(array.type):
        if pa.types.is_date(t):
            return array.cast(pa.int32()).view(t)
        if unit == "ms":
            array = pc.multiply_checked(array, _PER_US)
        elif unit == "ns":
            ns = array.fill_null(0).to_numpy(zero_copy_only=False)
            array = pc.if_else(array.is_valid(), pa.array(ns // _PER_US), None)
        return array.view(t)
    check_finite(array)
    return array if array.type == t else as_values(array, t)


def _plain(value: Any, t: pa.DataType, unit: str | None) -> Any:
    """Return a JSON value in the table's own JSON form."""
    if unit is not None and isinstance(value, int) and pa.types.is_timestamp(t):
        return value * _PER_US if unit == "ms" else value // _PER_US
    if pa.types.is_nested(t):
        return _with_known_fields(value, t)
    if pa.types.is_binary(t) and isinstance(value, str):
        try:
            return from_base64(pa.array([value]))[0].as_py()
        except (SchemaMismatchError, UnicodeEncodeError):
            return f"{value} (no base64)"
    return value


def _with_known_fields(value: Any, t: pa.DataType) -> Any:
    """Return a JSON value without the fields unknown to the column's structs."""
    if pa.types.is_struct(t) and isinstance(value, dict):
        types_by_name = {field.name: field.type for field in t}
        return {
            name: _with_known_fields(inner, types_by_name[name])
            for name, inner in value.items()
            if name in types_by_name
        }
    if pa.types.is_list(t) and isinstance(value, list):
        return [_with_known_fields(item, t.value_type) for item in value]
    if pa.types.is_map(t) and isinstance(value, dict):
        return {name: _with_known_fields(item, t.item_type) for name, item in value.items()}
    if pa.types.is_map(t) and isinstance(value, list):
        types = (t.key_type, t.item_type)
        return [
            [_with_known_fields(*part) for part in zip(pair, types, strict=True)]
            if isinstance(pair, list) and len(pair) == len(types)
            else pair
            for pair in value
        ]
    return value
