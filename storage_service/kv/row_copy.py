"""A copy in memory of a bucket's rows by key, in another process than the rows' own.

The copy is made of the files that the owner's RocksDB has, read once, and of the changelog from the
files' marker on. Afterwards only the changelog is read, so the copy costs the owner nothing.

Promises:
- with `is_loaded` a lookup finds exactly the rows after all changes below `applied_offset`
- rows hidden by damage, or by files removed during the load, never count as absent: the load fails
- memory is bounded: a copy that does not fit is given up with `OverloadedError`

The files may have changes beyond the marker, even changes that nobody may see yet. So the copy is
complete only once the changelog was replayed up to an offset that the owner had applied after the
files were opened (`finish`).

One thread at a time changes the copy; any thread looks rows up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa

from streamhouse.core.errors import CorruptDataError, OverloadedError, UnsupportedError
from streamhouse.storage_service.kv.cache._memory_budget import KvOptions
from streamhouse.storage_service.kv.cache._row_cache import RowCache
from streamhouse.storage_service.kv.lookup import FoundRows, FoundValues, too_many_bytes
from streamhouse.storage_service.kv.plan.upsert_plan import plan_replay
from streamhouse.storage_service.kv.rocksdb_store import Marker, RocksdbStore
from streamhouse.storage_service.kv.rows.row_codec import RowCodec
from streamhouse.storage_service.kv.table_rules import TableRules

__all__ = ["RowCopy"]

_CHUNK_ROWS: Final = 10_000


class RowCopy:
    """See the module. The order of calls: `replay`, `load`, `finish`, then `replay` for ever."""

    def __init__(
        self, path: Path, *, table_id: int, bucket: int, rules: TableRules, options: KvOptions
    ) -> None:
        """Open the files at `path`, if there are any; raises as `RocksdbStore`."""
        self.rules: Final = rules
        self._where: Final = f"the copy of table '{rules.table}', bucket {bucket}"
        self._codec: Final = RowCodec(
            rules.schema, schema_id=rules.schema_id, table=rules.table, earlier=rules.earlier
        )
        self._budget_bytes: Final = options.cache_bytes
        self._cache: Final = RowCache(
            budget_bytes=options.cache_bytes, segment_bytes=options.segment_bytes
        )
        self.is_loaded = False
        """Whether the copy is complete."""
        self._store = RocksdbStore.copy_of(
            path, table_id=table_id, bucket=bucket, options=options.store
        )
        # Without files all changes are in the log. If the log has lost its beginning, `replay` says
        # so.
        marker = Marker(0, 0) if self._store is None else self._store.written_marker
        self.applied_offset, self.row_count = marker
        """All changes below this offset are in the copy, and the number of rows then."""
        self._chunks: Iterator[tuple[pa.Array, pa.Array]] = iter(())
        if self._store is not None and self.row_count:
            self._cache.start_loading(self.row_count)
            self._chunks = self._store.scan(chunk_rows=_CHUNK_ROWS)
        # Behind what may fail: nobody would leave the budget.
        self._share: Final = None if options.memory is None else options.memory.join()

    @property
    def memory_bytes(self) -> int:
        """The bytes of the rows and their index."""
        return self._cache.memory_bytes

    def replays_at_once(self, count: int) -> bool:
        """Whether so many changes can be replayed without moving rows or growing the index."""
        return self._cache.has_room(count) and not self._cache.is_untidy

    def replay(
        self, changelog: Sequence[pa.RecordBatch], *, base_offset: int, at_once: bool = False
    ) -> None:
        """Apply changes from `applied_offset` on; the first batch starts at `base_offset`.

        With `at_once` slower work waits for the next replay, as `replays_at_once` tells.
        """
        changes = pa.concat_batches(changelog) if len(changelog) > 1 else changelog[0]
        skipped = self.applied_offset - base_offset
        if skipped < 0:
            raise CorruptDataError(
                f"{self._where}: the changelog goes on at offset {base_offset}, but the copy ends"
                f" at {self.applied_offset}"
            )
        if skipped >= changes.num_rows:
            return
        planned = plan_replay(
            changes.slice(skipped),
            rules=self.rules,
            codec=self._codec,
            base_offset=self.applied_offset,
        )
        self._cache.put(planned.keys, planned.values)
        self.row_count += planned.row_count_delta
        self.applied_offset = planned.end_offset
        # Else the files have further rows, and what was deleted must not come back from there.
        if self._cache.complete:
            self._tidy(at_once=at_once)

    def load(self) -> None:
        """Read all rows of the files."""
        for keys, values in self._chunks:
            if not self._cache.load(keys, values):
                raise self._no_room()
            self._check_room()

    def finish(self, applied_offset: int) -> None:
        """Complete the copy, and close the files.

        `applied_offset` is what the owner had applied after the files were opened, and the copy has
        applied all of it.
        """
        assert self.applied_offset >= applied_offset
        if not self._cache.complete:
            count = self._cache.loaded_row_count()
            if count != self.row_count:
                raise CorruptDataError(
                    f"{self._where} has {count} rows, but counts {self.row_count}"
                )
            self._cache.finish_loading()
        self._close_files()
        self.is_loaded = True
        self._tidy(at_once=False)

    def find(self, keys: pa.Array, *, bytes_max: int) -> FoundValues:
        """Return the newest row of each encoded key; see `KvTablet.find`."""
        cached = self._cache.get_within(keys, bytes_max)
        if cached is None:
            raise too_many_bytes(self.rules.table, bytes_max)
        assert cached.unknown is None
        return FoundValues(cached.values, self.applied_offset)

    def find_few(
        self,
        keys: Sequence[bytes],  # noqa: ARG002 - the hashes say enough
        hashes: Sequence[tuple[int, int]],
        *,
        bytes_max: int,
        reads_files: bool,  # noqa: ARG002 - there are none
    ) -> FoundValues:
        """As `find`, for few keys."""
        cached = self._cache.get_few(hashes, bytes_max=bytes_max)
        if cached is None:
            raise too_many_bytes(self.rules.table, bytes_max)
        assert not cached.unknown
        return FoundValues(cached.values, self.applied_offset)

    def prefix_lookup(
        self,
        prefix: pa.RecordBatch,  # noqa: ARG002
        *,
        rows_max: int,  # noqa: ARG002
        bytes_max: int,  # noqa: ARG002
    ) -> FoundRows:
        """Raise `UnsupportedError`: the rows are not in the order of their keys."""
        raise UnsupportedError(f"{self._where} has no order of keys")

    def close(self) -> None:
        """Release the files and the memory's share; idempotent."""
        self._close_files()
        if self._share is not None:
            self._share.leave()

    def _close_files(self) -> None:
        store, self._store = self._store, None
        self._chunks = iter(())
        if store is not None:
            store.close()

    def _tidy(self, *, at_once: bool) -> None:
        # No other place has the rows, and no file has the deleted ones: nothing waits for a run.
        self._cache.run_begun()
        self._cache.run_ended(is_written=True)
        self._check_room()
        if not at_once:
            self._cache.tidy()

    def _check_room(self) -> None:
        used = self._cache.memory_bytes
        allowed = self._budget_bytes
        if self._share is not None:
            allowed = min(allowed, self._share.report(used))
        if used > allowed:
            # Also `tidy` would evict rows, of which there is no other copy here.
            raise self._no_room()

    def _no_room(self) -> OverloadedError:
        return OverloadedError(
            f"{self._where} does not fit into memory (key_cache_bytes_max, key_memory_bytes_max)"
        )
