"""A row by key over `GET .../rows/{key}`: the key as part of the URL, the row as JSON.

The GET costs the service a fraction of a batched lookup. The row has exactly the Python values
which Arrow makes of a batched lookup's answer, type by type, by the table's schema. Keys and rows
are therefore for a single schema version, named by the answer.

Some keys use the batched lookup instead: keys not plainly of their columns' types (Arrow judges the
values), and keys with characters open to change by proxies: a slash, a backslash, a percent sign, a
control character, only dots, or great length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

import pyarrow as pa

from streamhouse.core.model.table import TableInfo
from streamhouse.core.types.registry import type_of

__all__ = ["JsonRows"]

_KEY_CHARACTERS_MAX: Final = 500
_UNROUTED: Final = re.compile(r"[/\\%\x00-\x1f\x7f-\x9f]")


class JsonRows:
    """The keys and rows of one schema version of a table. Thread-safe."""

    def __init__(self, table: TableInfo) -> None:
        self.table: Final = table
        columns = table.schema.columns
        self._key_texts: Final = [
            (name, type_of(table.schema.column(name, table=str(table.path)).type).url_text)
            for name in table.descriptor.primary_key
        ]
        # Most values are right as they are in JSON.
        self._parsers: Final = [
            (column.name, parse)
            for column in columns
            if (parse := type_of(column.type).of_json) is not None
        ]

    def url_part(self, key: Mapping[str, Any]) -> str | None:
        """Return the URL's part for the row with this key; None: use a batched lookup."""
        parts = []
        for name, key_text in self._key_texts:
            text = key_text(key[name])
            if not text or len(text) > _KEY_CHARACTERS_MAX:
                return None
            if not text.isalnum() or not text.isascii():
                if _UNROUTED.search(text) or not text.strip("."):
                    return None
                try:
                    text = quote(text, safe="")
                except UnicodeEncodeError:
                    return None
            parts.append(text)
        return "/".join(parts)

    def url_part_of_plain(self, keys: pa.RecordBatch) -> str | None:
        """Return the URL's part for a key in Arrow's form."""
        try:
            return self.url_part(keys.to_pylist()[0])
        except (OverflowError, ValueError):
            # A date or timestamp that Python cannot hold.
            return None

    def row(self, data: bytes | bytearray) -> dict[str, Any]:
        """Return the row of an answer in this schema version.

        Raises `OutsideOfPythonError`, and `ValueError` or `TypeError` for an answer without such a
        row.
        """
        row = json.loads(data)
        if not isinstance(row, dict) or len(row) != len(self.table.schema.columns):
            raise ValueError("the answer is no row of the table")
        try:
            for name, parse in self._parsers:
                value = row[name]
                if value is not None:
                    row[name] = parse(value)
        except (KeyError, ArithmeticError) as error:
            raise ValueError(f"the answer is no row of the table: {error!r}") from error
        return row
