"""One row as JSON, and one primary key from a URL; for people and for small programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import unquote

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.schema import type_name
from streamhouse.core.model.table import VERSION_HEADER, TableInfo
from streamhouse.core.types.registry import type_of

__all__ = ["JsonRows"]


class JsonRows:
    """Reads a table's keys from URLs and writes rows as JSON; made once for each schema."""

    def __init__(self, info: TableInfo) -> None:
        self.key_of: Final = _key_reader(info)
        self.headers: Final = ((VERSION_HEADER, info.version),)
        names = [json.dumps(column.name).replace("%", "%%") for column in info.schema.columns]
        self._form: Final = f"{{{', '.join([f'{name}: %s' for name in names])}}}"
        self._writers: Final = [type_of(column.type).json_text for column in info.schema.columns]

    def text(self, values: Sequence[Any]) -> bytes:
        """Return the values of a row as `json.dumps(row_to_json(row))` writes the row."""
        pairs = zip(self._writers, values, strict=True)
        texts = ["null" if value is None else write(value) for write, value in pairs]
        return (self._form % tuple(texts)).encode()


def _key_reader(table: TableInfo) -> Callable[[Sequence[str]], dict[str, Any]]:
    """Return a function that reads a key from percent-encoded path segments, one per key column.

    Numbers, dates and timestamps have the form of ISO 8601 and SQL, binary is hexadecimal digits.
    The function raises `InvalidRequestError` for any other text.
    """
    key = table.descriptor.primary_key
    types = {name: table.schema.column(name, table=str(table.path)).type for name in key}
    readers = [(name, type_of(t).value_of_text) for name, t in types.items()]

    def read(segments: Sequence[str]) -> dict[str, Any]:
        if len(segments) != len(readers):
            raise InvalidRequestError(
                f"table '{table.path}': a row's URL needs one part for each key column"
                f" ({', '.join(key)}), not {len(segments)}"
            )
        key_values = {}
        for (name, value_of), segment in zip(readers, segments, strict=True):
            try:
                text = unquote(segment, errors="strict") if "%" in segment else segment
                key_values[name] = value_of(text)
            except (ValueError, ArithmeticError) as error:
                raise InvalidRequestError(
                    f"table '{table.path}': '{segment[:80]}' is no value of key column '{name}',"
                    f" which is {type_name(types[name])}"
                ) from error
        return key_values

    return read
