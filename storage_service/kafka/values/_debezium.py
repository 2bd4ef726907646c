"""Debezium's envelopes as changes of rows, as `streamhouse.cdc.debezium` takes them in Spark.

An envelope is `{op, before, after}`, alone or as the payload beside its schema.

- `c`, `r` and `u` become their `after`; `d` deletes its `before`, or the record's key.
- A tombstone, the empty record behind a delete, and a message (`m`) become nothing.
- `t` (truncate) and what is no envelope make no row, and say why.
- A time is a text or a number since 1970: of days or microseconds, or of what the schema beside the
  envelope says, as columns of MySQL with less than four digits of a second are milliseconds.
- Bytes are base64.
- A `u` whose `before` has another key than its `after` deletes the row of the old key, too.
- A write with Debezium's placeholder for a value that its update left alone is no row: the
  placeholder is not the value.
- Columns that the table has not are left out.
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
from streamhouse.core.model.rejected.division import arranged
from streamhouse.core.model.rejected.row_text import column_of
from streamhouse.core.model.schema import empty_batch
from streamhouse.core.text.base64_columns import from_base64
from streamhouse.core.text.json_reading import json_object
from streamhouse.core.text.json_texts import (
    JsonTexts,
    arrow_rows,
    check_finite,
    read_type,
    runs_of,
)
from streamhouse.core.text.text_rows import as_values, nested_bytes, width_of
from streamhouse.storage_service.kafka.values._draft import (
    Bad,
    Draft,
    DraftBounds,
    MovedRows,
    first_that_differs,
    spread_out,
)
from streamhouse.storage_service.kafka.values._json_columns import texts_of

__all__ = ["debezium_draft", "debezium_keys"]

_WRITES: Final = ("c", "r", "u")
_UPDATE: Final = "u"
_DELETE: Final = "d"
_OTHER: Final = ("t", "m")
_TRUNCATED: Final = (
    "the source's table was truncated, which no row says: empty the table yourself, then produce"
    " the records behind this one"
)
_ROW_PARTS: Final = ("before", "after")
_UNITS: Final = {
    "io.debezium.time.Timestamp": "ms",
    "org.apache.kafka.connect.data.Timestamp": "ms",
    "io.debezium.time.NanoTimestamp": "ns",
}
"""What a schema calls times that are no microseconds, and what they count."""
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
    """Return what envelopes say of rows with columns `types`, some of which are the `key`."""
    # Rows before and after, alone and as payload.
    bounds.check(types, 4 * len(values))
    reader = _Reader(types, parts=_ROW_PARTS, bounds=bounds, what_each="value")
    rows, bad = spread_out(values, reader.rows)
    ops = rows.column("op")
    is_write = _is_in(ops, _WRITES)
    is_delete = _is_in(ops, (_DELETE,))
    is_known = is_write | is_delete | _is_in(ops, _OTHER)
    is_there = values.is_valid().to_numpy(zero_copy_only=False)
    has_after = rows.column("has_after").fill_null(False).to_numpy(zero_copy_only=False)
    said: Bad = {int(at): (None, _TRUNCATED) for at in np.flatnonzero(_is_in(ops, ("t",)))}
    for at in np.flatnonzero(is_there & ~is_known):
        said[int(at)] = (None, f"the value is no envelope of Debezium: its op is {ops[int(at)]}")
    for at in np.flatnonzero(is_write & ~has_after):
        said[int(at)] = (None, f"the envelope of a change '{ops[int(at)]}' has no 'after'")
    from_before = pa.array(is_delete)
    columns = {
        name: pc.if_else(from_before, rows.column(f"before.{name}"), rows.column(f"after.{name}"))
        if is_delete.any()
        else rows.column(f"after.{name}")
        for name in types
    }
    return Draft(
        columns=columns,
        bad={**said, **bad, **_unavailable(values, is_write, types)},
        deletes=is_delete,
        skipped=~is_there | _is_in(ops, ("m",)),
        moved=_moved(rows, ops, key),
    )


def _unavailable(
    values: pa.BinaryArray,
    is_write: np.ndarray[Any, np.dtype[np.bool_]],
    types: Mapping[str, pa.DataType],
) -> Bad:
    """Return the writes that have Debezium's placeholder in a column of the table."""
    bad: Bad = {}
    data = values.buffers()[2]
    has_arrays = any(pa.types.is_list(t) for t in types.values())
    if data is None or not _UNAVAILABLE.may_be_in(data.to_pybytes(), has_arrays=has_arrays):
        return bad
    for at in np.flatnonzero(is_write).tolist():
        text = values[at].as_py()
        if _UNAVAILABLE.may_be_in(text):
            after = _object(_unwrapped(json_object(text)).get("after"))
            row = {name: value for name, value in after.items() if name in types}
            if columns := _UNAVAILABLE.columns_of(row):
                bad[at] = (columns[0], _UNAVAILABLE.reason)
    return bad


def _moved(rows: pa.RecordBatch, ops: pa.Array, key: Sequence[str]) -> MovedRows | None:
    """Return the updates that give a row another key."""
    is_other = np.zeros(len(ops), np.bool_)
    for name in key:
        before, after = rows.column(f"before.{name}"), rows.column(f"after.{name}")
        if before.null_count < len(before):
            is_other[first_that_differs(before, after)] = True
    if not is_other.any():
        return None
    # An old row that lacks a part of the key does not say which row it was.
    for name in key:
        is_other &= rows.column(f"before.{name}").is_valid().to_numpy(zero_copy_only=False)
    places = np.flatnonzero(is_other & _is_in(ops, (_UPDATE,)))
    taken = pa.array(places)
    return MovedRows(places, {name: rows.column(f"before.{name}").take(taken) for name in key})


def debezium_keys(
    keys: pa.BinaryArray, types: Mapping[str, pa.DataType], bounds: DraftBounds
) -> tuple[pa.RecordBatch, Bad]:
    """Return keys as columns `types`: objects, alone or as the payload beside their schema."""
    bounds.check(types, 2 * len(keys))
    reader = _Reader(types, parts=(), bounds=bounds, what_each="key")
    return spread_out(keys, reader.rows)


def _is_in(ops: pa.Array, known: Sequence[str]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    found = pc.is_in(ops, value_set=pa.array(known, pa.string()))
    return np.asarray(found.to_numpy(zero_copy_only=False))


class _Reader:
    """Reads objects whose columns `types` are in each of `parts`; no parts: in the object itself.

    What it makes of them are columns named `part.column`, beside `op` and `has_after`, or named as
    the columns are.
    """

    def __init__(
        self,
        types: Mapping[str, pa.DataType],
        *,
        parts: Sequence[str],
        bounds: DraftBounds,
        what_each: str,
    ) -> None:
        self._types = types
        self._parts = parts
        self._bounds = bounds
        self._what_each = what_each
        self._width = width_of(types.values()) * 2 * max(len(parts), 1)
        # Debezium's own way first: days and microseconds are numbers, moments of a zone texts.
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
        """Return what Arrow is to read, times as numbers if `is_number` says so."""
        row = []
        for name, t in self._types.items():
            read_as = pa.int64() if _is_time(t) and is_number(t) else read_type(t)
            if read_as is None:
                return None
            row.append(pa.field(name, read_as))
        inner = row
        if self._parts:
            inner = [pa.field("op", pa.string())]
            inner += [pa.field(part, pa.struct(row)) for part in self._parts]
        return pa.schema([*inner, pa.field("payload", pa.struct(inner))])

    def rows(self, values: pa.BinaryArray) -> tuple[pa.RecordBatch, Bad]:
        """Return the columns of all values, none of which is null."""
        if not len(values):
            return empty_batch(self._result), {}
        texts = texts_of(values)
        bad: Bad = {}
        batches = []
        for first, _, (rows, wrong) in runs_of(
            texts,
            width=self._width,
            read=lambda start, end: self._read(texts, start, end),
            read_few=lambda start, end: self._read_few(texts, start, end),
            what=self._bounds.what,
        ):
            batches.append(rows)
            bad |= {first + at: why for at, why in wrong.items()}
        return (batches[0] if len(batches) == 1 else pa.concat_batches(batches)), bad

    def _read(self, texts: JsonTexts, first: int, end: int) -> tuple[pa.RecordBatch, Bad] | None:
        units = self._units_of_run(texts, first, end)
        if units is None:
            return None
        for guess in self._guesses:
            rows = arrow_rows(texts, first, end, guess, width=self._width, unexpected="ignore")
            if rows is None:
                continue
            try:
                made = self._made(rows, units)
            except (pa.ArrowException, SchemaMismatchError):
                continue
            # The next run is likely to be as this one.
            self._guesses = [guess, *(other for other in self._guesses if other is not guess)]
            return made, {}
        return None

    def _units_of_run(self, texts: JsonTexts, first: int, end: int) -> _Units | None:
        """Return what times count by the schema beside the envelopes; None: they have several."""
        run = texts.run(first, end)
        if run is None:
            return None
        whole = run.to_pybytes()
        if not any(mark in whole for mark in _UNIT_MARKS):
            return {}
        head, schema = _schema_before(texts.text(first))
        if schema is None or not texts.begin_with(head, first, end):
            return None
        return self._units({"schema": schema})

    def _units(self, envelope: Mapping[str, Any]) -> _Units:
        """Return what times count by the schema beside an envelope, where no microseconds."""
        schema = envelope.get("schema")
        if self._parts:
            schema = next((f for f in _fields(schema) if f.get("field") == "after"), None)
        return {
            str(field.get("field")): _UNITS[name]
            for field in _fields(schema)
            if isinstance(name := field.get("name"), str) and name in _UNITS
        }

    def _made(self, rows: pa.RecordBatch, units: _Units) -> pa.RecordBatch:
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
            found = part(name).flatten()
            arrays += [
                _value(array, t, units.get(column))
                for array, (column, t) in zip(found, self._types.items(), strict=True)
            ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._result)

    def _read_few(self, texts: JsonTexts, first: int, end: int) -> tuple[pa.RecordBatch, Bad]:
        bad: Bad = {}
        envelopes: list[Mapping[str, Any]] = []
        units: list[_Units] = []
        for at in range(first, end):
            try:
                envelope = json_object(texts.text(at))
            except ValueError as error:
                bad[at - first] = (None, f"the {self._what_each} {error}")
                envelope = {}
            units.append(self._units(envelope))
            envelopes.append(_unwrapped(envelope))
        if not self._parts:
            found = self._arranged(envelopes, units)
            return found[0], {**found[1], **bad}
        ops, no_texts = column_of([e.get("op") for e in envelopes], pa.string())
        for at in no_texts:
            shown = ascii(envelopes[at]["op"])[:100]
            bad.setdefault(at, (None, f"the value is no envelope of Debezium: its op is {shown}"))
        has_after = [isinstance(e.get("after"), dict) for e in envelopes]
        arrays = [ops, pa.array(has_after)]
        for part in self._parts:
            rows, wrong = self._arranged([_object(e.get(part)) for e in envelopes], units)
            for at, why in wrong.items():
                bad.setdefault(at, why)
            arrays += rows.columns
        return pa.RecordBatch.from_arrays(arrays, schema=self._result), bad

    def _arranged(
        self, rows: Sequence[Mapping[str, Any]], units: Sequence[_Units]
    ) -> tuple[pa.RecordBatch, Bad]:
        types = self._types
        plain = [
            {
                name: _plain(value, types[name], counted.get(name))
                for name, value in row.items()
                if name in types
            }
            for row, counted in zip(rows, units, strict=True)
        ]
        nested = sum(nested_bytes(row, types) for row in plain)
        self._bounds.check_bytes(len(plain), nested)
        found = arranged(types, plain)
        return found.rows, dict(found.bad)


def _schema_before(text: bytes) -> tuple[bytes, Any]:
    """Return the schema that an envelope begins with, and the text up to its end.

    None for it: the envelope begins with something else.
    """
    begin = _BEFORE_SCHEMA.match(text)
    if begin is None:
        return b"", None
    try:
        rest = text[begin.end() :].decode()
        schema, end = _DECODER.raw_decode(rest)
    except (ValueError, RecursionError):
        return b"", None
    return text[: begin.end()] + rest[:end].encode(), schema


def _fields(schema: Any) -> list[Mapping[str, Any]]:
    """Return the fields of a schema of Kafka Connect; none of what is no such schema."""
    fields = schema.get("fields") if isinstance(schema, dict) else None
    return [f for f in fields if isinstance(f, dict)] if isinstance(fields, list) else []


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _unwrapped(envelope: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an object with what its payload has, where it is the payload of one."""
    payload = _object(envelope.get("payload"))
    return {**envelope, **{name: value for name, value in payload.items() if value is not None}}


def _is_time(t: pa.DataType) -> bool:
    return bool(pa.types.is_date(t) or pa.types.is_timestamp(t))


def _has_zone(t: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(t) and t.tz is not None)


def _value(array: pa.Array, t: pa.DataType, unit: str | None) -> pa.Array:
    """Return what Arrow has read as values of a column, numbers of time counted in `unit`."""
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
    """Return a value of JSON as the table's own JSON has it."""
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
    """Return a value of JSON without the fields that structs of a column have not."""
    if pa.types.is_struct(t) and isinstance(value, dict):
        known = {field.name: field.type for field in t}
        return {
            name: _with_known_fields(inner, known[name])
            for name, inner in value.items()
            if name in known
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
