"""Arrays, structs and maps, and the logical type of every Arrow type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.model.casts.nested import entries_of
from streamhouse.core.types._bytes import Binary, Text
from streamhouse.core.types._json_texts import list_texts, one_by_one, pair_texts, struct_texts
from streamhouse.core.types._whole_numbers import Date, Integer, Timestamp
from streamhouse.core.types.logical_type import ConvertPart, LogicalType, any_json_text, no_form
from streamhouse.core.types.numbers import Boolean, DecimalNumber, Float
from streamhouse.core.types.python_values import (
    UnfitError,
    UnknownFieldError,
    python_value_of,
    wrong_type,
)

__all__ = [
    "CLASSES",
    "SIMPLE",
    "Other",
    "struct_json",
    "type_of",
    "type_of_iceberg",
]


class _Nested(LogicalType):
    json_types = python_types = frozenset()
    transforms = aggregates = frozenset()
    day = least = None
    iceberg_name = avro = spark_texts = None
    of_bound = of_footer = lower_bound = upper_bound = staticmethod(no_form)
    json_text = staticmethod(any_json_text)
    value_of_text = values_of_texts = url_text = key_bytes = keys = staticmethod(no_form)
    stored_key_bytes = few_keys = None
    hashed_bytes = few_hashed = hashes = None
    stored_dtype = stored_view = of_stored = None

    def of_python(self, value: Any) -> Any:
        return self.with_parts(list(value) if isinstance(value, np.ndarray) else value, _inside)


class Array(_Nested):
    """array."""

    def __init__(self, arrow: pa.DataType) -> None:
        super().__init__(arrow)
        self._element: Final = type_of(arrow.value_type)
        self.of_json = None if self._element.of_json is None else self._list_of_json
        # Inside lists and structs Arrow reads dates as numbers and bytes as letters.
        self.arrow_json_type = arrow if self._element.arrow_json_type == arrow.value_type else None

    def with_parts(self, value: Any, convert: ConvertPart) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise wrong_type(value, self, "; give a list")
        field = self.arrow.value_field
        return [convert(item, field, self._element) for item in value]

    def _list_of_json(self, value: Sequence[Any]) -> list[Any]:
        return [_of_json(item, self._element) for item in value]

    def json_texts(self, column: pa.Array) -> pa.LargeStringArray:
        return list_texts(column, self._element.json_texts(column.flatten()))


class Struct(_Nested):
    """struct."""

    def __init__(self, arrow: pa.DataType) -> None:
        super().__init__(arrow)
        self._fields: Final = {field.name: type_of(field.type) for field in arrow}
        is_plain = all(t.arrow_json_type == t.arrow for t in self._fields.values())
        self.arrow_json_type = arrow if is_plain else None

    def with_parts(self, value: Any, convert: ConvertPart) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise wrong_type(value, self, "; give a dict")
        unknown = next((name for name in value if name not in self._fields), None)
        if unknown is not None:
            raise UnknownFieldError(
                f"the struct has no field {unknown!r:.80} (fields: {', '.join(self._fields)})"
            )
        fields = zip(self.arrow, self._fields.items(), strict=True)
        return {name: convert(value.get(name), field, t) for field, (name, t) in fields}

    def of_json(self, value: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _of_json(value[name], t) for name, t in self._fields.items()}

    def json_texts(self, column: pa.Array) -> pa.LargeStringArray:
        texts = struct_json([*self._fields], column.flatten())
        return pc.if_else(column.is_valid(), texts, None)


class Map(_Nested):
    """map."""

    arrow_json_type = None

    def __init__(self, arrow: pa.DataType) -> None:
        super().__init__(arrow)
        self._key, self._item = type_of(arrow.key_type), type_of(arrow.item_type)

    def with_parts(self, value: Any, convert: ConvertPart) -> list[tuple[Any, Any]]:
        pairs = list(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(pairs, list | tuple) or not all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
        ):
            raise wrong_type(value, self, "; give a dict, or a list of pairs")
        key, item = self.arrow.key_field, self.arrow.item_field
        return [(convert(k, key, self._key), convert(v, item, self._item)) for k, v in pairs]

    def of_json(self, value: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        return [(_of_json(k, self._key), _of_json(v, self._item)) for k, v in value]

    def json_texts(self, column: pa.Array) -> pa.LargeStringArray:
        entries = entries_of(column)
        keys, items = entries.flatten().flatten()
        return list_texts(
            entries, pair_texts(self._key.json_texts(keys), self._item.json_texts(items))
        )


class Other(_Nested):
    """A type of no column, as in rows of another program: values have JSON, and no other form."""

    arrow_json_type = of_json = None
    json_texts = staticmethod(one_by_one)

    def of_footer(self, _: Any) -> None:
        return None

    def with_parts(self, value: Any, _: ConvertPart) -> Any:
        raise wrong_type(value, self)


def _inside(value: Any, field: pa.Field, t: LogicalType) -> Any:
    converted = python_value_of(value, t)
    if converted is None and not field.nullable:
        raise UnfitError(f"'{field.name}' inside of it must not be null")
    return converted


def _of_json(value: Any, t: LogicalType) -> Any:
    return value if value is None or t.of_json is None else t.of_json(value)


def struct_json(names: Sequence[str], columns: Sequence[pa.Array]) -> pa.LargeStringArray:
    """Return every row of columns as a JSON object."""
    return struct_texts(names, [type_of(column.type).json_texts(column) for column in columns])


CLASSES: Final[dict[int, type[LogicalType]]] = {
    pa.lib.Type_BOOL: Boolean,
    pa.lib.Type_INT8: Integer,
    pa.lib.Type_INT16: Integer,
    pa.lib.Type_INT32: Integer,
    pa.lib.Type_INT64: Integer,
    pa.lib.Type_FLOAT: Float,
    pa.lib.Type_DOUBLE: Float,
    pa.lib.Type_DECIMAL128: DecimalNumber,
    pa.lib.Type_STRING: Text,
    pa.lib.Type_BINARY: Binary,
    pa.lib.Type_DATE32: Date,
    pa.lib.Type_TIMESTAMP: Timestamp,
    pa.lib.Type_LIST: Array,
    pa.lib.Type_MAP: Map,
    pa.lib.Type_STRUCT: Struct,
}
"""The class of each canonical type, by the number of its Arrow type."""
_BY_ID: Final[dict[int, LogicalType]] = {
    t.id: CLASSES[t.id](t)
    for t in (
        *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
        *(pa.string(), pa.binary(), pa.date32()),
    )
}

SIMPLE: Final = (
    *_BY_ID.values(),
    *map(Timestamp, (pa.timestamp("us"), pa.timestamp("us", tz="UTC"))),
)
"""Every type without parts and parameters, a wider type after a narrower."""


def type_of(t: pa.DataType) -> LogicalType:
    """Return the logical type of a canonical Arrow type, or `Other`."""
    simple = _BY_ID.get(t.id)
    if simple is not None:
        return simple
    is_canonical = not pa.types.is_timestamp(t) or t.unit == "us"
    return CLASSES.get(t.id, Other)(t) if is_canonical else Other(t)


def type_of_iceberg(name: str) -> LogicalType | None:
    """Return the logical type of a simple type of Iceberg, as in `long` or `decimal(9, 2)`."""
    if name.startswith("decimal("):
        return DecimalNumber(pa.decimal128(*map(int, name[8:-1].split(","))))
    return _BY_ICEBERG_NAME.get(name)


# Of integers with one name the widest counts.
_BY_ICEBERG_NAME: Final = {t.iceberg_name: t for t in SIMPLE}
