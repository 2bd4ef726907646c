"""Looking up rows by key over all buckets of a table, with answers in the order of the keys.

Without side effects, on any thread. `find_in_memory` never waits; `find` may read files. Fetches
can return all rows of an answer once every bucket's high watermark has reached `ends`: the caller
waits for the high watermarks before showing the rows.

Few keys are looked up as plain Python values, at a tenth of the cost of arrays; tests compare both.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import mmh3
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import RequestTooLargeError, UnavailableError
from streamhouse.core.model.bucketing import (
    buckets_for_rows,
    encode_few,
    encode_key,
)
from streamhouse.core.model.casts.conform import conform
from streamhouse.core.model.hashing.key_hash import PROCESS_HASHER
from streamhouse.core.model.schema import FOUND_COLUMN, empty_batch
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.core.model.values.sorted_values import distinct
from streamhouse.core.types.registry import type_of
from streamhouse.storage_service.engine.keys.key_bucket import table_rules
from streamhouse.storage_service.kv.lookup import (
    FoundRows,
    FoundValues,
    check_key_names,
    check_prefix,
    check_prefix_columns,
    least_row_bytes,
    too_many_bytes,
)
from streamhouse.storage_service.kv.plan.write_input import KEY_BYTES_MAX, check_keys
from streamhouse.storage_service.kv.rows.row_codec import RowCodec
from streamhouse.storage_service.kv.rows.single_row import SingleRows
from streamhouse.storage_service.kv.table_rules import TableRules

__all__ = [
    "BucketRows",
    "KeyAnswer",
    "KeyLookup",
    "Keys",
    "LookupBucket",
    "LookupTable",
    "StoredRows",
]

# Up to so many keys a bucket are looked up one by one, and so many rows made value by value. A key
# takes 2 us then, arrays take 200 us for each bucket, and hardly more for a hundred keys than for
# one: they win from about there on.
_FEW: Final = 48
# However many buckets: all keys may be of one, whose writer waits while they are looked up so.
_FEW_KEYS_MAX: Final = 2_000
_UNCOUNTED_KEYS: Final = 16
_ANY_SIZE: Final = 1 << 62


class BucketRows(Protocol):
    """The rows of one bucket by key; see `KvTablet`. Any thread."""

    @property
    def rules(self) -> TableRules:
        """The facts about the table; `schema_id` is the version of the rows."""

    @property
    def is_loaded(self) -> bool:
        """Whether all rows are in memory."""

    def find(self, keys: pa.Array, *, bytes_max: int) -> FoundValues:
        """Return the newest stored row of each encoded key."""

    def find_few(
        self,
        keys: Sequence[bytes],
        hashes: Sequence[tuple[int, int]],
        *,
        bytes_max: int,
        reads_files: bool,
    ) -> FoundValues | None:
        """As `find`, for few keys; None if files must be read without `reads_files`."""

    def prefix_lookup(self, prefix: pa.RecordBatch, *, rows_max: int, bytes_max: int) -> FoundRows:
        """Return rows whose leading key columns equal the one row of `prefix`, in key order."""


class LookupBucket(Protocol):
    """One bucket to look keys up in."""

    @property
    def rows(self) -> BucketRows:
        """The rows of the bucket."""

    def check_usable(self) -> None:
        """Raise for rows that are out of use."""


class LookupTable(abc.ABC):
    """A primary key table whose keys can be looked up."""

    lookup: KeyLookup

    @property
    @abc.abstractmethod
    def path(self) -> TablePath:
        """The table's path."""

    @abc.abstractmethod
    def count_rows(self) -> int:
        """Return the exact number of published rows; raises for rows that are out of use."""

    @abc.abstractmethod
    def shows(self, ends: Mapping[int, int]) -> bool:
        """Whether the changes below these ends, by bucket, are visible."""


class Keys(NamedTuple):
    """Encoded keys and the bucket of each: lists of few keys, arrays of many."""

    encoded: Any
    buckets: Any


class StoredRows(NamedTuple):
    """The stored row of each key, None or null for a key without a row.

    `ends` maps each bucket to the high watermark needed before the rows may be shown.
    """

    values: Any
    ends: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyAnswer:
    """Rows, and `ends` as in `StoredRows`.

    `more` has the positions of prefixes with more rows than requested.
    """

    rows: pa.RecordBatch
    ends: Mapping[int, int]
    more: Sequence[int] = ()


class KeyLookup:
    """Looks keys up in the buckets of one table, with one version of the schema.

    Each key is from some moment of the call; the moments may differ. All lookups raise
    `UnavailableError`, a retriable error, if the schema changes meanwhile.
    """

    def __init__(self, info: TableInfo, buckets: Sequence[LookupBucket]) -> None:
        self.info: Final = info
        self._buckets: Final = buckets
        self._rules: Final = table_rules(info)
        self._key_schema: Final = info.schema.select(self._rules.primary_key, table=str(info.path))
        self._codec: Final = RowCodec(
            info.schema,
            schema_id=info.schema_id,
            table=self._rules.table,
            earlier=self._rules.earlier,
        )
        self._no_row: Final = (None,) * len(self._codec.arrow_schema)
        self._single_rows: Final = SingleRows(self._rules, self._codec)
        self._bucket_key: Final = info.descriptor.effective_bucket_key
        self._is_key_hashed: Final = self._bucket_key == self._rules.primary_key
        column = info.schema.column(self._bucket_key[0], table=str(info.path))
        is_one = len(self._bucket_key) == 1
        self._to_hash: Final = type_of(column.type).hashed_bytes if is_one else None
        fields = [field.with_nullable(True) for field in self._codec.arrow_schema]
        found_field = pa.field(FOUND_COLUMN, pa.bool_(), nullable=False)
        self._answer_schema: Final = pa.schema([*fields, found_field])
        self.least_row_bytes: Final = least_row_bytes(self._codec.arrow_schema)
        """What a row of an answer takes in memory at least."""

    def key(self, values: Mapping[str, Any]) -> Keys:
        """Return one key of Python values; raises for an invalid key."""
        encoded = self._single_rows.encode_key(values)
        return Keys([encoded], [self._bucket_of(values, encoded)])

    def keys(self, rows: pa.RecordBatch) -> Keys:
        """Return the keys of rows with exactly the key columns; raises for invalid keys."""
        check_key_names(rows.schema.names, self._rules)
        conformed = conform(
            rows, self._key_schema, table=self._rules.table, key=self._key_schema.names
        )
        numbers = buckets_for_rows(conformed, self._bucket_key, self.info.bucket_count)
        if rows.num_rows > min(_FEW * self.info.bucket_count, _FEW_KEYS_MAX):
            return Keys(check_keys(conformed, self._rules), numbers)
        few = encode_few(conformed.columns)
        if few is None or max(map(len, few), default=0) > KEY_BYTES_MAX:
            few = check_keys(conformed, self._rules).to_pylist()
        return Keys(few, numbers.tolist())

    def find_in_memory(self, keys: Keys, *, bytes_max: int) -> StoredRows | None:
        """Return the rows of keys; None if files must be read, or for more than `bytes_max`."""
        try:
            if isinstance(keys.encoded, list):
                return self._find_few(keys, bytes_max=bytes_max, reads_files=False)
            is_loaded = all(bucket.rows.is_loaded for bucket in self._buckets)
            return self.find(keys, bytes_max=bytes_max) if is_loaded else None
        except RequestTooLargeError:
            return None

    def find(self, keys: Keys, *, bytes_max: int = _ANY_SIZE) -> StoredRows:
        """Return the rows of keys; raises `RequestTooLargeError` for more than `bytes_max`."""
        if not isinstance(keys.encoded, list):
            return self._find_many(keys, bytes_max=bytes_max)
        # So few rows are counted once they are found.
        size_max = bytes_max if len(keys.encoded) > _UNCOUNTED_KEYS else _ANY_SIZE
        rows = self._find_few(keys, bytes_max=size_max, reads_files=True)
        assert rows is not None
        return rows

    def _find_few(self, keys: Keys, *, bytes_max: int, reads_files: bool) -> StoredRows | None:
        encoded, groups = keys.encoded, _grouped(keys.buckets)
        hashes = PROCESS_HASHER.few(encoded)
        values: list[bytes | None] = [None] * len(encoded)
        ends = {}
        for number, positions in groups.items():
            is_whole = len(positions) == len(encoded)
            bucket = self._buckets[number]
            bucket.check_usable()
            rows = bucket.rows
            found_values = rows.find_few(
                encoded if is_whole else [encoded[p] for p in positions],
                hashes if is_whole else [hashes[p] for p in positions],
                bytes_max=bytes_max,
                reads_files=reads_files,
            )
            if found_values is None:
                return None
            self._check_version(rows)
            ends[number] = found_values.end_offset
            if is_whole:
                return StoredRows(found_values.values, ends)
            for position, value in zip(positions, found_values.values, strict=True):
                values[position] = value
                bytes_max -= 0 if value is None else len(value)
        return StoredRows(values, ends)

    def _find_many(self, keys: Keys, *, bytes_max: int) -> StoredRows:
        encoded, numbers = keys
        if len(encoded) * self.least_row_bytes > bytes_max:
            raise too_many_bytes(self._rules.table, bytes_max)
        present = [0] if self.info.bucket_count == 1 else distinct(numbers).tolist()
        parts, places, ends = [], [], {}
        bytes_left = bytes_max
        for number in present:
            bucket_keys = encoded
            if len(present) > 1:
                places.append(np.flatnonzero(numbers == number))
                bucket_keys = encoded.take(pa.array(places[-1]))
            rows = self._usable(number)
            found_values = rows.find(bucket_keys, bytes_max=bytes_left)
            self._check_version(rows)
            count = len(bucket_keys) - found_values.values.null_count
            bytes_left -= max(found_values.values.nbytes, count * self.least_row_bytes)
            # Of a bucket's few rows nobody knows how large they are before they are found.
            if bytes_left < 0:
                raise too_many_bytes(self._rules.table, bytes_max)
            ends[number] = found_values.end_offset
            parts.append(found_values.values)
        if len(parts) == 1:
            return StoredRows(parts[0], ends)
        order = np.empty(len(encoded), dtype=np.int64)
        if parts:
            order[np.concatenate(places)] = np.arange(len(encoded))
        parts = [pa.concat_arrays([pa.array([], pa.binary()), *parts])]
        return StoredRows(parts.pop().take(pa.array(order)), ends)

    def values(self, found: StoredRows) -> list[Any] | None:
        """Return the row of one key as Python values by column; None without a row."""
        (value,) = found.values
        return None if value is None else self._single_rows.decode_values(value)

    def rows(self, found: StoredRows) -> KeyAnswer:
        """Return a row for each key, in order, and `__found`; a missing row is null."""
        values, columns = found.values, None
        if isinstance(values, list):
            columns = self._few_columns(values)
            values = pa.array(values, pa.binary())
        is_found = values.is_valid()
        if columns is None:
            columns = self._codec.decode(values.drop_null()).columns
            if values.null_count:
                present = is_found.to_numpy(zero_copy_only=False)
                row_positions = pa.array(np.cumsum(present) - 1, mask=~present)
                columns = [column.take(row_positions) for column in columns]
        rows = pa.RecordBatch.from_arrays([*columns, is_found], schema=self._answer_schema)
        return KeyAnswer(rows=rows, ends=found.ends)

    def _few_columns(self, values: Sequence[bytes | None]) -> list[pa.Array] | None:
        """Return the columns of few rows, made value by value; None if arrays are needed."""
        plain = self._single_rows.plain
        if plain is None or not 0 < len(values) <= _FEW:
            return None
        if not all(value is None or plain.is_own(value) for value in values):
            return None
        rows = [self._no_row if value is None else plain.decode(value) for value in values]
        return list(plain.arrays(rows))

    def prefix_rows(
        self, prefixes: pa.RecordBatch, *, rows_max: int, bytes_max: int = _ANY_SIZE
    ) -> KeyAnswer:
        """Return the rows under each prefix, prefix after prefix, each in key order.

        At most `rows_max` rows for a prefix; `prefixes` has leading key columns. Raises
        `RequestTooLargeError` for rows of more than `bytes_max`.
        """
        bytes_left = bytes_max
        check_prefix_columns(prefixes.schema.names, self._rules)
        batches: list[pa.RecordBatch] = []
        ends: dict[int, int] = {}
        cut_prefixes: list[int] = []
        for position in range(prefixes.num_rows):
            prefix = prefixes.slice(position, 1)
            bucket_rows: list[pa.RecordBatch] = []
            for number in self._buckets_of_prefix(prefix):
                rows_of = self._usable(number)
                part = rows_of.prefix_lookup(prefix, rows_max=rows_max, bytes_max=bytes_left)
                bytes_left -= part.rows.nbytes
                if bytes_left < 0:
                    raise too_many_bytes(self._rules.table, bytes_max)
                self._check_version(rows_of)
                ends[number] = part.end_offset
                bucket_rows.append(part.rows)
            rows = self._merged(bucket_rows)
            if rows.num_rows > rows_max:
                cut_prefixes.append(position)
            batches.append(rows.slice(0, rows_max))
        if not batches:
            return KeyAnswer(rows=empty_batch(self._codec.arrow_schema), ends=ends)
        return KeyAnswer(rows=pa.concat_batches(batches), ends=ends, more=cut_prefixes)

    def _usable(self, number: int) -> BucketRows:
        bucket = self._buckets[number]
        bucket.check_usable()
        return bucket.rows

    def _check_version(self, rows: BucketRows) -> None:
        """Raise if the rows may have another schema than this lookup."""
        if rows.rules.schema_id != self.info.schema_id:
            raise UnavailableError(
                f"the schema of table '{self.info.path}' is just changing; try again"
            )

    def _bucket_of(self, key: Mapping[str, Any], encoded: bytes) -> int:
        """Return the bucket of a key with a given encoded form."""
        if self.info.bucket_count == 1:
            return 0
        if self._to_hash is not None:
            hashed = self._to_hash(key[self._bucket_key[0]])
        elif self._is_key_hashed:
            hashed = encoded
        else:
            hashed = self._single_rows.encode_columns(key, self._bucket_key)
        return (mmh3.hash(hashed) & 0x7FFFFFFF) % self.info.bucket_count

    def _buckets_of_prefix(self, prefix: pa.RecordBatch) -> Sequence[int]:
        """Return the bucket determined by the prefix, or all buckets."""
        check_prefix(prefix, self._rules)
        if not set(self._bucket_key) <= set(prefix.schema.names):
            return range(self.info.bucket_count)
        part = self.info.schema.select(prefix.schema.names, table=self._rules.table)
        conformed = conform(prefix, part, table=self._rules.table, key=part.names)
        return [int(buckets_for_rows(conformed, self._bucket_key, self.info.bucket_count)[0])]

    def _merged(self, found: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        """Return the rows of several buckets in key order."""
        if len(found) == 1:
            return found[0]
        rows = pa.concat_batches(found)
        keys = encode_key([rows.column(name) for name in self._rules.primary_key])
        return rows.take(pc.sort_indices(keys))


def _grouped(numbers: Sequence[int]) -> Mapping[int, list[int]]:
    """Return the positions of each number."""
    if len(numbers) == 1:
        return {numbers[0]: [0]}
    positions: dict[int, list[int]] = {}
    for position, number in enumerate(numbers):
        positions.setdefault(number, []).append(position)
    return positions
