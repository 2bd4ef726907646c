"""The remembered batches of each idempotent writer of a bucket, and their snapshot on disk.

A writer numbers its batches per bucket: 1, 2, 3, ... (0 means no sequence). A remembered sequence
is a repetition and gets the offsets of the first append; the sequence after the last is new; any
other sequence is refused, because accepting could lose or duplicate rows.

Sequences counting records (`record_sequence.py`) continue at the end of the last batch, or with a
higher epoch from 0 on, as for a Kafka producer on a broker. An unknown writer must begin with 0,
too. A broker accepts any begin, because its retention forgets producers together with their
records. Here only long idle writers are forgotten, and the error tells them. A writer may skip
buckets if its batches are split over buckets or change nothing: `Continuity` defines the rule for a
sequence.

Snapshot file `<offset, 20 digits>.writers`: the state before the row at the offset.

    0 magic 'SHWS' | 4 version u16 | 6 header bytes u16 | 8 table id u64 | 16 bucket u32
    20 writer count u32 | 24 offset u64 | 32 body bytes u64 | 40 zeros | 56 crc u32 of the body
    60 crc u32 of the header
    then per writer, the longest idle first:
    writer id u64 | batch count u64 | batches, oldest first:
    sequence u64 | base offset u64 | end offset u64 | timestamp us i64
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from crc32c import crc32c

from streamhouse.core.errors import FencedError, OutOfOrderSequenceError
from streamhouse.core.model.records.record_sequence import (
    RECORD_COUNTED,
    RECORDS_MAX,
    Continuity,
    RecordSequence,
)
from streamhouse.storage_service.log.segments.segment_format import (
    FILE_HEADER_BYTES,
    LogIdentity,
    MalformedError,
    seal_header,
    unseal_header,
)

__all__ = [
    "TRANSACTION_WRITER",
    "RememberedBatch",
    "WriterStates",
    "decode_writers",
    "encode_writers",
]

FIRST_SEQUENCE: Final = 1
TRANSACTION_WRITER: Final = (1 << 64) - 1
"""The writer of committed transactions. Its sequences are never repetitions: the single appender
checks `last_sequence` first."""
_BATCH: Final = struct.Struct("<QQQq")
_WRITER: Final = struct.Struct("<QQ")
_HEADER: Final = struct.Struct("<4sHHQIIQQ16xI")
_MAGIC: Final = b"SHWS"


class RememberedBatch(NamedTuple):
    """An appended batch: its offsets and its time."""

    sequence: int
    base_offset: int
    end_offset: int
    timestamp_us: int


class WriterStates:
    """The windows of all writers of one bucket. Not thread-safe: the log tablet's lock guards them.

    A window is kept packed, 32 bytes a batch, because a bucket may know tens of thousands of
    writers. Windows are replaced, never changed, so an undo restores the old window.
    """

    def __init__(self, *, window: int, writers_max: int) -> None:
        assert window > 0
        assert writers_max > 0
        self._window_bytes = window * _BATCH.size
        self._writers_max = writers_max
        # In order of last activity, so that the longest idle come first.
        self._windows: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._windows)

    def find(
        self,
        writer_id: int,
        *,
        sequence: int,
        row_count: int | None = None,
        continuity: Continuity = Continuity.EXACT,
    ) -> RememberedBatch | None:
        """Return the batch repeated by `sequence`, or None for the writer's next sequence.

        A `continuity` other than exact is for sequences counting records. The repetition of an
        empty append is a batch without rows.

        Raises OutOfOrderSequenceError for any other sequence, and for a repetition with a different
        `row_count`, if set; FencedError for an epoch before the writer's.
        """
        window = self._windows.get(writer_id)
        if sequence >= RECORD_COUNTED:
            return self._find_records(window, writer_id, sequence, row_count, continuity)
        if window is None:
            if sequence == FIRST_SEQUENCE:
                return None
            raise OutOfOrderSequenceError(
                f"writer {writer_id:x} starts with sequence {sequence} and is not known here;"
                f" begin with a new writer id and sequence {FIRST_SEQUENCE}"
            )
        last = _BATCH.unpack_from(window, len(window) - _BATCH.size)[0]
        if sequence == last + 1:
            return None
        for fields in _BATCH.iter_unpack(window):
            if fields[0] == sequence:
                return self._same(RememberedBatch(*fields), writer_id, row_count)
        first = _BATCH.unpack_from(window)[0]
        raise OutOfOrderSequenceError(
            f"writer {writer_id:x} sent sequence {sequence}; expected {last + 1},"
            f" or a repetition of {first} to {last}"
        )

    def _find_records(
        self,
        window: bytes | None,
        writer_id: int,
        sequence: int,
        row_count: int | None,
        continuity: Continuity,
    ) -> RememberedBatch | None:
        request = RecordSequence.unpacked(sequence)
        is_exact = continuity is Continuity.EXACT
        if window is None:
            if request.base == 0 or not is_exact:
                return None
            raise OutOfOrderSequenceError(
                f"the producer of writer {writer_id:x} starts with record {request.base} and is not"
                " known here; begin with a higher epoch, or as a new producer, and record 0",
                is_unknown_writer=True,
            )
        batches = [RememberedBatch(*fields) for fields in _BATCH.iter_unpack(window)]
        # A writer counting batches cannot switch to counting records.
        if batches[-1].sequence < RECORD_COUNTED:
            raise OutOfOrderSequenceError(
                f"writer {writer_id:x} counts batches here, not records; begin as a new producer"
            )
        last = RecordSequence.unpacked(batches[-1].sequence)
        if request.epoch < last.epoch:
            raise FencedError(
                f"the producer of writer {writer_id:x} has epoch {last.epoch} by now, not"
                f" {request.epoch}; another one goes on in its place"
            )
        if request.epoch > last.epoch:
            if request.base == 0 or not is_exact:
                return None
            raise _out_of_order(writer_id, request, expected=0)
        for batch in batches:
            if batch.sequence == sequence:
                return self._same(batch, writer_id, row_count)
        if request.base == last.next_base:
            return None
        if is_exact:
            raise _out_of_order(writer_id, request, expected=last.next_base)
        in_flight_max = self._window_bytes // _BATCH.size * RECORDS_MAX
        is_behind = request.records_until(last.next_base) <= in_flight_max
        if continuity is Continuity.ORDERED or not is_behind:
            return None
        # The writer's last batch could not exist here without this earlier batch.
        at = batches[-1]._replace(sequence=sequence, end_offset=batches[-1].base_offset)
        return self._same(at, writer_id, row_count)

    def last_sequence(self, writer_id: int, *, since: int) -> int:
        """Return the sequence of a writer's latest batch, 0 for a batch below offset `since`."""
        window = self._windows.get(writer_id)
        if window is None or _last(window).base_offset < since:
            return 0
        return _last(window).sequence

    def last_timestamp_us(self, writer_id: int) -> int:
        """Return the time of a writer's latest batch, 0 for an unknown writer."""
        window = self._windows.get(writer_id)
        return 0 if window is None else _last(window).timestamp_us

    @staticmethod
    def _same(batch: RememberedBatch, writer_id: int, row_count: int | None) -> RememberedBatch:
        if row_count is not None and batch.end_offset - batch.base_offset != row_count:
            raise OutOfOrderSequenceError(
                f"writer {writer_id:x} repeats sequence {batch.sequence} with {row_count} rows;"
                f" it had {batch.end_offset - batch.base_offset} the first time"
            )
        return batch

    def record(self, writer_id: int, batch: tuple[int, int, int, int]) -> bytes | None:
        """Remember a batch as the writer's latest; return the previous window, for `put_back`.

        The tuple has the fields of a `RememberedBatch`, without the cost of an object per frame.
        """
        previous = self._windows.pop(writer_id, None)
        window = (previous or b"") + _BATCH.pack(*batch)
        self._windows[writer_id] = window[-self._window_bytes :]
        if len(self._windows) > self._writers_max:
            del self._windows[next(iter(self._windows))]
        return previous

    def put_back(self, writer_id: int, window: bytes | None) -> None:
        """Undo the latest `record` of a writer."""
        if window is None:
            self._windows.pop(writer_id, None)
        else:
            self._windows[writer_id] = window

    def expire(self, timestamp_us_before: int) -> None:
        """Forget writers whose last batch is older."""
        expired = []
        for writer_id, window in self._windows.items():
            if _last(window).timestamp_us >= timestamp_us_before:
                break
            expired.append(writer_id)
        for writer_id in expired:
            del self._windows[writer_id]

    def windows(self) -> dict[int, list[RememberedBatch]]:
        """Return all remembered batches, the longest idle writer first."""
        return {
            writer_id: [RememberedBatch(*fields) for fields in _BATCH.iter_unpack(window)]
            for writer_id, window in self._windows.items()
        }

    def packed(self) -> list[bytes]:
        """Return the parts of a snapshot's body."""
        parts = []
        for writer_id, window in self._windows.items():
            parts.append(_WRITER.pack(writer_id, len(window) // _BATCH.size))
            parts.append(window)
        return parts

    def load(self, writer_id: int, window: bytes) -> None:
        """Add a writer from a snapshot; writers loaded later were active later."""
        self._windows[writer_id] = window[-self._window_bytes :]
        if len(self._windows) > self._writers_max:
            del self._windows[next(iter(self._windows))]


def _out_of_order(
    writer_id: int, request: RecordSequence, *, expected: int
) -> OutOfOrderSequenceError:
    return OutOfOrderSequenceError(
        f"the producer of writer {writer_id:x} sent {request.record_count} records from"
        f" {request.base} on in epoch {request.epoch}; expected {expected}, or a repetition of a"
        " batch that is remembered"
    )


def _last(window: bytes) -> RememberedBatch:
    return RememberedBatch(*_BATCH.unpack_from(window, len(window) - _BATCH.size))


def encode_writers(writers: WriterStates, *, identity: LogIdentity, offset: int) -> bytes:
    """Return the contents of a snapshot file."""
    body = b"".join(writers.packed())
    header = _HEADER.pack(
        _MAGIC,
        1,
        FILE_HEADER_BYTES,
        identity.table_id,
        identity.bucket,
        len(writers),
        offset,
        len(body),
        crc32c(body),
    )
    return seal_header(header) + body


def decode_writers(
    data: bytes, *, identity: LogIdentity, offset: int, window: int, writers_max: int
) -> WriterStates:
    """Read the snapshot taken at `offset`; raises MalformedError."""
    header = unseal_header(data, magic=_MAGIC, what="writer snapshot")
    _, _, _, table_id, bucket, count, at_offset, body_bytes, body_crc = _HEADER.unpack(header)
    body = data[FILE_HEADER_BYTES:]
    if (LogIdentity(table_id, bucket), at_offset) != (identity, offset):
        raise MalformedError(f"writer snapshot of {table_id}/{bucket} at offset {at_offset}")
    if len(body) != body_bytes or crc32c(body) != body_crc:
        raise MalformedError("writer snapshot checksum mismatch")
    writers = WriterStates(window=window, writers_max=writers_max)
    position = 0
    for _ in range(count):
        writer_id, batch_count = _WRITER.unpack_from(body, position)
        position += _WRITER.size
        end = position + batch_count * _BATCH.size
        writers.load(writer_id, body[position:end])
        position = end
    return writers
