"""Rows of one table by one key, as JSON bytes, without Arrow: microseconds for a row in memory.

What it answers is what `lookup_one` answers, as `json.dumps` writes it. What it cannot answer it
leaves to that: keys that are not in memory, or not there at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import mmh3

from streamhouse.storage_service.engine.keys.key_bucket import KeyBucket
from streamhouse.storage_service.model.bucketing import bytes_to_hash
from streamhouse.storage_service.model.table import TableInfo

__all__ = ["RowReader"]


class RowReader:
    """Made once a table; `json_of` writes values of a column, `key_of` reads a key from a URL."""

    def __init__(
        self,
        info: TableInfo,
        buckets: Sequence[KeyBucket],
        *,
        json_of: Sequence[tuple[str, Callable[[Any], str]]],
        key_of: Callable[[Sequence[str]], dict[str, Any]],
    ) -> None:
        self.key_of: Final = key_of
        self._buckets: Final = buckets
        self._count: Final = info.bucket_count
        self._single_rows: Final = buckets[0].rows.single_rows
        self._bucket_key: Final = info.descriptor.effective_bucket_key
        self._is_key_hashed: Final = self._bucket_key == info.descriptor.primary_key
        column = info.schema.column(self._bucket_key[0], table=str(info.path))
        self._to_hash: Final = bytes_to_hash(column.type) if len(self._bucket_key) == 1 else None
        self._json_of: Final = json_of

    def find(self, key: Mapping[str, Any]) -> bytes | None:
        """Return the row with this key, if it is in memory and may be shown now; else None.

        Raises as `lookup_one` does for a key that is none.
        """
        encoded = self._single_rows.encode_key(key)
        bucket = self._buckets[self.bucket_of(key, encoded) if self._count > 1 else 0]
        bucket.check_usable()
        value, end_offset = bucket.rows.cached_one(encoded)
        if value is None or end_offset > bucket.log.high_watermark:
            return None
        row = self._single_rows.decode_values(value)
        parts = [name + write(item) for (name, write), item in zip(self._json_of, row, strict=True)]
        return f"{{{', '.join(parts)}}}".encode()

    def bucket_of(self, key: Mapping[str, Any], encoded: bytes) -> int:
        """Return the bucket of a key, whose encoded form is at hand."""
        if self._to_hash is not None:
            hashed = self._to_hash(key[self._bucket_key[0]])
        elif self._is_key_hashed:
            hashed = encoded
        else:
            hashed = self._single_rows.encode_columns(key, self._bucket_key)
        return (mmh3.hash(hashed) & 0x7FFFFFFF) % self._count
