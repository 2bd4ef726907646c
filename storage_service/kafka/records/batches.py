"""Record batches, read into columns and written from columns. Every byte read is checked.

`batch_header` has the format of the header, `record_reading` the format of records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamhouse.storage_service.kafka.protocol_errors import InvalidRecordsError, RecordsFault
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
"""The minimal bytes of a batch with a record."""
_NO_TIMESTAMP = -1
# The maximal bytes of a record without key, value and headers: all numbers with maximal length.
_AROUND_RECORD_BYTES_MAX: Final = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBatch:
    """A record batch as received; `columns` are its records."""

    header: BatchHeader
    offset_deltas: NDArray[np.int64]
    """For each record, ascending; from a producer 0, 1, 2 and so on: `header.is_dense`."""
    columns: RecordColumns


class OpenedBatch(NamedTuple):
    """A complete record batch with decompressed, unread records."""

    header: BatchHeader
    records: bytes


def open_produced(data: memoryview, *, bytes_max: int, records_max: int) -> OpenedBatch:
    """Return the only batch in `data`, the records of a partition in a Produce request.

    Raises InvalidRecordsError as `read_batches`, and for a second batch: Kafka's brokers accept a
    single batch since version 3 of Produce.
    """
    opened, further_bytes = _opened(data, bytes_max=bytes_max, records_max=records_max)
    if further_bytes:
        raise InvalidRecordsError("several record batches came for a partition, one is taken")
    return opened


def read_produced(
    batches: Sequence[OpenedBatch], *, headers_max: HeadersMax = HEADERS_MAX
) -> RecordColumns:
    """Return the records of consecutive batches as columns.

    A few small batches take little longer than a single batch. Raises InvalidRecordsError for an
    invalid record, and for records without the consecutive numbers of a producer. The error does
    not name the batch: reading each batch alone does.
    """
    counts = [batch.header.record_count for batch in batches]
    read = read_records([batch.records for batch in batches], counts, headers_max=headers_max)
    _check_dense(read.offset_deltas, counts)
    return _columns(batches, read)


def read_batch(data: memoryview, *, bytes_max: int, records_max: int) -> ReadBatch:
    """Return the only batch in `data`; raises InvalidRecordsError as `open_produced`."""
    return _read(open_produced(data, bytes_max=bytes_max, records_max=records_max))


def read_batches(data: memoryview, *, bytes_max: int, records_max: int) -> list[ReadBatch]:
    """Return all batches in `data`.

    Args:
        data: records as encoded in a request or an answer.
        bytes_max: the limit for the decompressed records of all batches together.
        records_max: the limit for the records of all batches together.

    Raises InvalidRecordsError, whose `fault` is the error for the client.
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
    """Return an encoded batch, in pieces that may be views.

    Args:
        columns: the records.
        base_offset: the first offset of the batch.
        offset_deltas: for each record, from `base_offset`, ascending; by default 0, 1, 2 and so on.
        last_offset_delta: the last offset of the batch, by default of the last record. A reader
            continues behind this offset; a batch without records needs the argument.
        compression: the compression of the records.
        leader_epoch: the leader epoch of the partition.

    Raises ValueError for records beyond the size of a batch, which is nearly 2 GiB.
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
    """Return how many of the first records fit into an uncompressed batch of `bytes_max` bytes."""
    count = len(columns)
    bytes_max -= HEADER_BYTES
    bytes_bound = columns.keys.nbytes + columns.values.nbytes + count * _AROUND_RECORD_BYTES_MAX
    if columns.headers is None and bytes_bound <= bytes_max:
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
    """Return the first batch of `data` with unread records, and the bytes behind."""
    header, compressed, further_bytes = open_batch(data)
    if header.record_count > records_max:
        raise InvalidRecordsError(
            f"{header.record_count} records are more than {records_max}; send smaller batches",
            fault=RecordsFault.TOO_LARGE,
        )
    bytes_max = min(bytes_max, RECORDS_BYTES_MAX)
    records = decompress(compressed, header.compression, bytes_max=bytes_max)
    return OpenedBatch(header, records), further_bytes


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
    """Raise InvalidRecordsError unless the records of each batch are numbered 0, 1, 2 and on."""
    expected_parts = [np.arange(count) for count in counts]
    expected = expected_parts[0] if len(expected_parts) == 1 else np.concatenate(expected_parts)
    # For few records counting is faster than `all`.
    if np.count_nonzero(deltas == expected) < len(expected):
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
        invalid = int(is_right.argmin())
        raise InvalidRecordsError(
            f"record {invalid} of the batch has timestamp {timestamps[invalid]} ms, not one of"
            f" {_NO_TIMESTAMP} to {TIMESTAMP_MS_MAX}"
        )
    return timestamps


def _of_records(values: Sequence[int], headers: Sequence[BatchHeader]) -> int | NDArray[np.int64]:
    """Return values of batches as a column over all records."""
    if len(values) == 1:
        return values[0]
    return np.repeat(np.array(values, np.int64), [header.record_count for header in headers])
