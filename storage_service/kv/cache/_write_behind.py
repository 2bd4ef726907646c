"""Handing applied changes to RocksDB, in large runs, behind those who write them.

The changes are durable in the log and found in memory meanwhile, so that nothing depends on when it
happens; only so much may wait. Large runs make RocksDB four times cheaper than every batch by
itself. RocksDB sorts what it gets; given nearly in order, that costs it half. One thread at a
time changes what waits; any may ask for the rows under a prefix.
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

# How long a read waits for a run to be handed over before it disturbs it.
_HANDOVER_WAIT_S: Final = 1.0
# How long to leave RocksDB alone that is behind with compacting.
_RETRY_S: Final = 0.05
# Below this a run is so small that RocksDB would cost more than it frees.
_RUN_BYTES_MIN: Final = 256 << 10
# Changes that wait lie in memory beside the rows they made.
_SHARE_OF_MEMORY: Final = 4
# Pieces are joined up to this, once there are so many of them: so much is copied at once.
_JOINED_ROWS_MAX: Final = 4_096
_JOINED_BYTES_MAX: Final = 256 << 10
_SMALL_PIECES_MAX: Final = 32
# A piece may hold twice what it has, and this.
_HELD_BESIDE_BYTES: Final = 4 << 10
_WORD: Final = np.dtype(">u8")


class Piece(NamedTuple):
    """Changes in order: a null value deletes; `marker` is where they lead to."""

    keys: pa.Array
    values: pa.Array
    marker: Marker


class WriteBacklog:
    """Pieces, oldest first. The list is replaced, never changed, so that readers see it whole.

    Small ones are joined now and then, so that there are few however small the writes are, and each
    row is copied few times. A piece that is part of much larger arrays is copied out of them, so
    that what is held is about what is counted.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._rows = 0
        self._bytes = 0
        self._tail = _Tail()

    @property
    def rows(self) -> int:
        """How many changes wait."""
        return self._rows

    @property
    def memory_bytes(self) -> int:
        """The bytes of the changes that wait."""
        return self._bytes

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, piece: Piece) -> None:
        """Append changes."""
        rows, size = len(piece.keys), bytes_of(piece.keys) + bytes_of(piece.values)
        piece = _without_others(piece, size)
        self._rows += rows
        self._bytes += size
        tail = self._tail.with_piece(rows, size)
        if tail.pieces == 1:
            # It does not go with those before, which get no more.
            self._pieces = [*_end_joined(self._pieces, self._tail.pieces), piece]
        elif tail.pieces < _SMALL_PIECES_MAX:
            self._pieces = [*self._pieces, piece]
        else:
            self._pieces = _end_joined([*self._pieces, piece], tail.pieces)
            tail = tail._replace(pieces=1)
        self._tail = tail

    def as_run(self) -> Piece:
        """Return the latest changes as one piece, nearly in the order of keys.

        Of changes of one key that come to lie side by side only the last is there.
        """
        keys, values, marker = _joined(self._pieces)
        order = nearly_sorted(keys)
        keys = keys.take(pa.array(order))
        again = pc.equal(keys[:-1], keys[1:]).to_numpy(zero_copy_only=False)
        if again.any():
            latest = np.append(~again, True)
            keys, order = keys.filter(pa.array(latest)), order[latest]
        return Piece(keys, values.take(pa.array(order)), marker)

    def after(self, older: WriteBacklog) -> WriteBacklog:
        """Return what waits here behind what waits there."""
        both = WriteBacklog()
        both._pieces = [*older._pieces, *self._pieces]
        both._rows, both._bytes = older._rows + self._rows, older._bytes + self._bytes
        both._tail = self._tail
        return both

    def changes_under(self, prefix: bytes) -> dict[bytes, bytes | None]:
        """Return the latest value of each key that starts with `prefix`; None was deleted."""
        changes: dict[bytes, bytes | None] = {}
        for piece in self._pieces:
            matches = pc.starts_with(piece.keys, pattern=prefix)
            keys = piece.keys.filter(matches).to_pylist()
            changes.update(zip(keys, piece.values.filter(matches).to_pylist(), strict=True))
        return changes


class _Tail(NamedTuple):
    """The last pieces, as many as can be joined: how many, and what they have."""

    pieces: int = 0
    rows: int = 0
    bytes: int = 0

    def with_piece(self, rows: int, size: int) -> _Tail:
        """Return the tail with another piece, or that piece alone if it would be too much."""
        tail = _Tail(self.pieces + 1, self.rows + rows, self.bytes + size)
        if tail.rows > _JOINED_ROWS_MAX or tail.bytes > _JOINED_BYTES_MAX:
            return _Tail(1, rows, size)
        return tail


def _without_others(piece: Piece, size: int) -> Piece:
    """Return the piece, of `size` bytes, on its own if it is a small part of what it holds."""
    retained_bytes = piece.keys.get_total_buffer_size() + piece.values.get_total_buffer_size()
    return _joined([piece]) if retained_bytes > 2 * size + _HELD_BESIDE_BYTES else piece


def _end_joined(pieces: list[Piece], count: int) -> list[Piece]:
    """Return the pieces, the last `count` as one."""
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
    """What one store does not have yet.

    A run may be written to the store by another thread than the one that changes what waits, which
    goes on meanwhile: `begin_run` and `end_run` are called by that one, `write_run` by any.
    `hand_over` does all of it at once, with what is under way as well.
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
        # The older first: what is in the run, and what came since. Replaced as one, for readers.
        self._backlogs: tuple[WriteBacklog, WriteBacklog] = (WriteBacklog(), WriteBacklog())
        # Held by whoever writes to the store.
        self._writing: Final = threading.Lock()
        self._retry_rows = 0
        self._memory_allowed = options.backlog_bytes * _SHARE_OF_MEMORY
        self._not_handing_over: Final = threading.Event()
        self._not_handing_over.set()
        self.wait_for_applied: Callable[[], None] = lambda: None
        """See `KvTablet.hand_over_after`."""

    @property
    def memory_bytes(self) -> int:
        """The bytes of the changes that wait."""
        return sum(backlog.memory_bytes for backlog in self._backlogs)

    @property
    def _rows(self) -> int:
        return sum(backlog.rows for backlog in self._backlogs)

    def limit_memory(self, allowed_bytes: int) -> None:
        """Let the bucket have this much memory in all: of less, less may wait."""
        self._memory_allowed = allowed_bytes

    def wait(self) -> None:
        """Return when nothing is being handed over, or after a while: before reading the store."""
        self._not_handing_over.wait(_HANDOVER_WAIT_S)

    def changes_under(self, prefix: bytes) -> dict[bytes, bytes | None]:
        """Return the latest value of each key that starts with `prefix`; None was deleted.

        What is handed over meanwhile is then seen here and in the store, not in neither.
        """
        run, current = self._backlogs
        newer = run.changes_under(prefix) | current.changes_under(prefix)
        self.wait()
        return newer

    def add(self, piece: Piece) -> None:
        """Append changes."""
        self._backlogs[1].add(piece)

    def hand_over_if_due(self) -> None:
        """Hand over when enough waits, if that is possible now."""
        if not self.is_due:
            return
        try:
            self.hand_over()
        except (CorruptDataError, OverloadedError, StorageFailedError) as error:
            self._refused(error)

    def check(self) -> None:
        """Raise OverloadedError while so much waits that nothing more is planned."""
        if self.is_too_much:
            self.hand_over()

    def wait_for_room(self) -> None:
        """Return when no more waits than may: for rows that nobody waits to see accepted."""
        while self.is_too_much:
            try:
                self.hand_over()
            except OverloadedError:
                time.sleep(_RETRY_S)

    def hand_over(self) -> None:
        """Give RocksDB everything that waits, as one run. What it refuses goes on waiting."""
        with self._writing:
            # One that was begun is written by now, or it is part of this.
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
        """Let what waits be written by another thread, if it is due and no other run under way."""
        return self._begin() if self._run is None and self.is_due else None

    def write_run(self, run: Run) -> None:
        """Write a run that was begun; on any thread."""
        with self._writing:
            if run is not self._run or run.is_written:
                return
            try:
                self._write(run)
            except (CorruptDataError, OverloadedError, StorageFailedError) as error:
                self._refused(error)

    def end_run(self, run: Run) -> None:
        """Forget a run, if it is written; else it waits again. Nothing if it was ended before."""
        if run is not self._run:
            return
        self._run = None
        older, newer = self._backlogs
        self._backlogs = (WriteBacklog(), newer if run.is_written else newer.after(older))
        self._on_ended(is_written=run.is_written)

    def close(self) -> None:
        """Return when no run is being written; none is from now on."""
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
        # A run that was refused is not tried again for every row that comes after it.
        self._retry_rows = waiting + self._options.backlog_rows // 2
        _logger.warning(
            "event=rocksdb_behind bucket=%r rows=%d why=%r", self._where, waiting, error.message
        )

    @property
    def is_due(self) -> bool:
        """Whether enough waits to be handed over, and a run that was refused may be tried again."""
        if self._rows < self._retry_rows:
            return False
        current = self._backlogs[1]
        share = max(self._memory_allowed // _SHARE_OF_MEMORY, _RUN_BYTES_MIN)
        return current.rows >= self._options.backlog_rows or (
            current.memory_bytes >= min(self._options.backlog_bytes, share)
        )

    @property
    def is_too_much(self) -> bool:
        """Whether so much waits that nothing more may be planned before some is handed over."""
        return (
            self._rows >= 4 * self._options.backlog_rows
            or self.memory_bytes >= 4 * self._options.backlog_bytes
        )


def nearly_sorted(keys: pa.Array) -> npt.NDArray[np.int64]:
    """Return positions that put `keys` nearly in order; equal keys keep their order.

    It is the order that six bytes give, from where the keys begin to differ.
    """
    order = np.arange(len(keys))
    if len(keys) < 2:
        return order
    words = _words_after(_common_prefix_bytes(keys), keys)
    words -= words.min()
    bits = int(words.max()).bit_length()
    words <<= np.uint64(64 - bits & 63)
    # Numbers of 16 bits are sorted by counting them; the most significant ones come last.
    parts = words.view(np.uint16).reshape(-1, 4)
    for part in range(4 - min(-(-bits // 16), 3), 4):
        order = order[np.argsort(parts[order, part], kind="stable")]
    return order


def _common_prefix_bytes(keys: pa.Array) -> int:
    """Return how many bytes all keys have in common at the start."""
    extremes = pc.min_max(keys)
    least, greatest = extremes["min"].as_py(), extremes["max"].as_py()
    length = min(len(least), len(greatest))
    for position in range(length):
        if least[position] != greatest[position]:
            return position
    return length


def _words_after(position: int, keys: pa.Array) -> npt.NDArray[np.uint64]:
    """Return the eight bytes from `position` of each key as numbers that compare like them."""
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
