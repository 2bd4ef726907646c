"""The only module using RocksDB: one bucket's rows by key, and the applied changelog offset.

Promises:
- RocksDB writes no log, because the changelog is the log. Written rows are durable after `flush`,
  or once `flushed_marker` has reached them; an earlier crash keeps a prefix of the writes, in
  order.
- The marker (changelog offset and row count) is written in the same batch as the last rows it
  covers, so after a restart the rows are never older than the marker.
- No write ever sleeps inside RocksDB, where it would hold the interpreter: a write raises
  `OverloadedError`, and the same rows can be written again later.
- Rows hidden by a damaged file never count as absent: every read of the file, every scan reaching
  the file and the opening raise `CorruptDataError`, and call `on_damage`.

One thread writes; any thread reads. Rows live under keys from `01` to `02` (no part of a primary
key is null), the marker under the reserved prefix `ff`.

Rows are handed over in large runs, in the order of keys; each run is sealed, and RocksDB's threads
write its file. In this order a skip list is filled as fast as a plain vector, and nobody sorts the
run again.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, cast
from weakref import WeakSet

import pyarrow as pa
from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Checkpoint,
    ChecksumType,
    DbClosedError,
    DBCompressionType,
    Options,
    Rdict,
    RdictIter,
    ReadOptions,
    WriteBatch,
    WriteBufferManager,
    WriteOptions,
)

from streamhouse.core.errors import (
    CorruptDataError,
    OverloadedError,
    StorageFailedError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.storage_service.kv._rocksdb_files import has_lists, problem_of

__all__ = [
    "Marker",
    "OnDamage",
    "RocksdbStore",
    "StoreOptions",
    "is_damage",
    "shared_write_buffers",
]

_MARKER_KEY: Final = b"\xffmarker"
_COLUMN_FAMILY: Final = "default"
_ROWS_START: Final = b"\x01"
_ROWS_END: Final = b"\x02"
# magic, version, zero, bucket, table id, applied offset, row count        (little endian)
_MARKER: Final = struct.Struct("<4sHHIQQQ")
_MAGIC: Final = b"SHKV"
_FORMAT_VERSION: Final = 1
# A call into RocksDB holds the interpreter: this many rows is a fraction of a millisecond.
_CHUNK_ROWS: Final = 2_000
# Rows may be large, and a chunk of them is in memory twice.
_CHUNK_BYTES: Final = 16 << 20
# Damage in messages without a prefix of damage: a missing file.
_SIGNS_OF_DAMAGE: Final = ("No such file or directory",)
# With lookups in memory, many files cost less than frequent compaction; with lookups here,
# every file costs a search.
_FILES_BEFORE_COMPACTION: Final = 16
_FILES_BEFORE_COMPACTION_IF_READ: Final = 4
_COPY_ATTEMPTS: Final = 5
# The pause before another attempt to close a store in use by another thread.
_BORROWED_S: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Limits of one bucket's RocksDB.

    Memory is at most `write_buffer_bytes * write_buffers_max` plus about 2 bytes a row for filters;
    rows are read through the page cache. `write_buffers` (see `shared_write_buffers`) bounds the
    buffers of all stores using the same object.
    """

    write_buffer_bytes: int = 64 << 20
    write_buffers_max: int = 4
    open_files_max: int = 512
    write_buffers: WriteBufferManager | None = None
    background_jobs: int = 2


def shared_write_buffers(bytes_max: int) -> WriteBufferManager:
    """Return a manager making stores seal runs early above `bytes_max` in all."""
    return WriteBufferManager(bytes_max, False)


class Marker(NamedTuple):
    """The end of the applied changelog: every row below the offset is applied."""

    applied_offset: int
    row_count: int


OnDamage = Callable[[CorruptDataError], CorruptDataError]
"""Called with a damage; returns the error to raise, with advice for the caller."""


def is_damage(error: CorruptDataError) -> bool:
    """Whether the files are damaged; False for whole ones of another bucket or release."""
    return error.__cause__ is not None


class RocksdbStore:
    """One bucket's rows in one RocksDB. `close` is idempotent; later reads and writes raise."""

    def __init__(
        self,
        path: Path,
        *,
        table_id: int,
        bucket: int,
        options: StoreOptions | None = None,
        is_copy: bool = False,
    ) -> None:
        """Open the store at `path`, or create it empty, with the marker at offset 0.

        With `is_copy` another process has the store open: the files present now are read, and
        nothing is written but rocksdict's own file of 40 bytes, which nobody reads. A file that the
        other process removes meanwhile looks like damage.
        """
        self._path: Final = path
        self._identity: Final = (bucket, table_id)
        self.on_damage: OnDamage = _as_it_is
        """Called, on any thread, with each damage; returns the error to raise."""
        self._closed = False
        self._reads_expected = False
        # Held while using a cursor. Cursor calls hold the interpreter anyway, so waits are short.
        self._scanning: Final = threading.Lock()
        self._cursors: Final[WeakSet[_Cursor]] = WeakSet()
        if not is_copy:
            path.mkdir(parents=True, exist_ok=True)
        with self._door():
            problem = problem_of(path)
            if problem:
                raise RuntimeError(f"Corruption: {problem}")
            ours = _rocksdb_options(options or StoreOptions())
            if is_copy:
                # All files are opened at once, and stay readable when they are removed.
                ours.set_max_open_files(-1)
            access = AccessType.read_only() if is_copy else AccessType.read_write()
            # Without options for the column family RocksDB would take them from an unchecked file,
            # and without filters.
            self._db: Final = Rdict(str(path), ours, {_COLUMN_FAMILY: ours}, access)
        try:
            self._flushed = self._written = self._read_marker()
        except BaseException:
            self.close()
            raise
        self._sealed = self._written
        self._write_options: Final = WriteOptions()
        # A method in the stubs, but in fact a property.
        self._write_options.disable_wal = True  # type: ignore[method-assign, assignment]
        self._write_options.no_slowdown = True

    @classmethod
    def copy_of(
        cls, path: Path, *, table_id: int, bucket: int, options: StoreOptions
    ) -> RocksdbStore | None:
        """Open the files of a store that another process has; None before the store was made."""
        for attempt in range(_COPY_ATTEMPTS):
            try:
                if not has_lists(path) and not problem_of(path):
                    return None
                return cls(path, table_id=table_id, bucket=bucket, options=options, is_copy=True)
            except StreamhouseError:
                # The other process has removed a file meanwhile, or is just writing its lists.
                if attempt == _COPY_ATTEMPTS - 1:
                    raise
        raise AssertionError

    @property
    def written_marker(self) -> Marker:
        """The marker of the last write."""
        return self._written

    @property
    def flushed_marker(self) -> Marker:
        """A durable marker, with all rows below."""
        # Another thread may seal more between the check and the assignment.
        sealed = self._sealed
        if self._flushed != sealed and self._memtables() == 0:
            self._flushed = sealed
        return self._flushed

    def get(self, keys: pa.Array) -> pa.Array:
        """Return the value of each of the binary `keys`, null for a missing key."""
        return pa.array(self.get_few(keys.to_pylist()), pa.binary())

    def get_few(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """Return the value of each of `keys`, None for a missing key."""
        if len(keys) <= 1:
            # RocksDB's call for several keys takes longer for a single key.
            return [self.get_one(key) for key in keys]
        with self._door():
            return cast("list[bytes | None]", self._db.get(list(keys)))

    def get_one(self, key: bytes) -> bytes | None:
        """Return the value of one key."""
        with self._door():
            value: bytes | None = self._db.get(key)
            return value

    def write(self, keys: pa.Array, values: pa.Array, *, marker: Marker) -> None:
        """Put `values` under `keys`, in order; a null value deletes. Not durable yet.

        Raises OverloadedError when RocksDB cannot keep up: writing the same rows again loses
        nothing, because only the last chunk carries the marker.
        """
        for start in range(0, max(len(keys), 1), _CHUNK_ROWS):
            chunk = WriteBatch(raw_mode=True)
            _fill(chunk, keys.slice(start, _CHUNK_ROWS), values.slice(start, _CHUNK_ROWS))
            if start + _CHUNK_ROWS >= len(keys):
                chunk[_MARKER_KEY] = self._encode_marker(marker)
            with self._door():
                self._db.write(chunk, self._write_options)
        self._written = marker

    def seal(self) -> None:
        """Start making written rows durable, without waiting; reads are fast again."""
        with self._door():
            self._db.flush(wait=False)
        self._sealed = self._written

    def flush(self) -> None:
        """Return when all written rows are durable."""
        with self._door():
            self._db.flush(wait=True)
        self._sealed = self._flushed = self._written

    def scan(
        self,
        *,
        start: bytes = _ROWS_START,
        end: bytes = _ROWS_END,
        chunk_rows: int = _CHUNK_ROWS,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> Iterator[tuple[pa.Array, pa.Array]]:
        """Return keys and values of the rows with start <= key < end in key order, in chunks.

        A chunk ends at `chunk_rows` rows, or with the row that reaches `chunk_bytes`. The chunks
        show the state at the call. Release the iterator soon, because the state is kept alive.
        """
        bounds = ReadOptions()
        bounds.set_iterate_upper_bound(end)
        with self._door(), self._scanning:
            # An iterator is a view of its moment. A Snapshot's iterator would ignore these bounds.
            cursor = _Cursor(self._db.iter(bounds), bounds)
            self._cursors.add(cursor)
            cursor.seek(start)
        return self._chunks(cursor, chunk_rows, chunk_bytes)

    def _chunks(
        self, cursor: _Cursor, chunk_rows: int, chunk_bytes: int
    ) -> Iterator[tuple[pa.Array, pa.Array]]:
        try:
            while True:
                with self._door(), self._scanning:
                    keys, values = cursor.read(chunk_rows, chunk_bytes)
                if not keys:
                    return
                yield pa.array(keys, pa.binary()), pa.array(values, pa.binary())
        finally:
            # An error keeps this frame alive.
            cursor.let_go()

    def expect_reads(self, expected: bool) -> None:
        """Set whether rows will often be read from files: then files are compacted early."""
        if expected == self._reads_expected:
            return
        files = _FILES_BEFORE_COMPACTION_IF_READ if expected else _FILES_BEFORE_COMPACTION
        with self._door():
            self._db.set_options({"level0_file_num_compaction_trigger": str(files)})
        self._reads_expected = expected

    def checkpoint(self, path: Path) -> None:
        """Flush, and write a copy to a new `path`, openable like this store."""
        self.flush()
        with self._door():
            Checkpoint(self._db).create_checkpoint(str(path))

    def approximate_bytes(self) -> dict[str, int]:
        """Return bytes by place: `files`, `memtables`, `table_readers`."""
        names = {
            "files": "rocksdb.total-sst-files-size",
            "memtables": "rocksdb.size-all-mem-tables",
            "table_readers": "rocksdb.estimate-table-readers-mem",
        }
        with self._door():
            return {name: self._db.property_int_value(p) or 0 for name, p in names.items()}

    def close(self) -> None:
        """Close without flushing: unflushed rows come back from the changelog.

        Running calls of other threads end first; new calls are refused, and so are further chunks
        of a scan. The files can be opened again on return.
        """
        if not self._closed:
            self._closed = True
            with self._door(is_closing=True), self._scanning:
                for cursor in self._cursors:
                    cursor.let_go()
                while not _closes(self._db):
                    time.sleep(_BORROWED_S)

    @contextlib.contextmanager
    def _door(self, *, is_closing: bool = False) -> Iterator[None]:
        """Translate RocksDB's errors."""
        if self._closed and not is_closing:
            raise UnavailableError(f"{self._path} is closed")
        try:
            yield
        except DbClosedError as error:
            raise UnavailableError(f"{self._path} is closed") from error
        except (MemoryError, TypeError, ValueError):
            raise
        except Exception as error:
            if self._closed and not is_closing and "mutably borrowed" in str(error):
                # The closing thread holds the database at this moment.
                raise UnavailableError(f"{self._path} is closed") from error
            ours = _translated(self._path, error)
            if isinstance(ours, CorruptDataError):
                ours = self.on_damage(ours)
            raise ours from error

    def _memtables(self) -> int:
        """Return the number of sealed runs not durable yet."""
        with self._door():
            return self._db.property_int_value("rocksdb.num-immutable-mem-table") or 0

    def _encode_marker(self, marker: Marker) -> bytes:
        return _MARKER.pack(_MAGIC, _FORMAT_VERSION, 0, *self._identity, *marker)

    def _read_marker(self) -> Marker:
        value = self.get_one(_MARKER_KEY)
        if value is None:
            return Marker(0, 0)
        if len(value) != _MARKER.size or value[:4] != _MAGIC:
            raise CorruptDataError(f"{self._path}: the marker is damaged")
        _, version, _, bucket, table_id, applied_offset, row_count = _MARKER.unpack(value)
        if version != _FORMAT_VERSION:
            raise CorruptDataError(
                f"{self._path} has format version {version}, which this release cannot read"
            )
        if (bucket, table_id) != self._identity:
            raise CorruptDataError(
                f"{self._path} belongs to bucket {bucket} of table {table_id}, not to bucket"
                f" {self._identity[0]} of table {self._identity[1]}"
            )
        return Marker(applied_offset, row_count)


class _Cursor:
    """The position of a scan. A cursor keeps files open, also of a closed store, until `let_go`."""

    def __init__(self, rows: RdictIter, bounds: ReadOptions) -> None:
        self._rows: RdictIter | None = rows
        # RocksDB reads the upper bound from these options: they must live as long as the rows.
        self._bounds: Final = bounds

    def seek(self, start: bytes) -> None:
        """Go to the first key from `start` on."""
        assert self._rows is not None
        self._rows.seek(start)

    def read(self, count: int, bytes_max: int) -> tuple[list[bytes], list[bytes]]:
        """Return the next keys and values: `count`, or up to `bytes_max` or the end."""
        rows = self._rows
        if rows is None:
            raise DbClosedError
        key_here, value_here, advance = rows.key, rows.value, rows.next
        keys: list[bytes] = []
        values: list[bytes] = []
        try:
            for _ in range(count):
                key = key_here()
                if key is None:
                    # An error ends the iteration like the end of the rows.
                    rows.status()
                    break
                value = value_here()
                keys.append(key)
                values.append(value)
                advance()
                bytes_max -= len(value)
                if bytes_max <= 0:
                    break
        finally:
            # An error keeps this frame alive.
            del rows, key_here, value_here, advance
        return keys, values

    def let_go(self) -> None:
        """End the scan."""
        self._rows = None


def _closes(db: Rdict) -> bool:
    """Close `db`; False, with `db` still open, during a call of another thread."""
    try:
        db.close()
    except RuntimeError as error:
        if str(error) != "Already borrowed":
            raise
        return False
    return True


def _fill(chunk: WriteBatch, keys: pa.Array, values: pa.Array) -> None:
    if values.null_count == 0:
        deque(map(chunk.put, keys.to_pylist(), values.to_pylist()), maxlen=0)
        return
    for key, value in zip(keys.to_pylist(), values.to_pylist(), strict=True):
        if value is None:
            chunk.delete(key)
        else:
            chunk.put(key, value)


def _rocksdb_options(options: StoreOptions) -> Options:
    o = Options(raw_mode=True)
    o.create_if_missing(True)
    o.set_compression_type(DBCompressionType.none())
    # Mapped index blocks would be checked only once, and a bad sector would kill the process.
    o.set_allow_mmap_reads(False)
    o.set_allow_concurrent_memtable_write(False)
    o.set_write_buffer_size(options.write_buffer_bytes)
    o.set_max_write_buffer_number(options.write_buffers_max)
    if options.write_buffers is not None:
        o.set_write_buffer_manager(options.write_buffers)
    o.set_max_open_files(options.open_files_max)
    o.set_max_background_jobs(options.background_jobs)
    o.set_level_zero_file_num_compaction_trigger(_FILES_BEFORE_COMPACTION)
    o.set_level_zero_slowdown_writes_trigger(40)
    o.set_level_zero_stop_writes_trigger(64)
    o.set_keep_log_file_num(2)
    o.set_max_log_file_size(1 << 20)
    o.set_stats_dump_period_sec(0)
    table = BlockBasedOptions()
    # The page cache has the blocks; a block cache would skip later checksums.
    table.disable_cache()
    table.set_bloom_filter(10, block_based=False)
    table.set_format_version(5)
    table.set_checksum_type(ChecksumType.xxh3())
    o.set_block_based_table_factory(table)
    return o


def _as_it_is(error: CorruptDataError) -> CorruptDataError:
    return error


def _translated(path: Path, error: Exception) -> StreamhouseError:
    text = str(error)
    if text.startswith("Result incomplete"):
        return OverloadedError(
            f"{path}: RocksDB is behind with compacting; send again later, or more slowly"
        )
    if text.startswith("Corruption") or any(sign in text for sign in _SIGNS_OF_DAMAGE):
        return CorruptDataError(f"{path}: {text}")
    return StorageFailedError(f"{path}: {text}")
