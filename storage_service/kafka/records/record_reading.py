"""The records of a batch as columns: few records one by one, many records part by part.

A record (KIP-98), with numbers as varints:

    bytes that follow | attributes i8, unused | timestamp delta | offset delta
    | key bytes, -1 is null | key | value bytes, -1 is null | value | header count | headers
    header: key bytes | key, UTF-8 | value bytes, -1 is null | value

Records are adjacent, and so are their parts. Every position is the previous position plus a number
of at least 0, and the last position is compared with the record's end. Therefore no part can lie
outside of its record.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from streamhouse.storage_service.kafka.protocol_errors import InvalidRecordsError, RecordsFault
from streamhouse.storage_service.kafka.records._varints import (
    VARINT_BYTES_MAX,
    VARLONG_BYTES_MAX,
    read_varint,
    read_varints,
)
from streamhouse.storage_service.kafka.records.columns import HEADERS_TYPE

__all__ = ["HEADERS_MAX", "RECORD_BYTES_MIN", "HeadersMax", "ReadRecords", "read_records"]

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

RECORD_BYTES_MIN: Final = 7
"""A length and six numbers, of one byte each."""
_HEADER_BYTES_MIN: Final = 2


class HeadersMax(NamedTuple):
    """The limits for headers of a record, and of all records in one pass."""

    of_record: int
    of_all: int


HEADERS_MAX: Final = HeadersMax(1_000, 200_000)
"""A header has two bytes or more, but takes a hundred bytes and a step of Python once read."""
_ENDS_ELSEWHERE: Final = "its parts end elsewhere than itself"
_NEGATIVE_SIZE: Final = "its size is negative"
_FEWER_THAN_NONE: Final = "a key or a value has fewer bytes than none"
_NO_SUCH_COUNT: Final = "no such count of headers"
_NO_HEADER_KEY: Final = "a header of a record has no key"
_NO_UTF8: Final = "the key of a record's header is not UTF-8"
# For more records columns take less time, of records with and without headers.
_FEW_RECORDS: Final = 20


class ReadRecords(NamedTuple):
    """Records of a batch, in columns; see `RecordColumns`."""

    timestamp_deltas_ms: Numbers
    offset_deltas: Numbers
    keys: pa.BinaryArray
    values: pa.BinaryArray
    headers: pa.ListArray | None


class _Part(NamedTuple):
    """A part of each record, or of each header: start, end, and nulls."""

    start: Numbers
    end: Numbers
    is_null: NDArray[np.bool_]

    def null_count(self) -> int:
        return int(np.count_nonzero(self.is_null))


def read_records(
    pieces: Sequence[bytes], counts: Sequence[int], *, headers_max: HeadersMax = HEADERS_MAX
) -> ReadRecords:
    """Return the records in `pieces`, or raise InvalidRecordsError.

    Each piece has the records of a batch, as many as the count says. A few small batches take
    little longer than one batch.

    Memory is bounded by the bytes of all pieces and by `headers_max`: impossible counts are refused
    first.
    """
    ends = _all_ends(pieces, counts)
    records = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if 0 < len(ends) <= _FEW_RECORDS:
        return _read_few(records, ends.tolist(), headers_max)
    return _read_many(records, ends, headers_max)


def _read_few(records: bytes, ends: Sequence[int], headers_max: HeadersMax) -> ReadRecords:
    """Read records one by one."""
    rows = []
    header_count = at = 0
    for number, end in enumerate(ends):
        try:
            size, at = read_varint(records, at)
            if at + size != end:
                raise _invalid(number, _NEGATIVE_SIZE)
            timestamp_delta, at = read_varint(records, at + 1, bytes_max=VARLONG_BYTES_MAX)
            offset_delta, at = read_varint(records, at)
            key, at = _read_one_part(records, at, number)
            value, at = _read_one_part(records, at, number)
            count, at = read_varint(records, at)
            if not 0 <= count <= (end - at) // _HEADER_BYTES_MIN:
                raise _invalid(number, _NO_SUCH_COUNT)
            header_count += count
            _check_header_counts(count, header_count, headers_max)
            headers = []
            for _ in range(count):
                name, at = _read_one_part(records, at, number)
                header_value, at = _read_one_part(records, at, number)
                if name is None:
                    raise InvalidRecordsError(_NO_HEADER_KEY)
                headers.append((str(name, "utf-8"), header_value))
        except IndexError:
            at = -1
        except UnicodeDecodeError as error:
            raise InvalidRecordsError(_NO_UTF8) from error
        if at != end:
            raise _invalid(number, _ENDS_ELSEWHERE)
        rows.append((timestamp_delta, offset_delta, key, value, headers))
    timestamp_deltas, offset_deltas, keys, values, all_headers = zip(*rows, strict=True)
    return ReadRecords(
        np.array(timestamp_deltas, np.int64),
        np.array(offset_deltas, np.int64),
        pa.array(keys, pa.binary()),
        pa.array(values, pa.binary()),
        pa.array(all_headers, HEADERS_TYPE) if header_count else None,
    )


def _read_one_part(records: bytes, at: int, number: int) -> tuple[memoryview | None, int]:
    """Return a key or a value of record `number`, and the position behind."""
    size, at = read_varint(records, at)
    if size < -1:
        raise _invalid(number, _FEWER_THAN_NONE)
    end = at + max(size, 0)
    return (None if size < 0 else memoryview(records)[at:end]), end


def _read_many(records: bytes, ends: Numbers, headers_max: HeadersMax) -> ReadRecords:
    """Read each part of all records at once."""
    data = np.frombuffer(records, dtype=np.uint8)
    begins = np.empty(len(ends), dtype=np.int64)
    begins[:1] = 0
    begins[1:] = ends[:-1]
    size, at = read_varints(data, begins, bytes_max=VARINT_BYTES_MAX)
    # `_walk` does not check the sign of a size.
    _check(at + size == ends, _NEGATIVE_SIZE)
    timestamp_deltas, at = read_varints(data, at + 1, bytes_max=VARLONG_BYTES_MAX)
    offset_deltas, at = read_varints(data, at, bytes_max=VARINT_BYTES_MAX)
    keys = _read_part(data, at)
    values = _read_part(data, keys.end)
    header_counts, at = read_varints(data, values.end, bytes_max=VARINT_BYTES_MAX)
    headers = None
    buffer = pa.py_buffer(records)
    if np.count_nonzero(header_counts):
        counts_max = (ends - at) // _HEADER_BYTES_MIN
        _check((header_counts >= 0) & (header_counts <= counts_max), _NO_SUCH_COUNT)
        _check_header_counts(header_counts.max(), header_counts.sum(), headers_max)
        headers = _headers(buffer, data, at, ends, header_counts)
    else:
        _check(at == ends, _ENDS_ELSEWHERE)
    return ReadRecords(
        timestamp_deltas, offset_deltas, _binary(buffer, keys), _binary(buffer, values), headers
    )


def _all_ends(pieces: Sequence[bytes], counts: Sequence[int]) -> Numbers:
    """Return the end of each record in all pieces together."""
    if len(pieces) == 1:
        return _record_ends(pieces[0], counts[0])
    piece_starts = itertools.accumulate(map(len, pieces), initial=0)
    numbered = zip(pieces, counts, piece_starts, strict=False)
    return np.concatenate([_record_ends(piece, count) + base for piece, count, base in numbered])


def _record_ends(records: bytes, record_count: int) -> Numbers:
    if not 0 <= record_count <= len(records) // RECORD_BYTES_MIN:
        raise InvalidRecordsError(f"{len(records)} bytes cannot hold {record_count} records")
    try:
        ends = np.fromiter(_walk(records, record_count), dtype=np.int64, count=record_count)
    except IndexError:
        raise InvalidRecordsError(
            f"fewer than the {record_count} records in the batch's header"
        ) from None
    end = int(ends[-1]) if record_count else 0
    if end != len(records):
        raise InvalidRecordsError(
            f"{record_count} records end at byte {end}, the batch at {len(records)}"
        )
    return ends


def _walk(records: bytes, record_count: int) -> Iterator[int]:
    """Yield the end of each record, if its size is not negative."""
    position = 0
    for _ in range(record_count):
        size = records[position]
        position += 1
        if size > 0x7F:
            byte = records[position]
            position += 1
            size = size & 0x7F | byte << 7
            if byte > 0x7F:
                number, position = read_varint(records, position - 2)
                size = number << 1
        position += size >> 1
        yield position


def _read_part(data: Bytes, at: Numbers) -> _Part:
    size, start = read_varints(data, at, bytes_max=VARINT_BYTES_MAX)
    is_null = size < 0
    if np.count_nonzero(is_null):
        _check(size >= -1, _FEWER_THAN_NONE)
        size = np.maximum(size, 0)
    return _Part(start, start + size, is_null)


def _check(is_right: NDArray[np.bool_], message: str) -> None:
    """Raise InvalidRecordsError for the first record that is not right."""
    # `all` takes longer.
    if np.count_nonzero(is_right) < len(is_right):
        raise _invalid(int(is_right.argmin()), message)


def _invalid(number: int, message: str) -> InvalidRecordsError:
    return InvalidRecordsError(f"record {number} of the batch: {message}")


def _binary(buffer: pa.Buffer, part: _Part) -> pa.BinaryArray:
    """Return a part of each record, or of each header, as a column."""
    count = len(part.start)
    null_count = part.null_count()
    if null_count == count:
        return pa.nulls(count, pa.binary())
    # An array of these bytes and the bytes in between, of which Arrow takes every second value.
    bounds = np.empty(2 * count + 1, dtype=np.int32)
    bounds[0:-1:2] = part.start
    bounds[1::2] = part.end
    bounds[-1] = bounds[-2]
    pieces = pa.BinaryArray.from_buffers(
        pa.binary(), 2 * count, [None, pa.py_buffer(bounds), buffer]
    )
    every_second = np.arange(0, 2 * count, 2, dtype=np.int32)
    # An array without a mask takes a third of the time.
    if not null_count:
        return pieces.take(pa.array(every_second))
    return pieces.take(pa.array(every_second, mask=part.is_null))


def _check_header_counts(record_max: int, all_count: int, headers_max: HeadersMax) -> None:
    for count, count_max, subject in (
        (record_max, headers_max.of_record, "a record has"),
        (all_count, headers_max.of_all, "the records have"),
    ):
        if count > count_max:
            raise InvalidRecordsError(
                f"{subject} {count} headers, at most {count_max}; send smaller batches",
                fault=RecordsFault.TOO_LARGE,
            )


def _headers(
    buffer: pa.Buffer, data: Bytes, at: Numbers, ends: Numbers, counts: Numbers
) -> pa.ListArray:
    """Return the headers of all records; the headers of a record begin at its `at`."""
    firsts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=firsts[1:])
    keys, values = _empty_part(int(firsts[-1])), _empty_part(int(firsts[-1]))
    rows = np.flatnonzero(counts)
    index = 0
    # One step for the n-th header of all records with at least n headers.
    while len(rows):
        for part in (keys, values):
            nth_part = _read_part(data, at[rows])
            for slots, column in zip(part, nth_part, strict=True):
                slots[firsts[rows] + index] = column
            at[rows] = nth_part.end
        index += 1
        rows = rows[counts[rows] > index]
    _check(at == ends, _ENDS_ELSEWHERE)
    if keys.null_count():
        raise InvalidRecordsError(_NO_HEADER_KEY)
    return _header_lists(buffer, firsts, keys, values)


def _empty_part(count: int) -> _Part:
    start, end = np.empty((2, count), dtype=np.int64)
    return _Part(start, end, np.empty(count, dtype=np.bool_))


def _header_lists(buffer: pa.Buffer, firsts: Numbers, keys: _Part, values: _Part) -> pa.ListArray:
    try:
        names = _binary(buffer, keys).cast(pa.string())
    except pa.ArrowInvalid as error:
        raise InvalidRecordsError(_NO_UTF8) from error
    headers = pa.StructArray.from_arrays(
        [names, _binary(buffer, values)], fields=list(HEADERS_TYPE.value_type)
    )
    return pa.ListArray.from_arrays(pa.array(firsts, pa.int32()), headers, type=HEADERS_TYPE)
