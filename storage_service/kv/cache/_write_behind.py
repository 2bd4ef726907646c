"""Handing applied changes to RocksDB in large runs, behind the writers.

The changes are durable in the log and readable in memory meanwhile, so the time of the handover
does not matter; only the backlog is limited. Large runs make RocksDB four times cheaper than single
batches, and a run in the order of keys costs RocksDB a fifth of one in another order. One thread at
a time changes the backlog; any thread may ask for the rows under a prefix.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import (
    CorruptDataError,
    OverloadedError,
    StorageFailedError,
    StreamhouseError,
)
from streamhouse.core.model.hashing.byte_runs import binary_parts, bytes_of, gather_at
from streamhouse.storage_service.kv.cache._memory_budget import KvOptions
from streamhouse.storage_service.kv.rocksdb_store import Marker, RocksdbStore

__all__ = ["Piece", "Run", "WriteBacklog", "WriteBehind", "nearly_sorted"]

_logger = logging.getLogger(__name__)

# The longest wait of a read for a handover, before reading anyway.
_HANDOVER_WAIT_S: Final = 1.0
# The pause for a RocksDB behind with compacting.
_RETRY_S: Final = 0.05
# A smaller run would cost RocksDB more memory than it frees.
_RUN_BYTES_MIN: Final = 256 << 10
# Waiting changes are in memory in addition to the cached rows.
_SHARE_OF_MEMORY: Final = 4
# The most rows and bytes of joined pieces, and the number of small pieces before a join.
_JOINED_ROWS_MAX: Final = 4_096
_JOINED_BYTES_MAX: Final = 256 << 10
_SMALL_PIECES_MAX: Final = 32
# A piece may reference arrays of twice its size, plus this.
_HELD_BESIDE_BYTES: Final = 4 << 10
_WORD: Final = np.dtype(">u8")
# Of so few keys out of order RocksDB's writes are as cheap; sorting them takes as long as writing.
_MIXED: Final = 1 / 16


class Piece(NamedTuple):
    """Changes in order: a null value deletes; `marker` is the state afterwards."""

    keys: pa.Array
    values: pa.Array
    marker: Marker


class WriteBacklog:
    """Pieces, oldest first. The list is replaced, never changed, for consistent reads.

    Small pieces are joined now and then, so that their number stays small and each row is copied
    few times. A piece of much larger arrays is copied, so that the memory held is about the memory
    counted.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self.rows = 0
        """The number of waiting changes."""
        self.memory_bytes = 0
        """The bytes of waiting changes."""
        self._tail = _Tail()

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, piece: Piece) -> None:
        """Append changes."""
        rows, size = len(piece.keys), bytes_of(piece.keys) + bytes_of(piece.values)
        retained_bytes = piece.keys.get_total_buffer_size() + piece.values.get_total_buffer_size()
        if retained_bytes > 2 * size + _HELD_BESIDE_BYTES:
            piece = _joined([piece])
        self.rows += rows
        self.memory_bytes += size
        last = self._tail
        tail = _Tail(last.pieces + 1, last.rows + rows, last.bytes + size)
        if tail.rows > _JOINED_ROWS_MAX or tail.bytes > _JOINED_BYTES_MAX:
            tail = _Tail(1, rows, size)
        if tail.pieces == 1:
            # The piece is too large for the previous pieces; they are joined as they are.
            self._pieces = [*_end_joined(self._pieces, last.pieces), piece]
        elif tail.pieces < _SMALL_PIECES_MAX:
            self._pieces = [*self._pieces, piece]
        else:
            self._pieces = _end_joined([*self._pieces, piece], tail.pieces)
            tail = tail._replace(pieces=1)
        self._tail = tail

    def as_run(self) -> Piece:
        """Return the latest changes as one piece, nearly in the order of keys.

        Of neighbouring changes of one key only the last is included.
        """
        keys, values, marker = _joined(self._pieces)
        keys, order = nearly_sorted(keys)
        again = pc.equal(keys[:-1], keys[1:]).to_numpy(zero_copy_only=False)
        if again.any():
            latest = np.append(~again, True)
            keys, order = keys.filter(pa.array(latest)), order[latest]
        return Piece(keys, values.take(pa.array(order)), marker)

    def behind(self, older: WriteBacklog) -> WriteBacklog:
        """Return the changes of `older` followed by these."""
        both = WriteBacklog()
        both._pieces = [*older._pieces, *self._pieces]
        both.rows = older.rows + self.rows
        both.memory_bytes = older.memory_bytes + self.memory_bytes
        both._tail = self._tail
        return both

    def changes_under(self, prefix: bytes) -> dict[bytes, bytes | None]:
        """Return the latest value of each key starting with `prefix`; None means deleted."""
        changes: dict[bytes, bytes | None] = {}
        for piece in self._pieces:
            matches = pc.starts_with(piece.keys, pattern=prefix)
            keys = piece.keys.filter(matches).to_pylist()
            changes.update(zip(keys, piece.values.filter(matches).to_pylist(), strict=True))
        return changes


class _Tail(NamedTuple):
    """The last, joinable pieces: their number and size."""

    pieces: int = 0
    rows: int = 0
    bytes: int = 0


def _end_joined(pieces: list[Piece], count: int) -> list[Piece]:
    """Return the pieces, the last `count` joined."""
    if count < 2:
        return pieces
    return [*pieces[:-count], _joined(pieces[-count:])]


def _joined(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        pa.concat_arrays([piece.keys for piece in pieces]),
        pa.concat_arrays([piece.values for piece in pieces]),
        pieces[-1].marker,
    )


class Run:
    """Changes on their way to the store."""

    def __init__(self, backlog: WriteBacklog) -> None:
        self.backlog: Final = backlog
        self.is_written = False


class WriteBehind:
    """The changes missing from one store.

    A run may be written to the store by a second thread while the changing thread continues: the
    changing thread calls `begin_run` and `end_run`, any thread calls `write_run`. `hand_over` does
    all steps at once, including a run under way.
    """

    def __init__(
        self,
        store: RocksdbStore,
        options: KvOptions,
        *,
        where: str,
        on_begun: Callable[[], None],
        on_ended: Callable[..., None],
    ) -> None:
        self._store: Final = store
        self._options: Final = options
        self._where: Final = where
        self._on_begun: Final = on_begun
        self._on_ended: Final = on_ended
        self._run: Run | None = None
        # The changes in the run, then newer changes. Replaced together, for readers.
        self._backlogs: tuple[WriteBacklog, WriteBacklog] = (WriteBacklog(), WriteBacklog())
        # Held while writing to the store.
        self._writing: Final = threading.Lock()
        self._retry_rows = 0
        self.memory_allowed = options.backlog_bytes * _SHARE_OF_MEMORY
        """The memory of the whole bucket; a smaller memory allows a smaller backlog."""
        self._not_handing_over: Final = threading.Event()
        self._not_handing_over.set()
        self.wait_for_applied: Callable[[], None] = lambda: None
        """See `KvTablet.hand_over_after`."""

    @property
    def memory_bytes(self) -> int:
        """The bytes of waiting changes."""
        run, current = self._backlogs
        return run.memory_bytes + current.memory_bytes

    @property
    def _rows(self) -> int:
        run, current = self._backlogs
        return run.rows + current.rows

    def wait(self) -> None:
        """Wait for a running handover, or a while: before reading the store."""
        self._not_handing_over.wait(_HANDOVER_WAIT_S)

    def changes_under(self, prefix: bytes) -> dict[bytes, bytes | None]:
        """Return the latest value of each key starting with `prefix`; None means deleted.

        A handover during the call shows a change both here and in the store, never in neither.
        """
        run, current = self._backlogs
        newer = run.changes_under(prefix) | current.changes_under(prefix)
        self.wait()
        return newer

    def add(self, piece: Piece) -> None:
        """Append changes."""
        self._backlogs[1].add(piece)

    def hand_over_if_due(self) -> None:
        """Hand over a large enough backlog, if possible now."""
        if not self.is_due:
            return
        try:
            self.hand_over()
        except (CorruptDataError, OverloadedError, StorageFailedError) as error:
            self._refused(error)

    def check(self) -> None:
        """Raise OverloadedError while the backlog forbids further plans."""
        if self.is_too_much:
            self.hand_over()

    def wait_for_room(self) -> None:
        """Return when the backlog is within its limit: for rows without a waiting client."""
        while self.is_too_much:
            try:
                self.hand_over()
            except OverloadedError:
                time.sleep(_RETRY_S)

    def hand_over(self) -> None:
        """Give RocksDB the whole backlog, as one run. Refused changes stay in the backlog."""
        with self._writing:
            # A run begun earlier is written by now, or joins this run.
            if self._run is not None:
                self.end_run(self._run)
            run = self._begin()
            if run is None:
                return
            try:
                self._write(run)
            finally:
                self.end_run(run)

    def begin_run(self) -> Run | None:
        """Begin a run for another thread, if due and without a run under way."""
        return self._begin() if self._run is None and self.is_due else None

    def write_run(self, run: Run) -> None:
        """Write a begun run; on any thread."""
        with self._writing:
            if run is not self._run or run.is_written:
                return
            try:
                self._write(run)
            except (CorruptDataError, OverloadedError, StorageFailedError) as error:
                self._refused(error)

    def end_run(self, run: Run) -> None:
        """Forget a written run; an unwritten run waits again. Harmless for an ended run."""
        if run is not self._run:
            return
        self._run = None
        older, newer = self._backlogs
        self._backlogs = (WriteBacklog(), newer if run.is_written else newer.behind(older))
        self._on_ended(is_written=run.is_written)

    def close(self) -> None:
        """Return when no run is being written; later runs are ignored."""
        with self._writing:
            self._run = None

    def _begin(self) -> Run | None:
        waiting = self._backlogs[1]
        if not waiting:
            return None
        self._backlogs = (waiting, WriteBacklog())
        self._on_begun()
        self._run = Run(waiting)
        return self._run

    def _write(self, run: Run) -> None:
        self.wait_for_applied()
        self._not_handing_over.clear()
        try:
            piece = run.backlog.as_run()
            self._store.write(piece.keys, piece.values, marker=piece.marker)
            self._store.seal()
        finally:
            self._not_handing_over.set()
        run.is_written = True
        self._retry_rows = 0

    def _refused(self, error: StreamhouseError) -> None:
        waiting = self._rows
        # A refused run is not retried for every further row.
        self._retry_rows = waiting + self._options.backlog_rows // 2
        _logger.warning(
            "event=rocksdb_behind bucket=%r rows=%d why=%r", self._where, waiting, error.message
        )

    @property
    def is_due(self) -> bool:
        """Whether a handover is due, and a refused run may be retried."""
        if self._rows < self._retry_rows:
            return False
        current = self._backlogs[1]
        share = max(self.memory_allowed // _SHARE_OF_MEMORY, _RUN_BYTES_MIN)
        return current.rows >= self._options.backlog_rows or (
            current.memory_bytes >= min(self._options.backlog_bytes, share)
        )

    @property
    def is_too_much(self) -> bool:
        """Whether the backlog forbids further plans before a handover."""
        return (
            self._rows >= 4 * self._options.backlog_rows
            or self.memory_bytes >= 4 * self._options.backlog_bytes
        )


def nearly_sorted(keys: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Return `keys` nearly in order, and their positions before; equal keys keep their order.

    Six bytes are compared, from the first difference of the keys on; all bytes of keys that these
    leave mixed.
    """
    order = np.arange(len(keys))
    if len(keys) < 2:
        return keys, order
    words = _words_after(_common_prefix_bytes(keys), keys)
    words -= words.min()
    bits = int(words.max()).bit_length()
    words <<= np.uint64(64 - bits & 63)
    # Numbers of 16 bits are sorted by counting them; the most significant ones come last.
    parts = words.view(np.uint16).reshape(-1, 4)
    for part in range(4 - min(-(-bits // 16), 3), 4):
        order = order[np.argsort(parts[order, part], kind="stable")]
    nearly = keys.take(pa.array(order))
    if pc.less(nearly[1:], nearly[:-1]).true_count > _MIXED * len(keys):
        again = pc.sort_indices(nearly)
        return nearly.take(again), order[again.to_numpy()]
    return nearly, order


def _common_prefix_bytes(keys: pa.Array) -> int:
    """Return the length of the common prefix of all keys."""
    extremes = pc.min_max(keys)
    least, greatest = extremes["min"].as_py(), extremes["max"].as_py()
    length = min(len(least), len(greatest))
    for position in range(length):
        if least[position] != greatest[position]:
            return position
    return length


def _words_after(position: int, keys: pa.Array) -> npt.NDArray[np.uint64]:
    """Return eight bytes from `position` of each key as equally ordered numbers."""
    data, offsets = binary_parts(keys)
    starts = offsets[:-1].astype(np.int64) + position
    padded = np.zeros(int(offsets[-1]) + _WORD.itemsize, dtype=np.uint8)
    padded[: offsets[-1]] = data[: offsets[-1]]
    words = gather_at(padded, starts, _WORD).astype(np.uint64)
    missing = np.maximum(8 - (offsets[1:] - starts), 0)
    if missing.any():
        # The bytes of the next key count as zeros.
        masks = np.array([(1 << 64) - (1 << (8 * n)) for n in range(8)] + [0], dtype=np.uint64)
        words &= masks[missing]
    return words
