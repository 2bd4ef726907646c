"""Looking up rows by key over all buckets of a table: where keys go, and answers in their order.

Blocking and without side effects; on any thread. An answer shows nothing that cannot be fetched
once every bucket's high watermark has reached `ends`: whoever shows it waits for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.storage_service.engine.keys.key_bucket import KeyBucket, table_rules
from streamhouse.storage_service.errors import UnavailableError
from streamhouse.storage_service.kv.lookup import (
    FoundRows,
    check_lookup_keys,
    check_prefix,
    check_prefix_columns,
    least_row_bytes,
    too_many_bytes,
)
from streamhouse.storage_service.model.bucketing import buckets_for_rows, encode_key
from streamhouse.storage_service.model.calendar import arrow_value
from streamhouse.storage_service.model.conform import conform
from streamhouse.storage_service.model.schema import FOUND_COLUMN
from streamhouse.storage_service.model.sorted_values import distinct
from streamhouse.storage_service.model.table import TableInfo

__all__ = ["KeyAnswer", "RowAnswer", "lookup_one", "lookup_rows", "prefix_rows"]

_FEW_KEYS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyAnswer:
    """Rows, and bucket -> the offset up to which its changes must be visible to show them.

    `more` has the numbers of the prefixes that have more rows than were asked for.
    """

    rows: pa.RecordBatch
    ends: Mapping[int, int]
    more: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAnswer:
    """One row or none; `ends` as in `KeyAnswer`."""

    row: dict[str, Any] | None
    ends: Mapping[int, int]


def lookup_rows(
    info: TableInfo, buckets: Sequence[KeyBucket], keys: pa.RecordBatch, *, bytes_max: int = 1 << 62
) -> KeyAnswer:
    """Return one row a key, in their order, and `__found`; rows not found are null.

    Each key is as it was at some moment of the call; the moments may differ. Raises
    `RequestTooLargeError` for rows of more than `bytes_max`.
    """
    bytes_left = bytes_max
    # Of few keys the rows are counted once they are found.
    if keys.num_rows > _FEW_KEYS and (
        keys.num_rows * least_row_bytes(info.schema.to_arrow()) > bytes_max
    ):
        raise too_many_bytes(str(info.path), bytes_max)
    by_bucket = _positions_by_bucket(info, keys)
    index = np.full(keys.num_rows, -1, dtype=np.int64)
    batches: list[pa.RecordBatch] = []
    ends: dict[int, int] = {}
    count = 0
    for number, positions in by_bucket.items():
        bucket = buckets[number]
        bucket.check_usable()
        is_whole = len(positions) == keys.num_rows
        wanted = keys if is_whole else keys.take(pa.array(positions))
        found = bucket.rows.lookup(wanted, bytes_max=bytes_left)
        bytes_left -= found.rows.nbytes
        _check_version(info, bucket)
        ends[number] = found.end_offset
        index[positions[found.found]] = np.arange(count, count + found.rows.num_rows)
        count += found.rows.num_rows
        batches.append(found.rows)
    return KeyAnswer(rows=_in_order(info, batches, index), ends=ends)


def lookup_one(info: TableInfo, buckets: Sequence[KeyBucket], key: Mapping[str, Any]) -> RowAnswer:
    """Return the row of one key, given and returned as Python values."""
    number = 0
    if info.bucket_count > 1:
        bucket_key = info.descriptor.effective_bucket_key
        part = info.schema.select(bucket_key, table=str(info.path)).to_arrow()
        columns = [arrow_value(key.get(field.name), field.type) for field in part]
        row = pa.RecordBatch.from_arrays(columns, schema=part)
        number = int(buckets_for_rows(row, bucket_key, info.bucket_count)[0])
    buckets[number].check_usable()
    found = buckets[number].rows.lookup_one(key)
    _check_version(info, buckets[number])
    return RowAnswer(row=found.row, ends={number: found.end_offset})


def prefix_rows(
    info: TableInfo,
    buckets: Sequence[KeyBucket],
    prefixes: pa.RecordBatch,
    *,
    rows_max: int,
    bytes_max: int = 1 << 62,
) -> KeyAnswer:
    """Return the rows under each prefix, prefix after prefix, each in key order.

    At most `rows_max` a prefix; `prefixes` has leading key columns. Raises `RequestTooLargeError`
    for rows of more than `bytes_max`.
    """
    bytes_left = bytes_max
    check_prefix_columns(prefixes.schema.names, table_rules(info))
    batches: list[pa.RecordBatch] = []
    ends: dict[int, int] = {}
    more: list[int] = []
    for position in range(prefixes.num_rows):
        prefix = prefixes.slice(position, 1)
        found: list[pa.RecordBatch] = []
        for number in _buckets_of_prefix(info, prefix):
            buckets[number].check_usable()
            rows_of = buckets[number].rows
            part: FoundRows = rows_of.prefix_lookup(prefix, rows_max=rows_max, bytes_max=bytes_left)
            bytes_left -= part.rows.nbytes
            if bytes_left < 0:
                raise too_many_bytes(str(info.path), bytes_max)
            _check_version(info, buckets[number])
            ends[number] = part.end_offset
            found.append(part.rows)
        rows = _merged(info, found)
        if rows.num_rows > rows_max:
            more.append(position)
        batches.append(rows.slice(0, rows_max))
    schema = info.schema.to_arrow()
    if not batches:
        return KeyAnswer(rows=pa.RecordBatch.from_pylist([], schema=schema), ends=ends)
    return KeyAnswer(rows=pa.concat_batches(batches), ends=ends, more=more)


def _check_version(info: TableInfo, bucket: KeyBucket) -> None:
    """Raise `UnavailableError`, which clients ride out, if the schema changed under a lookup."""
    if bucket.rows.rules.schema_id != info.schema_id:
        raise UnavailableError(f"the schema of table '{info.path}' is just changing; try again")


def _positions_by_bucket(info: TableInfo, keys: pa.RecordBatch) -> dict[int, np.ndarray]:
    """Return bucket -> the positions of its keys; raises for keys that are none."""
    if info.bucket_count == 1:
        # The bucket checks them.
        return {0: np.arange(keys.num_rows)}
    rules = table_rules(info)
    check_lookup_keys(keys, rules)
    part = info.schema.select(rules.primary_key, table=rules.table)
    conformed = conform(keys, part, table=rules.table)
    key = info.descriptor.effective_bucket_key
    numbers = buckets_for_rows(conformed, key, info.bucket_count)
    return {int(number): np.flatnonzero(numbers == number) for number in distinct(numbers)}


def _buckets_of_prefix(info: TableInfo, prefix: pa.RecordBatch) -> Sequence[int]:
    """Return the one bucket that the prefix decides, or all."""
    rules = table_rules(info)
    check_prefix(prefix, rules)
    key = info.descriptor.effective_bucket_key
    if not set(key) <= set(prefix.schema.names):
        return range(info.bucket_count)
    part = info.schema.select(prefix.schema.names, table=rules.table)
    conformed = conform(prefix, part, table=rules.table)
    return [int(buckets_for_rows(conformed, key, info.bucket_count)[0])]


def _merged(info: TableInfo, found: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows of several buckets in key order."""
    if len(found) == 1:
        return found[0]
    rows = pa.concat_batches(found)
    keys = encode_key([rows.column(name) for name in info.descriptor.primary_key])
    return rows.take(pc.sort_indices(keys))


def _in_order(
    info: TableInfo, batches: Sequence[pa.RecordBatch], index: np.ndarray
) -> pa.RecordBatch:
    fields = [field.with_nullable(True) for field in info.schema.to_arrow()]
    schema = pa.schema([*fields, pa.field(FOUND_COLUMN, pa.bool_(), nullable=False)])
    found = index >= 0
    taken = pa.array(index, mask=~found)
    if batches:
        rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        columns = [column.take(taken) for column in rows.columns]
    else:
        columns = [pa.nulls(0, field.type) for field in fields]
    return pa.RecordBatch.from_arrays([*columns, pa.array(found)], schema=schema)
