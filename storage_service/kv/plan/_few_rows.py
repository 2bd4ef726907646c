"""The plan of few rows, one after the other: results as of `plan_rows`, in a fraction of the time.

Below some dozens of rows the calls of vectorised code cost more than the rows. Here every change is
applied to the current row of its key, as plain values (see `plain_rows`). Pure, as `plan_rows`.

Only correct and simple changes are planned. None leaves the write to the vectorised plan: refusals,
so that the errors are in one place, and rare cases of small writes (aggregation, nested columns,
changes without effect, rows in another form than the table's, stored rows of an earlier schema).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.model.changelog import (
    CHANGELOG_FIELDS,
    DELETE,
    INSERT,
    OPERATION_DELETE,
    OPERATION_NONE,
    UPDATE_AFTER,
    UPDATE_BEFORE,
)
from streamhouse.core.model.merge_engine import (
    ChangelogImage,
    DeleteBehavior,
    MergeEngine,
)
from streamhouse.core.types.registry import type_of
from streamhouse.storage_service.kv.plan.upsert_plan import PlannedWrite
from streamhouse.storage_service.kv.plan.write_input import KEY_BYTES_MAX, ROW_BYTES_MAX
from streamhouse.storage_service.kv.rows._plain_rows import (
    VERSION_BYTES,
    PlainRow,
    PlainRows,
    plain_array,
    stamped,
    version_of,
)
from streamhouse.storage_service.kv.rows.row_codec import RowCodec
from streamhouse.storage_service.kv.table_rules import TableRules

__all__ = ["FEW_ROWS_MAX", "FewBucketRows", "FewRowsPlan", "few_rows_plan"]

# Vectorised code takes the same time for few and many rows, and longer for each bucket.
_ROWS_MAX: Final = 48
_ROWS_MAX_A_BUCKET: Final = 24
FEW_ROWS_MAX: Final = 256
"""The most rows of any plan of few rows."""
# Copying larger values takes longer than calls; Arrow releases the interpreter meanwhile.
_FEW_BYTES_MAX: Final = 1 << 20
# Counted as if all rows had the greatest length; most are shorter.
_STORED_BYTES_MAX: Final = 4 << 20
_KIND_TYPE, _RETRACTS_TYPE = (field.type for field in CHANGELOG_FIELDS)
_BINARY: Final = pa.binary()


class FewBucketRows(NamedTuple):
    """As `upsert_plan.BucketRows`; `newest` takes and returns lists.

    `row_bytes_max` bounds the length of stored rows.
    """

    row_end: int
    base_offset: int
    newest: Callable[[Sequence[bytes]], Sequence[bytes | None]]
    row_bytes_max: int


class _NotSimple(Exception):
    """The changes are left to the vectorised plan."""


class _Version(NamedTuple):
    """A row before a change; `row` is None for a stored row."""

    value: bytes
    row: PlainRow | None


class _FewWrites(NamedTuple):
    """Changes, row by row, in the table's columns at `positions`.

    `encoded` has the bytes of whole rows; empty for partial updates.
    """

    keys: Sequence[bytes]
    deletes: Sequence[bool]
    positions: Sequence[int]
    rows: Sequence[PlainRow]
    encoded: Sequence[bytes]


_Line = tuple[PlainRow, int, int | None]
"""A line of the changelog: the row, the kind, the retracted offset."""


class _BucketChanges(NamedTuple):
    """The rows of one bucket before and after; `line_end` counts lines of all buckets."""

    base_offset: int
    stored: dict[bytes, _Version | None]
    newest: dict[bytes, _Version | None]
    line_end: int


def few_rows_plan(rules: TableRules, codec: RowCodec) -> FewRowsPlan | None:
    """Return the plan of small writes to a table; None for an unsuitable table."""
    schema = codec.arrow_schema
    encoders = [type_of(schema.field(name).type).stored_key_bytes for name in rules.primary_key]
    key_encoders = [encode for encode in encoders if encode is not None]
    if (
        rules.merge.engine is MergeEngine.AGGREGATION
        or any(pa.types.is_nested(t) for t in schema.types)
        or len(key_encoders) < len(encoders)
    ):
        return None
    return FewRowsPlan(rules, codec, key_encoders)


class FewRowsPlan:
    """Made once per table, for all its buckets."""

    def __init__(
        self, rules: TableRules, codec: RowCodec, key_encoders: Sequence[Callable[[Any], bytes]]
    ) -> None:
        self._rules: Final = rules
        self._schema: Final = codec.arrow_schema
        self._changelog_schema: Final = pa.schema([*self._schema, *CHANGELOG_FIELDS])
        self._names: Final = self._schema.names
        self._types: Final = self._schema.types
        self._is_nullable: Final = [field.nullable for field in self._schema]
        self._keys: Final = {
            self._names.index(name): encode
            for name, encode in zip(rules.primary_key, key_encoders, strict=True)
        }
        self._plain: Final = PlainRows(
            self._types, schema_id=codec.schema_id, value_bytes_min=codec.value_bytes_min
        )
        self._has_before: Final = rules.merge.image is ChangelogImage.FULL
        version = rules.merge.version_column
        self._version_at: Final = None if version is None else self._names.index(version)

    def plan(
        self,
        rows: pa.RecordBatch,
        operations: npt.NDArray[np.int8] | None,
        buckets: Sequence[FewBucketRows],
        *,
        columns: Sequence[str] | None,
        is_decided: bool = False,
    ) -> tuple[list[PlannedWrite], list[int]] | None:
        """Return the results of `check_rows` and `plan_rows` for these rows, or None."""
        # Up to so many rows this plan is faster than vectorised code.
        rows_max = min(_ROWS_MAX + _ROWS_MAX_A_BUCKET * len(buckets), FEW_ROWS_MAX)
        is_few = 0 < rows.num_rows <= rows_max
        if not is_few or rows.get_total_buffer_size() > _FEW_BYTES_MAX:
            return None
        if rows.num_rows * max(bucket.row_bytes_max for bucket in buckets) > _STORED_BYTES_MAX:
            return None
        try:
            writes = self._read(rows, operations, columns)
            if self._rules.checks and not is_decided:
                self._judge(rows, writes)
            lines: list[_Line] = []
            changes: list[_BucketChanges] = []
            line_ends: list[int] = []
            start = 0
            for bucket in buckets:
                span = range(start, bucket.row_end)
                stored = self._stored(writes.keys[start : bucket.row_end], bucket)
                newest, ends = self._resolve(writes, span, stored, lines, bucket.base_offset)
                line_ends += ends
                changes.append(_BucketChanges(bucket.base_offset, stored, newest, len(lines)))
                start = bucket.row_end
        except _NotSimple:
            return None
        return self._writes(lines, changes), line_ends

    def _read(
        self,
        batch: pa.RecordBatch,
        operations: npt.NDArray[np.int8] | None,
        columns: Sequence[str] | None,
    ) -> _FewWrites:
        """Return the changes as plain values, if all are correct."""
        deletes = self._deletes(batch.num_rows, operations)
        only_deletes = all(deletes)
        if only_deletes:
            # For deletes only the key counts.
            names = batch.schema.names
            if not set(self._names).issuperset(names):
                raise _NotSimple
            columns = self._rules.primary_key
            batch = batch.select([i for i, name in enumerate(names) if name in columns])
        positions = self._positions(batch.schema, columns)
        is_whole = not only_deletes and len(positions) == len(self._names)
        cells, keys, encoded = self._plain.read(batch, positions, self._keys, is_whole=is_whole)
        self._check_values(batch, positions, cells, deletes)
        if max(map(len, keys)) > KEY_BYTES_MAX:
            raise _NotSimple
        if encoded and max(map(len, encoded)) > ROW_BYTES_MAX - VERSION_BYTES:
            raise _NotSimple
        return _FewWrites(keys, deletes, positions, list(zip(*cells, strict=True)), encoded)

    def _deletes(self, count: int, operations: npt.NDArray[np.int8] | None) -> Sequence[bool]:
        if operations is None:
            return [False] * count
        codes = operations.tolist()
        is_allowed = self._rules.merge.delete_behavior is DeleteBehavior.ALLOW
        if OPERATION_NONE in codes or (OPERATION_DELETE in codes and not is_allowed):
            raise _NotSimple
        return [code == OPERATION_DELETE for code in codes]

    def _judge(self, rows: pa.RecordBatch, writes: _FewWrites) -> None:
        """Leave rows to the vectorised plan that break a constraint, or are judged when merged."""
        deletes = np.array(writes.deletes, np.bool_) if any(writes.deletes) else None
        if deletes is not None and deletes.all():
            return
        if not writes.encoded or any(self._rules.checks.broken(rows, deletes=deletes)):
            raise _NotSimple

    def _positions(self, writes: pa.Schema, columns: Sequence[str] | None) -> Sequence[int]:
        """Return the positions of the rows' columns: exactly the required columns."""
        if columns is None and writes.equals(self._schema):
            return range(len(self._names))
        column_names = set(self._names if columns is None else columns)
        positions = [i for i, name in enumerate(self._names) if name in column_names]
        is_whole = len(positions) == len(self._names)
        if (
            len(positions) < len(column_names)
            or not column_names.issuperset(self._rules.primary_key)
            or not (is_whole or self._rules.merge.engine is MergeEngine.LAST_ROW)
            or writes.names != [self._names[i] for i in positions]
            or writes.types != [self._types[i] for i in positions]
        ):
            raise _NotSimple
        return positions

    def _check_values(
        self,
        batch: pa.RecordBatch,
        positions: Sequence[int],
        cells: Sequence[Sequence[object]],
        deletes: Sequence[bool],
    ) -> None:
        """Check forbidden nulls and values."""
        for position, column in zip(positions, cells, strict=True):
            if self._is_nullable[position] and position not in self._keys:
                continue
            if None in column and (
                position in self._keys
                or any(v is None and not d for v, d in zip(column, deletes, strict=True))
            ):
                raise _NotSimple
        for limit in self._rules.limits.limits:
            position = batch.schema.get_field_index(limit.column)
            if position >= 0 and not limit.keeps(batch.column(position)):
                raise _NotSimple
        if self._version_at is not None and None in cells[self._version_at]:
            raise _NotSimple

    def _stored(self, keys: Sequence[bytes], bucket: FewBucketRows) -> dict[bytes, _Version | None]:
        """Return the stored rows of `keys`, in their order."""
        versions: dict[bytes, _Version | None] = dict.fromkeys(keys)
        for key, value in zip(versions, bucket.newest(list(versions)), strict=True):
            if value is not None:
                if not self._plain.is_own(value):
                    raise _NotSimple
                versions[key] = _Version(value, None)
        return versions

    def _resolve(
        self,
        writes: _FewWrites,
        span: range,
        stored: dict[bytes, _Version | None],
        lines: list[_Line],
        base_offset: int,
    ) -> tuple[dict[bytes, _Version | None], list[int]]:
        """Add the changes of one bucket to `lines`; return its newest rows.

        Also returns the number of lines after each row.
        """
        newest = dict(stored)
        offset_of_line_zero = base_offset - len(lines)
        ends = []
        for i in span:
            key = writes.keys[i]
            previous = newest[key]
            if writes.deletes[i]:
                if previous is not None:
                    lines.append((self._row_of(previous), DELETE, version_of(previous.value)))
                    newest[key] = None
            else:
                row, encoded = self._after(writes, i, previous)
                retracted = None
                if previous is not None:
                    if not self._counts(row, encoded, previous):
                        ends.append(len(lines))
                        continue
                    if self._has_before:
                        lines.append((self._row_of(previous), UPDATE_BEFORE, None))
                    retracted = version_of(previous.value)
                value = stamped(offset_of_line_zero + len(lines), encoded)
                newest[key] = _Version(value, row)
                lines.append((row, INSERT if previous is None else UPDATE_AFTER, retracted))
            ends.append(len(lines))
        return newest, ends

    def _row_of(self, version: _Version) -> PlainRow:
        return self._plain.decode(version.value) if version.row is None else version.row

    def _after(
        self, writes: _FewWrites, i: int, previous: _Version | None
    ) -> tuple[PlainRow, bytes]:
        """Return the row after an upsert, and its bytes."""
        if writes.encoded:
            return writes.rows[i], writes.encoded[i]
        row = [None] * len(self._names) if previous is None else list(self._row_of(previous))
        for position, value in zip(writes.positions, writes.rows[i], strict=True):
            row[position] = value
        if previous is None and any(
            value is None and not nullable
            for value, nullable in zip(row, self._is_nullable, strict=True)
        ):
            raise _NotSimple
        encoded = self._plain.encode([[value] for value in row])[0]
        if len(encoded) > ROW_BYTES_MAX - VERSION_BYTES:
            raise _NotSimple
        return tuple(row), encoded

    def _counts(self, row: PlainRow, encoded: bytes, previous: _Version) -> bool:
        """Whether an upsert over an existing row has an effect."""
        if previous.value[VERSION_BYTES:] == encoded and not self._rules.renews_unchanged:
            return False
        if self._version_at is not None:
            least = self._row_of(previous)[self._version_at]
            return least is None or bool(row[self._version_at] >= least)
        return self._rules.merge.engine is not MergeEngine.FIRST_ROW

    def _writes(
        self, lines: Sequence[_Line], changes: Sequence[_BucketChanges]
    ) -> list[PlannedWrite]:
        puts: list[tuple[bytes, bytes | None]] = []
        put_ends: list[int] = []
        deltas: list[int] = []
        for bucket in changes:
            delta = 0
            for key, version in bucket.newest.items():
                stored = bucket.stored[key]
                if version is not stored:
                    puts.append((key, None if version is None else version.value))
                    delta += (version is not None) - (stored is not None)
            put_ends.append(len(puts))
            deltas.append(delta)
        put_keys, put_values = zip(*puts, strict=True) if puts else ((), ())
        rows, kinds, retracted = zip(*lines, strict=True) if lines else ((), (), ())
        columns = [
            *self._plain.arrays(rows),
            plain_array(_KIND_TYPE, "b", kinds, below_null=0),
            plain_array(_RETRACTS_TYPE, "q", retracted, below_null=-1),
        ]
        changelog = pa.RecordBatch.from_arrays(columns, schema=self._changelog_schema)
        keys = plain_array(_BINARY, "", put_keys, below_null=b"")
        values = plain_array(_BINARY, "", put_values, below_null=b"")
        writes = []
        line = put = 0
        for bucket, put_end, delta in zip(changes, put_ends, deltas, strict=True):
            writes.append(
                PlannedWrite(
                    base_offset=bucket.base_offset,
                    changelog=changelog.slice(line, bucket.line_end - line),
                    keys=keys.slice(put, put_end - put),
                    values=values.slice(put, put_end - put),
                    row_count_delta=delta,
                )
            )
            line, put = bucket.line_end, put_end
        return writes
