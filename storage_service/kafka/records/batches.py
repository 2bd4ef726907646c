"""Record batches, read into columns and written from them. Every byte that is read is checked.

The bytes of a batch's header are in `batch_header`, those of its records in `record_reading`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamhouse.storage_service.kafka.errors import InvalidRecordsError, RecordsFault
from streamhouse.storage_service.kafka.records._compression import (
    Compression,
    compress,
    decompress,
)
from streamhouse.storage_service.kafka.records._record_writing import (
    RECORD_BYTES_MIN,
    RECORDS_BYTES_MAX,
    record_sizes,
    written_records,
)
from streamhouse.storage_service.kafka.records.batch_header import (
    HEADER_BYTES,
    NO_PRODUCER,
    BatchHeader,
    header_bytes,
    open_batch,
)
from streamhouse.storage_service.kafka.records.columns import TIMESTAMP_MS_MAX, RecordColumns
from streamhouse.storage_service.kafka.records.record_reading import (
    HEADERS_MAX,
    HeadersMax,
    ReadRecords,
    read_records,
)

__all__ = [
    "BATCH_BYTES_MIN",
    "Compression",
    "OpenedBatch",
    "ReadBatch",
    "fitting_count",
    "open_produced",
    "read_batch",
    "read_batches",
    "read_produced",
    "write_batch",
]

BATCH_BYTES_MIN: Final = HEADER_BYTES + RECORD_BYTES_MIN
"""No batch with a record is smaller."""
_NO_TIMESTAMP = -1
# Beside the bytes of its key, its value and its headers: all numbers at their longest.
_AROUND_RECORD_BYTES_MAX: Final = 36
# As many as small batches have: making it takes longer than comparing with it.
_FROM_0: Final = np.arange(1 << 12, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBatch:
    """A record batch as it came; its records are those of `columns`."""

    header: BatchHeader
    offset_deltas: NDArray[np.int64]
    """Of each record, ascending; a producer's are 0, 1, 2 and so on: `header.is_dense`."""
    columns: RecordColumns


class OpenedBatch(NamedTuple):
    """A record batch that came whole; its records are decompressed, and not yet looked at."""

    header: BatchHeader
    records: bytes


def open_produced(data: memoryview, *, bytes_max: int, records_max: int) -> OpenedBatch:
    """Return the one batch that `data` is: what a Produce request has for a partition.

    Raises InvalidRecordsError as `read_batches`, and if there is another batch behind the first:
    Kafka's brokers take one, since version 3 of Produce.
    """
    opened, rest = _opened(data, bytes_max=bytes_max, records_max=records_max)
    if rest:
        raise InvalidRecordsError("several record batches came for a partition, one is taken")
    return opened


def read_produced(
    batches: Sequence[OpenedBatch], *, headers_max: HeadersMax = HEADERS_MAX
) -> RecordColumns:
    """Return the records of batches as columns, those of one batch behind those of the one before.

    A few small batches take little longer than one. Raises InvalidRecordsError where a record is
    wrong, or has another number than its place from 0 on, as a producer gives them. Of several
    batches it does not say which one is: reading that one alone does.
    """
    counts = [batch.header.record_count for batch in batches]
    read = read_records([batch.records for batch in batches], counts, headers_max=headers_max)
    _check_dense(read.offset_deltas, counts)
    return _columns(batches, read)


def read_batch(data: memoryview, *, bytes_max: int, records_max: int) -> ReadBatch:
    """Return the one batch that `data` is; raises InvalidRecordsError as `open_produced`."""
    return _read(open_produced(data, bytes_max=bytes_max, records_max=records_max))


def read_batches(data: memoryview, *, bytes_max: int, records_max: int) -> list[ReadBatch]:
    """Return the batches that `data` consists of.

    Args:
        data: bytes of records as they stand in a request or an answer.
        bytes_max: what the records of all batches together may have, when decompressed.
        records_max: how many records all batches together may have.

    Raises InvalidRecordsError, whose `fault` says what a client is to be told.
    """
    batches = []
    while data:
        opened, data = _opened(data, bytes_max=bytes_max, records_max=records_max)
        bytes_max -= len(opened.records)
        records_max -= opened.header.record_count
        batches.append(_read(opened))
    return batches


def _read(opened: OpenedBatch) -> ReadBatch:
    header = opened.header
    read = read_records([opened.records], [header.record_count])
    _check_offsets(read.offset_deltas, header.last_offset_delta)
    columns = _columns([opened], read)
    return ReadBatch(header=header, offset_deltas=read.offset_deltas, columns=columns)


def write_batch(
    columns: RecordColumns,
    *,
    base_offset: int,
    offset_deltas: NDArray[np.int64] | None = None,
    last_offset_delta: int | None = None,
    compression: Compression = Compression.NONE,
    leader_epoch: int = 0,
) -> list[bytes | memoryview]:
    """Return the bytes of a batch of records, in pieces that stay views of each other.

    Args:
        columns: the records.
        base_offset: the offset that the batch begins at.
        offset_deltas: of each record, from `base_offset`, ascending; by default 0, 1, 2 and so on.
        last_offset_delta: of the last offset that the batch covers, by default of the last record.
            A reader goes on behind it; a batch without records needs it.
        compression: of the records.
        leader_epoch: of the partition that the records are read from.

    Raises ValueError where the records have more than a batch can, which is nearly 2 GiB.
    """
    count = len(columns)
    if offset_deltas is None:
        offset_deltas = np.arange(count, dtype=np.int64)
    if last_offset_delta is None:
        last_offset_delta = int(offset_deltas[-1])
    timestamps = columns.timestamps_ms
    base_timestamp_ms = int(timestamps[0]) if count else _NO_TIMESTAMP
    records = written_records(
        columns, timestamp_deltas_ms=timestamps - base_timestamp_ms, offset_deltas=offset_deltas
    )
    if compression is not Compression.NONE:
        records = [compress(b"".join(records), compression)]
    header = BatchHeader(
        base_offset=base_offset,
        compression=compression,
        is_append_time=False,
        is_transactional=False,
        is_control=False,
        last_offset_delta=last_offset_delta,
        base_timestamp_ms=base_timestamp_ms,
        max_timestamp_ms=int(timestamps.max(initial=_NO_TIMESTAMP)),
        producer_id=NO_PRODUCER,
        producer_epoch=NO_PRODUCER,
        base_sequence=NO_PRODUCER,
        record_count=count,
    )
    return [header_bytes(header, records, leader_epoch=leader_epoch), *records]


def fitting_count(
    columns: RecordColumns, *, offset_deltas: NDArray[np.int64], bytes_max: int
) -> int:
    """Return how many of the records, from the first on, `write_batch` writes in so many bytes.

    That is without compression.
    """
    count = len(columns)
    bytes_max -= HEADER_BYTES
    most = columns.keys.nbytes + columns.values.nbytes + count * _AROUND_RECORD_BYTES_MAX
    if columns.headers is None and most <= bytes_max:
        return count
    timestamps = columns.timestamps_ms
    sizes = record_sizes(
        columns,
        timestamp_deltas_ms=timestamps - (timestamps[0] if count else 0),
        offset_deltas=offset_deltas,
    )
    return int(np.searchsorted(np.cumsum(sizes), bytes_max, side="right"))


def _opened(
    data: memoryview, *, bytes_max: int, records_max: int
) -> tuple[OpenedBatch, memoryview]:
    """Return the first batch of `data`, its records not yet looked at, and what follows it."""
    header, compressed, rest = open_batch(data)
    if header.record_count > records_max:
        raise InvalidRecordsError(
            f"{header.record_count} records are more than {records_max}; send smaller batches",
            fault=RecordsFault.TOO_LARGE,
        )
    bytes_max = min(bytes_max, RECORDS_BYTES_MAX)
    records = decompress(compressed, header.compression, bytes_max=bytes_max)
    return OpenedBatch(header, records), rest


def _columns(batches: Sequence[OpenedBatch], read: ReadRecords) -> RecordColumns:
    """Return the records of batches that were read together."""
    return RecordColumns(
        keys=read.keys,
        values=read.values,
        timestamps_ms=_timestamps(batches, read.timestamp_deltas_ms),
        headers=read.headers,
    )


def _check_offsets(deltas: NDArray[np.int64], last: int) -> None:
    is_ascending = bool((deltas[1:] > deltas[:-1]).all())
    if not is_ascending or (len(deltas) and not 0 <= deltas[0] <= deltas[-1] <= last):
        raise InvalidRecordsError(
            f"the offsets of the records are not ascending, from 0 to {last} above the batch's"
        )


def _check_dense(deltas: NDArray[np.int64], counts: Sequence[int]) -> None:
    """Raise InvalidRecordsError unless the records of each batch have all numbers from 0 on."""
    each = [_FROM_0[:count] if count <= len(_FROM_0) else np.arange(count) for count in counts]
    wanted = each[0] if len(each) == 1 else np.concatenate(each)
    # Counting is quicker than `all`, of few records.
    if np.count_nonzero(deltas == wanted) < len(wanted):
        raise InvalidRecordsError(
            "the offsets of the records are not 0, 1, 2 and so on above the batch's"
        )


def _timestamps(batches: Sequence[OpenedBatch], deltas: NDArray[np.int64]) -> NDArray[np.int64]:
    headers = [batch.header for batch in batches]
    if any(header.is_append_time for header in headers):
        deltas = deltas * _of_records([not header.is_append_time for header in headers], headers)
    bases = [h.max_timestamp_ms if h.is_append_time else h.base_timestamp_ms for h in headers]
    timestamps = deltas + _of_records(bases, headers)
    is_right = (timestamps >= _NO_TIMESTAMP) & (timestamps <= TIMESTAMP_MS_MAX)
    if np.count_nonzero(is_right) < len(is_right):
        wrong = int(is_right.argmin())
        raise InvalidRecordsError(
            f"record {wrong} of the batch has timestamp {timestamps[wrong]} ms, not one of"
            f" {_NO_TIMESTAMP} to {TIMESTAMP_MS_MAX}"
        )
    return timestamps


def _of_records(values: Sequence[int], headers: Sequence[BatchHeader]) -> int | NDArray[np.int64]:
    """Return what each batch has as a column over the records of all."""
    if len(values) == 1:
        return values[0]
    return np.repeat(np.array(values, np.int64), [header.record_count for header in headers])
