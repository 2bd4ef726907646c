"""One primary key bucket: its newest rows by key, and the changelog of their changes.

The steps of a write: `plan_writes` (changes against the newest state) and `accept`, the caller
makes the changelog durable, `apply` (rows can be looked up now), the caller makes the rows visible
to fetches. Several writes may be planned before the first is applied; writes are applied in order,
or removed with `abort`. After applied writes, `keep_up` does slower work in the background.

Promises:
- rows returned by a lookup were applied, so their changelog is durable; an answer's `end_offset` is
  the high watermark needed before the answer may be shown, so that all its rows can be fetched
- after a crash, `replay` of the changelog from `applied_offset` gives the same state, count and
  versions; a longer or repeated replay changes nothing
- `flushed_offset` is never ahead of the durable state here: the log may be truncated below
- rows hidden by damaged files never count as absent: reading them raises `CorruptDataError` and
  calls `on_damage`; memory replaces the files only if all counted rows were loaded

Threads: changing calls (`plan`, `accept`, `apply`, `abort`, `keep_up`, `replay`, `restore`,
`load_some`, `flush`, `checkpoint`, `close`) come from one thread at a time; `find*`,
`prefix_lookup` and similar, and the properties may be called by any thread. Few rows are planned
and applied without waiting for the disk while `writes_at_once` holds.

RocksDB is written behind: applied rows are in memory, and handed over in large runs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import CorruptDataError, StreamhouseError
from streamhouse.core.model.hashing.byte_runs import longest_of
from streamhouse.core.model.hashing.key_hash import PROCESS_HASHER, HashedKeys
from streamhouse.storage_service.kv.cache._memory_budget import KvOptions
from streamhouse.storage_service.kv.cache._planned_rows import PlannedRows
from streamhouse.storage_service.kv.cache._row_cache import CachedRows, RowCache
from streamhouse.storage_service.kv.cache._write_behind import Piece, Run, WriteBehind
from streamhouse.storage_service.kv.lookup import (
    FIRST_STEP_ROWS,
    FoundRows,
    FoundValues,
    check_prefix,
    least_row_bytes,
    prefix_end,
    read_in_steps,
    rows_in_key_order,
    too_many_bytes,
)
from streamhouse.storage_service.kv.plan._few_rows import few_rows_plan
from streamhouse.storage_service.kv.plan.upsert_plan import PlannedWrite, plan_replay, plan_restore
from streamhouse.storage_service.kv.plan.write_input import MET_BYTES_MAX, too_much_met
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite, plan_writes
from streamhouse.storage_service.kv.rocksdb_store import Marker, OnDamage, RocksdbStore
from streamhouse.storage_service.kv.rows.row_codec import RowCodec, versions_of
from streamhouse.storage_service.kv.table_rules import TableRules

__all__ = ["KvOptions", "KvTablet"]

_logger = logging.getLogger(__name__)

_LOAD_CHUNK_ROWS: Final = 10_000
_SCAN_CHUNK_ROWS: Final = 2_000
_ANY_SIZE: Final = 1 << 62
# With few old rows, a search pauses regularly for other work.
_CHUNKS_AT_ONCE_MAX: Final = 10


class KvTablet:
    """See the module. `close` is idempotent and flushes nothing."""

    def __init__(
        self,
        path: Path,
        *,
        table_id: int,
        bucket: int,
        rules: TableRules,
        options: KvOptions | None = None,
    ) -> None:
        """Open the bucket at `path`, or create an empty one. `replay` the log next.

        The replay starts at `applied_offset`.
        """
        self._options: Final = options or KvOptions()
        self.path: Final = path
        self.rules = rules
        self._where: Final = f"table '{rules.table}', bucket {bucket}"
        self.codec = _codec(rules)
        self.few_rows = few_rows_plan(rules, self.codec)
        self._store: Final = RocksdbStore(
            path, table_id=table_id, bucket=bucket, options=self._options.store
        )
        written = self._store.written_marker
        self.applied_offset = written.applied_offset
        """The state has all changes below this offset."""
        self.row_count = written.row_count
        """The exact number of rows."""
        self.planned_offset = self.applied_offset
        """The start offset of the next plan."""
        self.planned_row_count = 0
        """The number of rows planned but not applied."""
        self._end_seen = self.applied_offset
        self._pending: deque[PlannedWrite] = deque()
        # Rows planned but not applied; filled only by a further plan.
        self._planned_rows: PlannedRows | None = None
        self._applied_rows = 0
        self.row_bytes_max = 0
        """The length of the longest row planned, applied or loaded."""
        self._cache: Final = RowCache(
            budget_bytes=self._options.cache_bytes, segment_bytes=self._options.segment_bytes
        )
        self.backlog: Final = WriteBehind(
            self._store,
            self._options,
            where=self._where,
            on_begun=self._cache.run_begun,
            on_ended=self._cache.run_ended,
        )
        memory = self._options.memory
        self._share: Final = None if memory is None else memory.join()
        self._loader = None
        if self.row_count:
            self._cache.start_loading(self.row_count)
            self._loader = self._store.scan(chunk_rows=_LOAD_CHUNK_ROWS)

    def report_damage(self, to: OnDamage) -> None:
        """Call `to`, on any thread, for each damage of the files from now on."""
        self._store.on_damage = to

    def hand_over_after(self, wait_for_applied: Callable[[], None]) -> None:
        """Call `wait_for_applied` before each handover to RocksDB.

        Otherwise RocksDB could have changes lost by the log together with its machine.
        """
        self.backlog.wait_for_applied = wait_for_applied

    def change_schema(self, rules: TableRules) -> None:
        """Accept rows of a newer schema version from now on; stored rows stay unchanged.

        A running lookup may answer in either version.
        """
        assert not self._pending
        # The codec first, because it reads rows of every version.
        self.codec = _codec(rules)
        self.few_rows = few_rows_plan(rules, self.codec)
        self.rules = rules

    def follow(self, rules: TableRules) -> None:
        """Apply changes by `rules` from now on; the schema stays the same."""
        self.rules = rules
        self.few_rows = few_rows_plan(rules, self.codec)

    @property
    def flushed_offset(self) -> int:
        """Changes below this offset are durable here, without the log."""
        return self._store.flushed_marker.applied_offset

    @property
    def is_loaded(self) -> bool:
        """Whether all rows are in memory."""
        return self._cache.complete

    def memory_bytes(self) -> dict[str, int]:
        """Return bytes by place: `cache`, `backlog`, and RocksDB's parts."""
        parts = {"cache": self._cache.memory_bytes, "backlog": self.backlog.memory_bytes}
        return parts | self._store.approximate_bytes()

    def plan(
        self,
        rows: pa.RecordBatch,
        *,
        base_offset: int,
        operations: npt.NDArray[np.int8] | None = None,
        columns: Sequence[str] | None = None,
    ) -> PlannedWrite:
        """Plan one write to this bucket with `plan_writes` and accept the result.

        Append the changelog to the log, then `apply` the write. Raises for the first wrong row, and
        while the backlog is full.
        """
        assert base_offset == self.planned_offset
        (part,) = plan_writes([self], [KeyWrite(0, rows, operations)], columns=columns)
        self.accept(part.write)
        return part.write

    def accept(self, planned: PlannedWrite) -> None:
        """Accept a write planned on the `newest` rows, from `planned_offset` on.

        After an error nothing is accepted.
        """
        assert planned.base_offset == self.planned_offset
        # Partially put rows are dropped, and rebuilt from the pending writes.
        over, self._planned_rows = self._planned_rows, None
        if over is not None:
            over.put(planned.keys, planned.values)
        self._saw_rows(planned.values)
        self._pending.append(planned)
        self.planned_offset = planned.end_offset
        self.planned_row_count += len(planned.keys)
        self._planned_rows = over

    def apply(self, planned: PlannedWrite) -> bool:
        """Make the oldest planned write part of the state; its changelog is durable.

        Returns `needs_upkeep`.
        """
        assert planned is self._pending[0]
        self._absorb(planned)
        self._pending.popleft()
        self.planned_row_count -= len(planned.keys)
        self._planned_rows = None
        self._report_memory()
        return self._loader is not None or self.backlog.is_due or self._cache.is_untidy

    def abort(self, planned: PlannedWrite) -> None:
        """Remove a planned write and all later ones: they will not be in the log."""
        while self._abort_last() is not planned:
            pass

    def abort_from(self, offset: int) -> None:
        """Remove all writes planned from `offset` on, if any."""
        while self._pending and self._pending[-1].base_offset >= offset:
            self._abort_last()

    def _abort_last(self) -> PlannedWrite:
        aborted = self._pending.pop()
        self.planned_offset = aborted.base_offset
        self.planned_row_count -= len(aborted.keys)
        self._planned_rows = None
        return aborted

    def replay(self, changelog: pa.RecordBatch, *, base_offset: int) -> None:
        """Apply the log's missing changes, loading no rows; the batch starts at `base_offset`."""
        assert not self._pending
        applied_count = self.applied_offset - base_offset
        if applied_count < 0:
            raise CorruptDataError(
                f"{self._where}: the log continues at offset {base_offset}, but the state ends at"
                f" {self.applied_offset}"
            )
        if applied_count < changelog.num_rows:
            planned = plan_replay(
                changelog.slice(applied_count),
                rules=self.rules,
                codec=self.codec,
                base_offset=self.applied_offset,
            )
            self._saw_rows(planned.values)
            self._absorb(planned)
            self.planned_offset = self.applied_offset
            self._applied_rows = 0
            self.keep_to_budget()

    def restore(self, rows: pa.RecordBatch, versions: npt.NDArray[np.int64]) -> None:
        """Add rows from elsewhere, written at the offsets `versions`, to an unchanged bucket.

        Call `restored` after the last rows; an earlier crash leaves nothing usable.
        """
        assert not self._pending
        assert self.applied_offset == 0
        self.backlog.wait_for_room()
        planned = plan_restore(
            rows, versions, rules=self.rules, codec=self.codec, where=self._where
        )
        if self.newest(PROCESS_HASHER.hashed(planned.keys)).null_count < rows.num_rows:
            raise CorruptDataError(f"{self._where}: the lake has two rows with the same key")
        self._saw_rows(planned.values)
        self._absorb(planned)
        self.keep_up()

    def restored(self, end_offset: int) -> None:
        """Set the end of a restore: the rows result from all changes below `end_offset`.

        Durable on return.
        """
        nothing = pa.array([], pa.binary())
        self._end_seen = self.applied_offset = self.planned_offset = end_offset
        self.backlog.add(Piece(nothing, nothing, Marker(end_offset, self.row_count)))
        self.flush()

    def load_some(self, row_count: int) -> bool:
        """Load about `row_count` more rows into memory; return whether more remain.

        All calls work before loading has ended, but missing keys are read from RocksDB. The same
        holds for good if the files cannot be read to the end.
        """
        loaded = 0
        self._report_memory()
        while self._loader is not None and loaded < row_count:
            try:
                chunk = next(self._loader, None)
            except StreamhouseError as error:
                _logger.warning("event=load_failed bucket=%r why=%r", self._where, error.message)
                self._cache.stop_loading()
                self._loader = None
                break
            if chunk is None:
                self._finish_loading()
                self._loader = None
            elif not self._cache.load(*chunk):
                self._loader = None
            else:
                self._saw_rows(chunk[1])
                loaded += len(chunk[0])
        self._expect_reads()
        return self._loader is not None

    def _finish_loading(self) -> None:
        """Let memory replace the files, if the number of rows is complete."""
        count = self._cache.loaded_row_count()
        if count in (None, self.row_count):
            self._cache.finish_loading()
            return
        self._cache.stop_loading()
        self._store.on_damage(
            CorruptDataError(f"{self.path} has {count} rows, but counts {self.row_count}")
        )

    def find(self, keys: pa.Array, *, bytes_max: int) -> FoundValues:
        """Return the newest stored row of each encoded key.

        Raises `RequestTooLargeError` for rows above `bytes_max`.
        """
        return FoundValues(self._values_of(keys, bytes_max=bytes_max), self._end_seen)

    def find_few(
        self,
        keys: Sequence[bytes],
        hashes: Sequence[tuple[int, int]],
        *,
        bytes_max: int,
        reads_files: bool,
    ) -> FoundValues | None:
        """As `find`, for few keys; None if files must be read without `reads_files`."""
        cached_rows = self._cache.get_few(hashes, bytes_max=bytes_max)
        if cached_rows is None:
            raise too_many_bytes(self.rules.table, bytes_max)
        values, unknown = cached_rows
        if unknown and not reads_files:
            return None
        size = 0
        if unknown:
            self.backlog.wait()
            size = sum(len(value) for value in values if value is not None)
        for start in range(0, len(unknown), FIRST_STEP_ROWS):
            positions = unknown[start : start + FIRST_STEP_ROWS]
            stored = self._store.get_few([keys[p] for p in positions])
            size += sum(len(value) for value in stored if value is not None)
            if size > bytes_max:
                raise too_many_bytes(self.rules.table, bytes_max)
            for position, value in zip(positions, stored, strict=True):
                values[position] = value
        return FoundValues(values, self._end_seen)

    def _values_of(self, keys: pa.Array, *, bytes_max: int) -> pa.Array:
        if len(keys) <= FIRST_STEP_ROWS:
            return self._completed(keys, self._cache.get(keys))
        if self._cache.complete:
            cached = self._cache.get_within(keys, bytes_max)
            if cached is None:
                raise too_many_bytes(self.rules.table, bytes_max)
            if cached.unknown is None:
                return cached.values
        values = read_in_steps(
            keys,
            lambda part: self._completed(part, self._cache.get(part)),
            row_bytes=least_row_bytes(self.codec.arrow_schema),
            bytes_max=bytes_max,
        )
        if values is None:
            raise too_many_bytes(self.rules.table, bytes_max)
        return values

    def prefix_lookup(
        self, prefix: pa.RecordBatch, *, rows_max: int, bytes_max: int = _ANY_SIZE
    ) -> FoundRows:
        """Return rows whose leading key columns equal the one row of `prefix`, in key order.

        At most `rows_max + 1` rows: the extra row tells of more. Raises `RequestTooLargeError` for
        rows above `bytes_max`.
        """
        start = check_prefix(prefix, self.rules)
        newer = self.backlog.changes_under(start)
        chunk_rows = min(rows_max + 1, _SCAN_CHUNK_ROWS)
        older = self._store.scan(start=start, end=prefix_end(start), chunk_rows=chunk_rows)
        chosen = rows_in_key_order(
            newer, older, rows_max=rows_max, bytes_max=bytes_max, table=self.rules.table
        )
        rows = self.codec.decode(pa.array(chosen, pa.binary()))
        everything = np.ones(len(chosen), dtype=np.bool_)
        return FoundRows(rows=rows, found=everything, end_offset=self._end_seen)

    def writes_at_once(self, row_count: int) -> bool:
        """Whether `row_count` rows can be planned and applied without files or moving rows.

        Includes rows planned but not applied yet.
        """
        cache = self._cache
        return cache.complete and not self.backlog.is_too_much and cache.has_room(row_count)

    @property
    def needs_upkeep(self) -> bool:
        """Whether `keep_up` has work."""
        return self._loader is not None or self.backlog.is_due or self._cache.is_untidy

    def keep_up(self) -> None:
        """Load, hand over, evict and move rows, in proportion to the rows applied since.

        Call before further plans whenever `needs_upkeep`: `keep_up` bounds memory and backlog.
        """
        applied_rows, self._applied_rows = self._applied_rows, 0
        self.load_some(2 * applied_rows)
        self.keep_to_budget()
        self._expect_reads()

    def begin_run(self) -> Run | None:
        """Begin a due handover; None if nothing is due, or during another run.

        Then `write_run` on any thread, also during changes of rows, and `end_run`.
        """
        return self.backlog.begin_run()

    def write_run(self, run: Run) -> None:
        """Hand a run over, unless already done."""
        self.backlog.write_run(run)

    def end_run(self, run: Run) -> None:
        """Allow eviction of a written run's rows; harmless for an ended run."""
        self.backlog.end_run(run)

    def keep_to_budget(self) -> None:
        """Release memory above this bucket's current share."""
        self._report_memory()
        self.backlog.hand_over_if_due()
        self._cache.tidy()
        self._report_memory()

    def flush(self) -> None:
        """Make all applied rows durable here, so `flushed_offset` becomes `applied_offset`."""
        self.backlog.hand_over()
        self._store.flush()

    def checkpoint(self, path: Path) -> None:
        """Write a copy to a new `path`, in this bucket's current state."""
        self.backlog.hand_over()
        self._store.checkpoint(path)

    def rows_written_before(self, offset: int, *, bytes_max: int) -> Generator[pa.RecordBatch]:
        """Yield all rows written below `offset`, about `bytes_max` of them at a time.

        After a long search a part may be empty. The rows are those applied at the first `next`;
        call each `next` while the rows exist.
        """
        self.backlog.hand_over()
        for values in _values_before(self._store, offset, bytes_max=bytes_max):
            yield self.codec.decode(values)

    def close(self) -> None:
        """Release everything; unflushed changes come back by `replay`."""
        self._loader = None
        if self._share is not None:
            self._share.leave()
        self.backlog.close()
        self._store.close()

    def newest(self, hashed: HashedKeys) -> pa.Array:
        """Return the values of distinct keys after all planned writes.

        For planning. Raises `RequestTooLargeError` above the limit of a plan.
        """
        values = self._met(hashed)
        return self._all_planned().over(hashed.keys, values) if self._pending else values

    def newest_few(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """As `newest`, for few keys."""
        values: Sequence[bytes | None] | None = self._cache.get_few_to_write(keys)
        if values is None:
            hashed = PROCESS_HASHER.hashed(pa.array(keys, pa.binary()))
            values = list(self._met(hashed).to_pylist())
        return self._all_planned().over_few(keys, values) if self._pending else values

    def _met(self, hashed: HashedKeys) -> pa.Array:
        """Return the current values of distinct keys, for planning."""
        bytes_max = MET_BYTES_MAX

        def read(keys: pa.Array) -> pa.Array | None:
            return read_in_steps(keys, self._store.get, row_bytes=1, bytes_max=bytes_max)

        cached = self._cache.get_to_write(hashed, bytes_max)
        values = None if cached is None else self._completed(hashed.keys, cached, read)
        if values is None or values.nbytes > bytes_max:
            raise too_much_met(self.rules.table, bytes_max)
        return values

    def _all_planned(self) -> PlannedRows:
        """Return the rows planned but not applied."""
        if self._planned_rows is None:
            # Partially put rows are dropped, because a plan would miss the remaining rows.
            over = PlannedRows()
            for planned in self._pending:
                over.put(planned.keys, planned.values)
            self._planned_rows = over
        return self._planned_rows

    def _completed(
        self,
        keys: pa.Array,
        cached: CachedRows,
        read: Callable[[pa.Array], pa.Array | None] | None = None,
    ) -> pa.Array | None:
        """Return the values of `keys`, reading keys unknown to the cache from RocksDB.

        `read` gets the unknown keys; None if `read` returns None.
        """
        values, unknown = cached
        if unknown is None:
            return values
        self.backlog.wait()
        places = np.flatnonzero(unknown)
        places = places[pc.sort_indices(keys.take(pa.array(places))).to_numpy()]
        stored = (read or self._store.get)(keys.take(pa.array(places)))
        if stored is None:
            return None
        source = np.arange(len(keys))
        source[places] = np.arange(len(keys), len(keys) + len(places))
        return pa.concat_arrays([values, stored]).take(pa.array(source))

    def _absorb(self, planned: PlannedWrite) -> None:
        # Readers take the end after the rows, so the end covers every row seen.
        end_offset = self._end_seen = planned.end_offset
        self._cache.put(planned.keys, planned.values)
        self.applied_offset = end_offset
        self.row_count += planned.row_count_delta
        marker = Marker(end_offset, self.row_count)
        self.backlog.add(Piece(planned.keys, planned.values, marker))
        self._applied_rows += len(planned.keys)

    def _saw_rows(self, values: pa.Array) -> None:
        self.row_bytes_max = max(self.row_bytes_max, longest_of(values))

    def _report_memory(self) -> None:
        if self._share is not None:
            backlog_bytes = self.backlog.memory_bytes
            allowed = self._share.report(self._cache.memory_bytes + backlog_bytes)
            self.backlog.memory_allowed = allowed
            self._cache.budget_bytes = min(
                self._options.cache_bytes, max(allowed - backlog_bytes, 0)
            )

    def _expect_reads(self) -> None:
        if self._loader is None:
            self._store.expect_reads(not self._cache.complete)


def _codec(rules: TableRules) -> RowCodec:
    return RowCodec(
        rules.schema, schema_id=rules.schema_id, table=rules.table, earlier=rules.earlier
    )


def _values_before(store: RocksdbStore, offset: int, *, bytes_max: int) -> Iterator[pa.Array]:
    """Yield the store's values written below `offset`, about `bytes_max` of them at a time.

    A part may be small or empty after a long search.
    """
    waiting: list[pa.Array] = []
    size = chunks = 0
    for _, values in store.scan(chunk_rows=_SCAN_CHUNK_ROWS, chunk_bytes=bytes_max):
        older = values.filter(pa.array(versions_of(values) < offset))
        if chunks == _CHUNKS_AT_ONCE_MAX or (waiting and size + older.nbytes > bytes_max):
            yield _all_of(waiting)
            waiting, size, chunks = [], 0, 0
        chunks += 1
        if len(older):
            waiting.append(older)
            size += older.nbytes
    yield _all_of(waiting)


def _all_of(arrays: list[pa.Array]) -> pa.Array:
    return pa.concat_arrays(arrays) if arrays else pa.array([], pa.binary())
