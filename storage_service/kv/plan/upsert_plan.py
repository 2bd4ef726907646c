"""The effects of a batch of upserts and deletes on a bucket: its changelog, and the rows to store.

Pure and vectorised: computed from the changes and the stored rows of their keys, no I/O. Changes of
one key are resolved in order; a change leaving a row identical writes nothing, unless rows age
(`TableRules.renews_unchanged`). The changelog keeps the order of the batch, `-U` right before its
`+U`, and the row at position i gets the offset `base_offset + i`. Rows of several buckets, bucket
after bucket, are planned together: a plan costs far more than the few rows of a small write.
Changes replayed from the log, and rows restored from the lake, become a planned write without a
plan, because they carry their results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import CorruptDataError, RequestTooLargeError
from streamhouse.core.model.bucketing import encode_key
from streamhouse.core.model.changelog import (
    CHANGELOG_FIELDS,
    DELETE,
    INSERT,
    UPDATE_AFTER,
    UPDATE_BEFORE,
)
from streamhouse.core.model.hashing.byte_runs import in_turn, validity_buffer
from streamhouse.core.model.hashing.key_hash import HashedKeys
from streamhouse.core.model.merge_engine import ChangelogImage
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.storage_service.kv.plan._key_chains import KeyChains, chains_of
from streamhouse.storage_service.kv.plan._merge import MergedRows, merge_rows
from streamhouse.storage_service.kv.plan.write_input import (
    MET_BYTES_MAX,
    ROW_BYTES_MAX,
    WriteInput,
    is_merged,
    too_much_met,
)
from streamhouse.storage_service.kv.rows._stored_rows import StoredRows
from streamhouse.storage_service.kv.rows.row_codec import RowCodec, stamp_versions
from streamhouse.storage_service.kv.table_rules import TableRules

__all__ = ["BucketRows", "PlannedWrite", "counts_at", "plan_replay", "plan_restore", "plan_rows"]

_Rows = TypeVar("_Rows", pa.Array, pa.RecordBatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWrite:
    """The rows to append to the log, and then to store; both or nothing.

    `changelog` may have no rows. `keys` are distinct; a null among `values` deletes the row.
    """

    base_offset: int
    changelog: pa.RecordBatch
    keys: pa.Array
    values: pa.Array
    row_count_delta: int
    end_offset: int = field(init=False)
    """The offset after the last change."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "end_offset", self.base_offset + self.changelog.num_rows)


class BucketRows(NamedTuple):
    """The rows of one bucket: up to the row `row_end`, their first change at `base_offset`.

    `newest` returns the stored values of distinct keys, null for a missing key.
    """

    row_end: int
    base_offset: int
    newest: Callable[[HashedKeys], pa.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effects:
    """The effect of each change, by place (see `KeyChains`).

    `kind` is INSERT, UPDATE_AFTER, DELETE or 0 for nothing. `at` and `before_at` are the positions
    of the row after and before the change among merged and stored rows together.
    """

    kind: npt.NDArray[np.int8]
    at: npt.NDArray[np.int64]
    before_at: npt.NDArray[np.int64]

    @property
    def writes(self) -> npt.NDArray[np.bool_]:
        writes: npt.NDArray[np.bool_] = self.kind != 0
        return writes


def plan_rows(
    writes: WriteInput, buckets: Sequence[BucketRows], *, rules: TableRules, codec: RowCodec
) -> tuple[list[PlannedWrite], npt.NDArray[np.int64]]:
    """Plan rows grouped by bucket; return each bucket's write, and counts of changes.

    Buckets have no common keys. The counts are by row: the changes of all rows up to each row.
    """
    chains = chains_of(writes.keys)
    row_ends = [bucket.row_end for bucket in buckets]
    # Places are rows, reordered within a bucket only: both end at the same number.
    assert chains.distinct or all(int(chains.row[:e].max(initial=-1)) == e - 1 for e in row_ends)
    key_ends = [int(chains.chain[end - 1]) + 1 if end else 0 for end in row_ends]
    stored = StoredRows(_stored_values(chains.hashed, key_ends, buckets, rules), codec)
    merged = merge_rows(writes, chains, stored, rules)
    if rules.checks and is_merged(rules, writes.named):
        _judge(merged, writes, chains, rules)
    values = codec.encode(merged.rows)
    _check_sizes(values, merged, writes, chains, rules)
    if (
        chains.distinct
        and stored.values.null_count == 0
        and merged.accepted.all()
        and not writes.deletes.any()
    ):
        changes = _updates(values, merged.rows, chains, stored, buckets, rules)
    else:
        deletes = chains.of_rows(writes.deletes)
        changes = _changes(deletes, values, merged, chains, stored, buckets, rules, key_ends)
    line_ends = counts_at(changes.ends, row_ends)
    counts = counts_at(changes.delta, row_ends)
    planned_writes = []
    line = put = counted = 0
    for bucket, line_end, put_end, count in zip(
        buckets, line_ends, changes.put_ends, counts, strict=True
    ):
        planned_writes.append(
            PlannedWrite(
                base_offset=bucket.base_offset,
                changelog=_between(changes.changelog, line, line_end),
                keys=_between(changes.keys, put, put_end),
                values=_between(changes.puts, put, put_end),
                row_count_delta=count - counted,
            )
        )
        line, put, counted = line_end, put_end, count
    return planned_writes, changes.ends


def _judge(merged: MergedRows, writes: WriteInput, chains: KeyChains, rules: TableRules) -> None:
    """Judge every row as it is after its change."""
    rules.checks.refuse(
        merged.rows,
        deletes=writes.deletes[chains.row],
        row_numbers=writes.row_numbers[chains.row],
    )


class _Changes(NamedTuple):
    """The changes of all buckets, and the keys and values to put.

    `ends` is by row: the number of `changelog` lines of all rows up to each row. `delta` is, by
    place, the change of the row count so far. `put_ends` is by bucket.
    """

    changelog: pa.RecordBatch
    ends: npt.NDArray[np.int64]
    keys: pa.Array
    puts: pa.Array
    put_ends: list[int]
    delta: npt.NDArray[np.int64]


def counts_at(counts: Sequence[int] | npt.NDArray[np.int64], ends: Sequence[int]) -> list[int]:
    """Return the cumulative count at each of `ends`."""
    return [int(counts[end - 1]) if end else 0 for end in ends]


def _updates(
    values: pa.Array,
    rows: pa.RecordBatch,
    chains: KeyChains,
    stored: StoredRows,
    buckets: Sequence[BucketRows],
    rules: TableRules,
) -> _Changes:
    """Return the result of `_changes`, if each row updates a stored row."""
    count = len(values)
    differs = np.ones(count, dtype=np.bool_)
    if not rules.renews_unchanged:
        # Rows, keys and stored values line up: stamped alike, equal bytes are identical rows.
        stamp_versions(values, stored.versions)
        differs = pc.not_equal(values, stored.values).to_numpy(zero_copy_only=False)
    lines = 2 if rules.merge.image is ChangelogImage.FULL else 1
    puts_so_far = np.cumsum(differs, dtype=np.int64)
    ends = puts_so_far * lines
    row_ends = [bucket.row_end for bucket in buckets]
    written = ends - 1 + _offset_of_line_zero(buckets, counts_at(ends, row_ends))
    stamp_versions(values, written)
    images = [stored.rows, rows] if lines == 2 else [rows]
    keys, versions = chains.hashed.keys, stored.versions
    if not differs.all():
        chosen = pa.array(np.flatnonzero(differs))
        images = [image.take(chosen) for image in images]
        keys, values, versions = keys.take(chosen), values.take(chosen), versions[differs]
    columns = [
        in_turn(of_column) for of_column in zip(*(image.columns for image in images), strict=True)
    ]
    types = np.full((len(keys), lines), UPDATE_BEFORE, dtype=np.int8)
    retracts = np.full((len(keys), lines), -1, dtype=np.int64)
    types[:, -1], retracts[:, -1] = UPDATE_AFTER, versions
    return _Changes(
        changelog=_with_kinds(columns, types.ravel(), retracts.ravel(), rows.schema),
        ends=ends,
        keys=keys,
        puts=values,
        put_ends=counts_at(puts_so_far, row_ends),
        delta=np.zeros(count, dtype=np.int64),
    )


def _changes(
    deletes: npt.NDArray[np.bool_],
    values: pa.Array,
    merged: MergedRows,
    chains: KeyChains,
    stored: StoredRows,
    buckets: Sequence[BucketRows],
    rules: TableRules,
    key_ends: Sequence[int],
) -> _Changes:
    """Return the changes of rows of any kind."""
    effects = _effects(deletes, values, merged, chains, stored, rules)
    full = rules.merge.image is ChangelogImage.FULL
    lines = effects.writes.astype(np.int64)
    if full:
        lines += effects.kind == UPDATE_AFTER
    if not chains.distinct:
        by_row = np.empty_like(lines)
        by_row[chains.row] = lines
        lines = by_row
    ends = np.cumsum(lines)
    last_line = chains.of_rows(ends) - 1
    line_ends = counts_at(ends, [bucket.row_end for bucket in buckets])
    written = last_line + _offset_of_line_zero(buckets, line_ends)
    replaced = _replaced_versions(effects, chains, stored, written)
    changelog = _changelog(effects, merged, stored, last_line, replaced, full=full)
    keys, puts, put_ends = _puts(effects, values, chains, stored, written, key_ends)
    delta = np.cumsum((effects.kind == INSERT).astype(np.int64) - (effects.kind == DELETE))
    return _Changes(changelog, ends, keys, puts, put_ends, delta)


def _stored_values(
    hashed: HashedKeys,
    key_ends: Sequence[int],
    buckets: Sequence[BucketRows],
    rules: TableRules,
) -> pa.Array:
    if len(buckets) == 1:
        return buckets[0].newest(hashed)
    values = []
    start = size = 0
    for bucket, end in zip(buckets, key_ends, strict=True):
        values.append(bucket.newest(hashed.between(start, end)))
        size += values[-1].nbytes
        if size > MET_BYTES_MAX:
            raise too_much_met(rules.table, MET_BYTES_MAX)
        start = end
    return pa.concat_arrays(values)


def _between(rows: _Rows, start: int, end: int) -> _Rows:
    # A whole array stays the same object, so the cache recognises the keys of its last read.
    return rows if end - start == len(rows) else rows.slice(start, end - start)


def _offset_of_line_zero(
    buckets: Sequence[BucketRows], line_ends: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Return, by place, the offset of the very first line, as counted in the place's bucket."""
    starts = [0, *line_ends[:-1]]
    bases = [bucket.base_offset - line for bucket, line in zip(buckets, starts, strict=True)]
    sizes = np.diff([0, *(bucket.row_end for bucket in buckets)])
    return np.repeat(np.array(bases, dtype=np.int64), sizes)


def _check_sizes(
    values: pa.Array, merged: MergedRows, writes: WriteInput, chains: KeyChains, rules: TableRules
) -> None:
    if values.nbytes <= ROW_BYTES_MAX:
        return
    lengths = np.zeros(len(chains.row), dtype=np.int64)
    lengths[chains.row] = pc.binary_length(values).to_numpy()[merged.at]
    wrong = np.flatnonzero(lengths > ROW_BYTES_MAX)
    if len(wrong):
        raise RequestTooLargeError(
            f"table '{rules.table}': row {int(writes.row_numbers[wrong[0]])} has"
            f" {int(lengths[wrong[0]])} bytes; at most {ROW_BYTES_MAX}"
        )


def _effects(
    deletes: npt.NDArray[np.bool_],
    values: pa.Array,
    merged: MergedRows,
    chains: KeyChains,
    stored: StoredRows,
    rules: TableRules,
) -> _Effects:
    count = len(values)
    stored_keys = chains.of_chains(stored.found)
    upserts = merged.accepted & ~deletes
    # The previous row of a change: the latest effective change's row, else the stored row.
    before_at = np.where(stored_keys, count + chains.of_chains(stored.place), -1)
    if not chains.distinct:
        latest = chains.latest_before(merged.accepted)
        inner = latest >= 0
        source = latest[inner]
        before_at[inner] = np.where(deletes[source], -1, merged.at[source])
    exists = before_at >= 0
    kind = np.zeros(len(deletes), dtype=np.int8)
    kind[upserts & ~exists] = INSERT
    kind[deletes & exists] = DELETE
    updates = np.flatnonzero(upserts & exists)
    if rules.renews_unchanged:
        kind[updates] = UPDATE_AFTER
    elif len(updates):
        same = _identical(values, merged.at[updates], before_at[updates], chains, stored)
        kind[updates] = np.where(same, 0, UPDATE_AFTER)
    return _Effects(kind=kind, at=merged.at, before_at=before_at)


def _identical(
    values: pa.Array,
    at: npt.NDArray[np.int64],
    before_at: npt.NDArray[np.int64],
    chains: KeyChains,
    stored: StoredRows,
) -> npt.NDArray[np.bool_]:
    """Return whether the rows `at` and `before_at` are identical; clobbers stamps of `values`."""
    if chains.distinct and len(values) == len(stored.values):
        # Rows, keys and stored values line up: stamped alike, equal bytes are identical rows.
        stamp_versions(values, stored.versions)
        equal = pc.equal(values, stored.values).fill_null(False)
        return np.asarray(equal.to_numpy(zero_copy_only=False))[at]
    values_before = pa.concat_arrays([values, stored.values.drop_null()]).take(pa.array(before_at))
    values_after = values.take(pa.array(at))
    zeros = np.zeros(len(at), dtype=np.int64)
    stamp_versions(values_before, zeros)
    stamp_versions(values_after, zeros)
    return np.asarray(pc.equal(values_before, values_after).to_numpy(zero_copy_only=False))


def _replaced_versions(
    effects: _Effects,
    chains: KeyChains,
    stored: StoredRows,
    written_offsets: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Return, by place, the offset of the row version that a change replaces."""
    replaced = chains.of_chains(stored.versions)
    if not chains.distinct:
        latest = chains.latest_before(effects.writes)
        inner = latest >= 0
        replaced[inner] = written_offsets[latest[inner]]
    return replaced


def _changelog(
    effects: _Effects,
    merged: MergedRows,
    stored: StoredRows,
    last_line: npt.NDArray[np.int64],
    replaced: npt.NDArray[np.int64],
    *,
    full: bool,
) -> pa.RecordBatch:
    """Return the changelog; `last_line` is, by place, the position of a change's last line."""
    inserts, updates, deletes = (
        np.flatnonzero(effects.kind == kind) for kind in (INSERT, UPDATE_AFTER, DELETE)
    )
    count = len(inserts) + len(deletes) + len(updates) * (2 if full else 1)
    source = np.empty(count, dtype=np.int64)
    types = np.empty(count, dtype=np.int8)
    retracts = np.full(count, -1, dtype=np.int64)
    for places, kind in ((inserts, INSERT), (updates, UPDATE_AFTER), (deletes, DELETE)):
        if len(places) == 0:
            continue
        lines = last_line[places]
        source[lines] = (effects.before_at if kind == DELETE else effects.at)[places]
        types[lines] = kind
        if kind != INSERT:
            retracts[lines] = replaced[places]
    if full and len(updates):
        lines = last_line[updates] - 1
        source[lines] = effects.before_at[updates]
        types[lines] = UPDATE_BEFORE
    columns = _take_lines(merged.rows, stored, source, with_old_values=full or len(deletes) > 0)
    return _with_kinds(columns, types, retracts, merged.rows.schema)


def _with_kinds(
    columns: Sequence[pa.Array],
    types: npt.NDArray[np.int8],
    retracts: npt.NDArray[np.int64],
    schema: pa.Schema,
) -> pa.RecordBatch:
    """Return the changelog of lines with these columns; a `retracts` below 0 retracts nothing."""
    buffers = [validity_buffer(retracts >= 0), pa.py_buffer(retracts)]
    kind_columns = [pa.array(types), pa.Array.from_buffers(pa.int64(), len(retracts), buffers)]
    schema = pa.schema([*schema, *CHANGELOG_FIELDS])
    return pa.RecordBatch.from_arrays([*columns, *kind_columns], schema=schema)


def _take_lines(
    merged: pa.RecordBatch,
    stored: StoredRows,
    source: npt.NDArray[np.int64],
    *,
    with_old_values: bool,
) -> list[pa.Array]:
    """Return the columns of the rows at `source` among merged rows, and stored rows if asked."""
    if with_old_values and stored.found.any():
        indices = pa.array(source)
        return [
            pa.concat_arrays([new, old]).take(indices)
            for new, old in zip(merged.columns, stored.rows.columns, strict=True)
        ]
    if len(source) == merged.num_rows and np.array_equal(source, np.arange(len(source))):
        return list(merged.columns)
    return list(merged.take(pa.array(source)).columns)


def _puts(
    effects: _Effects,
    values: pa.Array,
    chains: KeyChains,
    stored: StoredRows,
    written_offsets: npt.NDArray[np.int64],
    key_ends: Sequence[int],
) -> tuple[pa.Array, pa.Array, list[int]]:
    """Return the keys to write and their values: the results of each chain's last change.

    Also returns the number of puts among the first keys, for each of `key_ends`.
    """
    if chains.distinct and effects.writes.all() and not (effects.kind == DELETE).any():
        stamp_versions(values, written_offsets)
        return chains.hashed.keys, values, list(key_ends)
    places = chains.latest(effects.writes)[chains.last()]
    changed = places >= 0
    chosen = places[changed]
    gone = effects.kind[chosen] == DELETE
    # A row inserted and deleted within the batch was never stored.
    pointless = gone & ~stored.found[changed]
    if pointless.any():
        changed[np.flatnonzero(changed)[pointless]] = False
        chosen, gone = chosen[~pointless], gone[~pointless]
    versions = np.zeros(len(values), dtype=np.int64)
    upserts = chosen[~gone]
    versions[effects.at[upserts]] = written_offsets[upserts]
    stamp_versions(values, versions)
    if len(chosen) == len(values) and not gone.any() and chains.distinct:
        return chains.hashed.keys, values, list(key_ends)
    counts = np.cumsum(changed)
    ends = [int(counts[end - 1]) if end else 0 for end in key_ends]
    keys = chains.hashed.keys if changed.all() else chains.hashed.keys.filter(pa.array(changed))
    put_values = values.take(pa.array(effects.at[chosen], mask=gone if gone.any() else None))
    return keys, put_values, ends


def plan_replay(
    changelog: pa.RecordBatch, *, rules: TableRules, codec: RowCodec, base_offset: int
) -> PlannedWrite:
    """Return the planned write of a replayed `changelog` starting at `base_offset`.

    The current state is not needed: every change carries its result.
    """
    types = changelog.column(CHANGE_TYPE_COLUMN).to_numpy()
    lines = np.flatnonzero(types != UPDATE_BEFORE)
    rows = changelog.select(rules.schema.names)
    keys = encode_key([rows.column(name) for name in rules.primary_key]).take(pa.array(lines))
    chains = chains_of(keys)
    last = lines[chains.row[chains.last()]]
    gone = types[last] == DELETE
    values = codec.encode(rows.take(pa.array(last)))
    stamp_versions(values, base_offset + last)
    if gone.any():
        values = values.take(pa.array(np.arange(len(last)), mask=gone))
    return PlannedWrite(
        base_offset=base_offset,
        changelog=changelog,
        keys=chains.hashed.keys,
        values=values,
        row_count_delta=int((types == INSERT).sum() - (types == DELETE).sum()),
    )


def plan_restore(
    rows: pa.RecordBatch,
    versions: npt.NDArray[np.int64],
    *,
    rules: TableRules,
    codec: RowCodec,
    where: str,
) -> PlannedWrite:
    """Return the planned write of `rows`, written at the offsets `versions`; no change is logged.

    Raises `CorruptDataError` for two rows with the same key.
    """
    assert len(versions) == rows.num_rows
    chains = chains_of(encode_key([rows.column(name) for name in rules.primary_key]))
    if not chains.distinct:
        raise CorruptDataError(f"{where}: the lake has two rows with the same key")
    values = codec.encode(rows)
    stamp_versions(values, versions)
    return PlannedWrite(
        base_offset=0,
        changelog=rows.slice(0, 0),
        keys=chains.hashed.keys,
        values=values,
        row_count_delta=rows.num_rows,
    )
