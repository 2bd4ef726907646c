"""Conversion between the Avro library's columns, without logical types, and a table's columns.

In the library dates and times are numbers, bytes are texts, and a decimal is big-endian bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.casts.nested import entries_of, offsets_of
from streamhouse.storage_service.kafka.avro_schema import AvroType

__all__ = ["from_plain", "to_plain"]

_US_PER_MS: Final = 1_000
_DECIMAL_BYTES: Final = 16
_SHOWN_MAX: Final = 80


def from_plain(array: pa.Array, t: AvroType) -> pa.Array:
    """Return the library's values as values of `t.arrow`.

    Raises `ArrowInvalid` or `SchemaMismatchError` for invalid values.
    """
    arrow = t.arrow
    if pa.types.is_struct(arrow):
        children = [
            from_plain(child, part.type)
            for child, part in zip(array.flatten(), t.parts, strict=True)
        ]
        return pa.StructArray.from_arrays(children, fields=list(arrow), mask=array.is_null())
    if pa.types.is_list(arrow):
        values = from_plain(array.flatten(), t.parts[0].type)
        return pa.ListArray.from_arrays(offsets_of(array), values, arrow, mask=array.is_null())
    if pa.types.is_map(arrow):
        entries = entries_of(array)
        keys, items = entries.flatten().flatten()
        return pa.MapArray.from_arrays(
            offsets_of(entries),
            keys,
            from_plain(items, t.parts[0].type),
            type=arrow,
            mask=array.is_null(),
        )
    if t.logical == "decimal":
        return _decimals(_in_layout_of(pa.binary(), array), arrow)
    if pa.types.is_binary(arrow):
        return _in_layout_of(arrow, array)
    if t.logical == "date":
        return array.view(arrow)
    if t.logical.endswith("-millis"):
        return pc.multiply_checked(array, _US_PER_MS).view(arrow)
    if t.logical.endswith("-micros"):
        return array.view(arrow)
    return array.cast(arrow)


def to_plain(array: pa.Array, t: AvroType, *, where: str) -> pa.Array:
    """Return values of `t.arrow` in the library's form.

    Raises `SchemaMismatchError` for a null without a null in the schema, and for a text that is not
    in the enum.
    """
    if array.null_count and not t.is_nullable:
        raise SchemaMismatchError(f"{where}: a value is null, and the schema has no null there")
    arrow = t.arrow
    if pa.types.is_struct(arrow):
        valid = array.filter(array.is_valid()) if array.null_count else array
        for child, part in zip(valid.flatten(), t.parts, strict=True):
            if child.null_count and not part.type.is_nullable:
                to_plain(child, part.type, where=f"{where}, field '{part.name}'")
        children = [
            _written(child, part.type, where)
            for child, part in zip(array.flatten(), t.parts, strict=True)
        ]
        fields = [
            pa.field(part.name, child.type, nullable=part.type.is_nullable)
            for child, part in zip(children, t.parts, strict=True)
        ]
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
    if pa.types.is_list(arrow):
        values = to_plain(array.flatten(), t.parts[0].type, where=where)
        field = pa.field("item", values.type, nullable=t.parts[0].type.is_nullable)
        return pa.ListArray.from_arrays(
            offsets_of(array), values, pa.list_(field), mask=array.is_null()
        )
    if pa.types.is_map(arrow):
        entries = entries_of(array)
        keys, items = entries.flatten().flatten()
        values = to_plain(items, t.parts[0].type, where=where)
        field = pa.field("value", values.type, nullable=t.parts[0].type.is_nullable)
        return pa.MapArray.from_arrays(
            offsets_of(entries),
            keys,
            values,
            type=pa.map_(pa.string(), field),
            mask=array.is_null(),
        )
    return _written(array, t, where)


def _written(array: pa.Array, t: AvroType, where: str) -> pa.Array:
    """Return unnested values in the library's form."""
    if pa.types.is_nested(t.arrow):
        # Nulls are checked already; the children of a null struct do not matter.
        return to_plain(array, replace(t, is_nullable=True), where=where)
    if t.logical == "decimal":
        return _in_layout_of(pa.string(), _decimal_bytes(array))
    if pa.types.is_binary(t.arrow):
        return _in_layout_of(pa.string(), array)
    if t.logical == "date":
        return array.view(pa.int32())
    if t.logical.endswith("-millis"):
        return _floor_ms(array.view(pa.int64()))
    if t.logical.endswith("-micros"):
        return array.view(pa.int64())
    if t.symbols:
        _check_symbols(array, t, where)
    return array


def _floor_ms(us: pa.Array) -> pa.Array:
    """Return microseconds as milliseconds, rounded down; safe for the first and last times."""
    truncated = pc.divide(us, _US_PER_MS)
    is_before = pc.less(us, pc.multiply(truncated, _US_PER_MS))
    return pc.subtract(truncated, is_before.cast(pa.int64()))


def _check_symbols(texts: pa.Array, t: AvroType, where: str) -> None:
    is_symbol = pc.is_in(texts, value_set=pa.array([*sorted(t.symbols), None], texts.type))
    unknown_texts = texts.filter(pc.invert(is_symbol))
    if len(unknown_texts):
        raise SchemaMismatchError(
            f"{where}: the text '{unknown_texts[0].as_py()[:_SHOWN_MAX]}' is no symbol of the"
            " schema's enum; register a schema whose enum has it, or change the row"
        )


def _decimals(values: pa.BinaryArray, t: pa.DataType) -> pa.Array:
    """Return big-endian two's complements as decimals."""
    plain = values.fill_null(b"\0") if values.null_count else values
    lengths = pc.binary_length(plain).to_numpy().astype(np.int64)
    if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= _DECIMAL_BYTES:
        raise SchemaMismatchError(f"a decimal has not 1 to {_DECIMAL_BYTES} bytes")
    data = np.frombuffer(b"".join(plain.to_pylist()), np.uint8)
    ends = np.cumsum(lengths)
    is_negative = data[ends - lengths] >= 0x80
    padded = np.where(is_negative[:, None], 0xFF, 0).astype(np.uint8).repeat(_DECIMAL_BYTES, axis=1)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    # A value's last byte is the last byte of its row.
    columns = np.arange(len(data)) - np.repeat(ends, lengths) + _DECIMAL_BYTES
    padded[rows, columns] = data
    little = np.ascontiguousarray(padded[:, ::-1])
    validity = None
    if values.null_count:
        validity = pa.array(values.is_valid().to_numpy(zero_copy_only=False)).buffers()[1]
    decimals = pa.Array.from_buffers(t, len(values), [validity, pa.py_buffer(little)])
    decimals.validate(full=True)
    return decimals


def _decimal_bytes(values: pa.Array) -> pa.BinaryArray:
    """Return decimals as big-endian two's complements."""
    plain = values.fill_null(0) if values.null_count else values
    buffer = plain.buffers()[1]
    little = np.frombuffer(buffer, np.uint8)[
        plain.offset * _DECIMAL_BYTES : (plain.offset + len(plain)) * _DECIMAL_BYTES
    ]
    big = np.ascontiguousarray(little.reshape(-1, _DECIMAL_BYTES)[:, ::-1])
    fixed = pa.Array.from_buffers(pa.binary(_DECIMAL_BYTES), len(plain), [None, pa.py_buffer(big)])
    as_bytes = fixed.cast(pa.binary())
    return pc.if_else(values.is_valid(), as_bytes, None) if values.null_count else as_bytes


def _in_layout_of(t: pa.DataType, values: pa.Array) -> pa.Array:
    """Return bytes in the type of texts, or the reverse, without checks."""
    return pa.Array.from_buffers(t, len(values), values.buffers(), values.null_count, values.offset)
