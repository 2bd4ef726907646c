"""A single key or row as Python values, for lookups of one key: microseconds, no Arrow, no arrays.

The bytes equal `model.bucketing.encode_key` and `row_layout`; tests compare them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Inexact, InvalidOperation
from typing import Any, Final

import pyarrow as pa

from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.schema import type_name
from streamhouse.core.model.values.calendar import python_value
from streamhouse.core.types.registry import type_of
from streamhouse.storage_service.kv.rows._plain_rows import PlainRows
from streamhouse.storage_service.kv.rows.row_codec import RowCodec
from streamhouse.storage_service.kv.table_rules import TableRules

__all__ = ["SingleRows"]


class SingleRows:
    """Encodes keys and decodes rows of one table, one at a time."""

    def __init__(self, rules: TableRules, codec: RowCodec) -> None:
        self._rules: Final = rules
        self._codec: Final = codec
        types = {column.name: column.type for column in rules.schema.columns}
        self._keys: Final = {
            name: (types[name], type_of(types[name]).key_bytes) for name in rules.primary_key
        }
        is_plain = not any(map(pa.types.is_nested, types.values()))
        self.plain: Final = (
            PlainRows(
                codec.arrow_schema.types,
                schema_id=codec.schema_id,
                value_bytes_min=codec.value_bytes_min,
            )
            if is_plain
            else None
        )
        """Reads values of this schema; None if it has nested columns."""
        self._converters: Final = [
            (i, convert)
            for i, t in enumerate(types.values())
            if (convert := type_of(t).of_stored) is not None
        ]

    def encode_key(self, key: Mapping[str, Any]) -> bytes:
        """Return the encoded key; raises unless each key column has exactly one valid value."""
        names = self._rules.primary_key
        if key.keys() != self._keys.keys():
            raise SchemaMismatchError(
                f"table '{self._rules.table}': a lookup takes the key columns"
                f" ({', '.join(names)}), not ({', '.join(key)})"
            )
        return self.encode_columns(key, names)

    def encode_columns(self, key: Mapping[str, Any], names: Sequence[str]) -> bytes:
        """Return some key columns, in this order, encoded as in a key."""
        parts = []
        for name in names:
            t, encode = self._keys[name]
            try:
                parts.append(b"\x01" + encode(key[name]))
            except (TypeError, ValueError, OverflowError, Inexact, InvalidOperation) as error:
                raise SchemaMismatchError(
                    f"table '{self._rules.table}': key column '{name}' is {type_name(t)}, and"
                    f" {key[name]!r} is no such value"
                ) from error
        return b"".join(parts)

    def decode_values(self, value: bytes) -> list[Any]:
        """Return the row of a stored value, as Python values (see `calendar`) by column."""
        plain = self.plain
        if plain is None or not plain.is_own(value):
            decoded = self._codec.decode(pa.array([value], pa.binary()))
            return [python_value(column[0]) for column in decoded.columns]
        values = list(plain.decode(value))
        for i, convert in self._converters:
            if values[i] is not None:
                values[i] = convert(values[i])
        return values
