"""Record batches, read into columns and written from them. Every byte that is read is checked.

The bytes of a batch's header are in `batch_header`, those of its records in `record_reading`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamhouse.storage_service.kafka.errors import InvalidRecordsError, RecordsFault
from streamhouse.storage_service.kafka.records.batch_header import (
    NO_PRODUCER,
    BatchHeader,
    header_bytes,
    open_batch,
)
from streamhouse.storage_service.kafka.records.columns import TIMESTAMP_MS_MAX, RecordColumns
from streamhouse.storage_service.kafka.records.compression import (
    Compression,
    compress,
    decompress,
)
from streamhouse.storage_service.kafka.records.record_reading import read_records
from streamhouse.storage_service.kafka.records.record_writing import (
    RECORDS_BYTES_MAX,
    written_records,
)

__all__ = ["Compression", "ReadBatch", "read_batch", "read_batches", "write_batch"]

_NO_TIMESTAMP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBatch:
    """A record batch as it came; its records are those of `columns`."""

    header: BatchHeader
    offset_deltas: NDArray[np.int64]
    """Of each record, ascending; a producer's are 0, 1, 2 and so on: `header.is_dense`."""
    columns: RecordColumns


def read_batch(data: memoryview, *, bytes_max: int, records_max: int) -> ReadBatch:
    """Return the one batch that `data` is: what a Produce request has for a partition.

    Raises InvalidRecordsError as `read_batches`, and if there is another batch behind the first:
    Kafka's brokers take one, since version 3 of Produce.
    """
    batch, _, rest = _read_batch(data, bytes_max=bytes_max, records_max=records_max)
    if rest:
        raise InvalidRecordsError("several record batches came for a partition, one is taken")
    return batch


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
        batch, records_bytes, data = _read_batch(data, bytes_max=bytes_max, records_max=records_max)
        bytes_max -= records_bytes
        records_max -= len(batch.columns)
        batches.append(batch)
    return batches


def write_batch(
    columns: RecordColumns,
    *,
    base_offset: int,
    offset_deltas: NDArray[np.int64] | None = None,
    last_offset_delta: int | None = None,
    compression: Compression = Compression.NONE,
) -> list[bytes | memoryview]:
    """Return the bytes of a batch of records, in pieces that stay views of each other.

    Args:
        columns: the records.
        base_offset: the offset that the batch begins at.
        offset_deltas: of each record, from `base_offset`, ascending; by default 0, 1, 2 and so on.
        last_offset_delta: of the last offset that the batch covers, by default of the last record.
            A reader goes on behind it; a batch without records needs it.
        compression: of the records.

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
    return [header_bytes(header, records), *records]


def _read_batch(
    data: memoryview, *, bytes_max: int, records_max: int
) -> tuple[ReadBatch, int, memoryview]:
    """Return the first batch of `data`, how many bytes its records have, and what follows."""
    header, compressed, rest = open_batch(data)
    if header.record_count > records_max:
        raise InvalidRecordsError(
            f"{header.record_count} records are more than {records_max}; send smaller batches",
            fault=RecordsFault.TOO_LARGE,
        )
    bytes_max = min(bytes_max, RECORDS_BYTES_MAX)
    records = decompress(compressed, header.compression, bytes_max=bytes_max)
    read = read_records(records, header.record_count)
    _check_offsets(read.offset_deltas, header.last_offset_delta)
    columns = RecordColumns(
        keys=read.keys,
        values=read.values,
        timestamps_ms=_timestamps(header, read.timestamp_deltas_ms),
        headers=read.headers,
    )
    batch = ReadBatch(header=header, offset_deltas=read.offset_deltas, columns=columns)
    return batch, len(records), rest


def _check_offsets(deltas: NDArray[np.int64], last: int) -> None:
    is_ascending = bool((deltas[1:] > deltas[:-1]).all())
    if not is_ascending or (len(deltas) and not 0 <= deltas[0] <= deltas[-1] <= last):
        raise InvalidRecordsError(
            f"the offsets of the records are not ascending, from 0 to {last} above the batch's"
        )


def _timestamps(header: BatchHeader, deltas: NDArray[np.int64]) -> NDArray[np.int64]:
    if header.is_append_time:
        timestamps = np.full(len(deltas), header.max_timestamp_ms, dtype=np.int64)
    else:
        timestamps = deltas + header.base_timestamp_ms
    is_right = (timestamps >= _NO_TIMESTAMP) & (timestamps <= TIMESTAMP_MS_MAX)
    if not is_right.all():
        wrong = int(is_right.argmin())
        raise InvalidRecordsError(
            f"record {wrong} of the batch has timestamp {timestamps[wrong]} ms, not one of"
            f" {_NO_TIMESTAMP} to {TIMESTAMP_MS_MAX}"
        )
    return timestamps
