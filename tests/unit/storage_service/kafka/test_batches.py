"""What is refused of record batches, by which name; what a batch carries beside its records."""

from __future__ import annotations

import gzip
import pickle
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.storage_service.kafka.protocol_errors import InvalidRecordsError, RecordsFault
from streamhouse.storage_service.kafka.records._compression import compress, decompress
from streamhouse.storage_service.kafka.records.batches import (
    Compression,
    ReadBatch,
    read_batch,
    read_batches,
    write_batch,
)
from streamhouse.storage_service.kafka.records.columns import (
    HEADERS_TYPE,
    TIMESTAMP_MS_MAX,
    RecordColumns,
)
from tests.support.record_batch_model import (
    Batch,
    Record,
    columns_of,
    encoded_record,
    encoded_varint,
    records_of,
)

_RECORD = Record(b"k", b"v", 5)
_RECORDS = tuple(Record(b"k", b"value", 5, (), delta) for delta in range(20))


def _read(data: bytes, *, bytes_max: int = 1 << 20, records_max: int = 1000) -> ReadBatch:
    return read_batch(memoryview(data), bytes_max=bytes_max, records_max=records_max)


def _refused(data: bytes, **limits: int) -> InvalidRecordsError:
    with pytest.raises(InvalidRecordsError) as caught:
        _read(data, **limits)
    return caught.value


def _record(*numbers: int) -> bytes:
    """A record whose attributes are 0 and whose numbers are these, nothing else."""
    body = b"\0" + b"".join(map(encoded_varint, numbers))
    return encoded_varint(len(body)) + body


def test_changed_bytes_are_corrupt() -> None:
    data = bytearray(Batch((_RECORD,)).encoded())
    data[-3] ^= 1

    error = _refused(bytes(data))

    assert error.fault is RecordsFault.CORRUPT
    assert "checksum" in error.message


@pytest.mark.parametrize("size", [1, 16, 17, 60, 61, 69])
def test_a_batch_that_is_cut_off_is_corrupt(size: int) -> None:
    data = Batch((_RECORD,)).encoded()
    assert len(data) == 70

    assert _refused(data[:size]).fault is RecordsFault.CORRUPT


@pytest.mark.parametrize("claimed", [-1, 0, 48, 2**31 - 1, -(2**31)])
def test_a_batch_of_another_size_than_it_says_is_corrupt(claimed: int) -> None:
    data = bytearray(Batch((_RECORD,)).encoded())
    data[8:12] = claimed.to_bytes(4, "big", signed=True)

    assert _refused(bytes(data)).fault is RecordsFault.CORRUPT


@pytest.mark.parametrize("magic", [0, 1, 3])
def test_another_message_format_is_refused_by_its_name(magic: int) -> None:
    data = bytearray(Batch((_RECORD,)).encoded())
    data[16] = magic

    error = _refused(bytes(data))

    assert error.fault is RecordsFault.OLD_FORMAT
    assert f"message format {magic}" in error.message


@pytest.mark.parametrize("code", [5, 6, 7])
def test_a_compression_that_nobody_has_is_refused_by_its_name(code: int) -> None:
    error = _refused(Batch((_RECORD,), attributes=code).encoded())

    assert error.fault is RecordsFault.UNSUPPORTED_COMPRESSION


def test_a_produced_partition_is_one_batch() -> None:
    data = Batch((_RECORD,)).encoded()

    assert _refused(data + data).fault is RecordsFault.INVALID
    assert len(read_batches(memoryview(data + data), bytes_max=100, records_max=2)) == 2


@pytest.mark.parametrize(("bytes_max", "records_max"), [(17, 2), (100, 1)])
def test_limits_are_those_of_all_batches_together(bytes_max: int, records_max: int) -> None:
    data = Batch((_RECORD,)).encoded()
    assert len(data) - 61 == 9

    with pytest.raises(InvalidRecordsError) as caught:
        read_batches(memoryview(data + data), bytes_max=bytes_max, records_max=records_max)

    assert caught.value.fault is RecordsFault.TOO_LARGE
    assert len(read_batches(memoryview(data + data), bytes_max=18, records_max=2)) == 2


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (b"", 1),
        (b"", -1),
        (b"", 2**31 - 1),
        (bytes(7), 1),
        (bytes(14), 2),
        (encoded_record(_RECORD, 5), 2),
        (encoded_record(_RECORD, 5) * 2, 1),
        (encoded_record(_RECORD, 5) + b"\0", 1),
        # Sizes: a record of fewer than no bytes, one whose size does not end, one of 4 GiB.
        (b"\x01" + bytes(8), 1),
        (b"\xff" * 10, 1),
        (b"\xff\xff\xff\xff\x0f" + bytes(10), 1),
        # timestamp, offset, key size, value size, headers
        (_record(0, 0, -2, -1, 0), 1),
        (_record(0, 0, -1, -2, 0), 1),
        (_record(0, 0, 1, -1, 0), 1),
        (_record(0, 0, -1, 5, 0), 1),
        (_record(0, 0, -1, -1, -1), 1),
        (_record(0, 0, -1, -1, 1), 1),
        (_record(0, 0, -1, -1, 2**31 - 1), 1),
        (_record(0, 0, -1, -1, 1, -1, -1), 1),
        (_record(0, 0, -1, -1, 1, 0, -2), 1),
        (_record(0, 0, -1, -1, 1, 0, 1), 1),
        (_record(0, 0, -1, -1, 0, 0), 1),
        (_record(0, 0, 2**31 - 1, 2**31 - 1, 0), 1),
        (_record(0, 0, -1, -1, 1, 2**31 - 1, -1), 1),
        (_record(0, 0, -1, -1, 0) + _record(0, 0, -1, -1, 0), 2),
        (_record(0, -1, -1, -1, 0), 1),
        (_record(0, 1, -1, -1, 0), 1),
        (_record(-2, 0, -1, -1, 0), 1),
        (_record(2**63 - 1, 0, -1, -1, 0), 1),
        (_record(TIMESTAMP_MS_MAX + 1, 0, -1, -1, 0), 1),
        # A header whose key is no text.
        (encoded_varint(10) + bytes.fromhex("000000010102 02ff 01".replace(" ", "")) + b"\0", 1),
    ],
)
def test_sound_bytes_that_are_no_records_are_invalid(body: bytes, count: int) -> None:
    batch = Batch((), body=body, record_count=count, last_offset_delta=0, base_timestamp_ms=0)

    assert _refused(batch.encoded(), records_max=2**31).fault is RecordsFault.INVALID


@pytest.mark.parametrize("count", [1, 30])
@pytest.mark.parametrize("header", ["fffe", "0401ff01", "02", "0261"])
def test_headers_that_are_no_headers_are_invalid_in_few_records_and_in_many(
    count: int, header: str
) -> None:
    numbers = b"\0" + encoded_varint(0)
    bodies = [
        numbers + encoded_varint(delta) + b"\x01\x01\x02" + bytes.fromhex(header)
        for delta in range(count)
    ]
    body = b"".join(encoded_varint(len(one)) + one for one in bodies)
    batch = Batch((), body=body, record_count=count, last_offset_delta=count - 1)

    assert _refused(batch.encoded()).fault is RecordsFault.INVALID


def test_a_record_may_have_very_many_headers() -> None:
    headers = tuple((f"h{number % 7}", b"x" * (number % 3)) for number in range(1_000))
    records = (Record(None, b"v", 5, headers), Record(None, b"v", 5, (), 1))

    read = _read(Batch(records).encoded())

    assert records_of(read.columns, [0, 1]) == records


def test_time_may_be_that_of_the_append() -> None:
    batch = Batch((_RECORD, Record(None, b"v", 9, (), 1)), attributes=0x08)

    assert _read(batch.encoded()).columns.timestamps_ms.tolist() == [9, 9]


@pytest.mark.parametrize(
    ("attributes", "is_transactional", "is_control"), [(0x10, True, False), (0x30, True, True)]
)
def test_marks_of_transactions_are_seen(
    attributes: int, is_transactional: bool, is_control: bool
) -> None:
    read = _read(Batch((_RECORD,), attributes=attributes).encoded())

    assert (read.header.is_transactional, read.header.is_control) == (is_transactional, is_control)


def test_a_batch_may_end_behind_its_records_and_have_none() -> None:
    nothing = columns_of(())

    pieces = write_batch(nothing, base_offset=7, last_offset_delta=4)

    read = _read(b"".join(pieces))
    header = read.header
    assert (header.base_offset, header.last_offset_delta, header.record_count) == (7, 4, 0)
    assert not header.is_dense


def test_a_table_s_headers_without_key_or_list_are_written() -> None:
    headers = pa.array([[{"key": None, "value": b"x"}, None], None], HEADERS_TYPE)
    columns = RecordColumns(
        keys=pa.nulls(2, pa.binary()),
        values=pa.array([b"a", b"b"]),
        timestamps_ms=np.zeros(2, np.int64),
        headers=headers,
    )

    read = _read(b"".join(write_batch(columns, base_offset=0)))

    assert read.columns.headers is not None
    assert read.columns.headers.to_pylist() == [
        [{"key": "", "value": b"x"}, {"key": "", "value": None}],
        [],
    ]


@pytest.mark.parametrize("compression", list(Compression)[1:])
def test_a_bomb_is_refused_before_it_takes_memory(compression: Compression) -> None:
    bomb = compress(bytes(1 << 26), compression)
    data = Batch((_RECORD,), attributes=compression, body=bomb).encoded()
    before = pa.total_allocated_bytes()
    tracemalloc.start()

    error = _refused(data, bytes_max=1 << 20)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error.fault is RecordsFault.TOO_LARGE
    assert peak < len(data) + (4 << 20)
    assert pa.total_allocated_bytes() < before + (4 << 20)


@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize("size", [0, 9_000_000])
def test_what_was_compressed_is_the_same_again(compression: Compression, size: int) -> None:
    data = np.random.default_rng(0).bytes(min(size, 1000)) * (size // 1000 or 1)

    compressed = compress(data, compression)

    assert decompress(memoryview(compressed), compression, bytes_max=len(data)) == data


def test_an_exact_limit_is_within_and_one_less_is_not() -> None:
    for compression in Compression:
        compressed = memoryview(compress(b"x" * 1000, compression))

        assert len(decompress(compressed, compression, bytes_max=1000)) == 1000
        with pytest.raises(InvalidRecordsError) as caught:
            decompress(compressed, compression, bytes_max=999)
        assert caught.value.fault is RecordsFault.TOO_LARGE


def test_lz4_blocks_do_not_depend_on_each_other() -> None:
    """Java's client refuses those that do."""
    assert compress(b"x" * 100, Compression.LZ4)[4] & 0x20


def test_snappy_is_read_without_its_framing_too() -> None:
    raw = pa.compress(b"x" * 1000, codec="snappy", asbytes=True)

    assert decompress(memoryview(raw), Compression.SNAPPY, bytes_max=1000) == b"x" * 1000


@pytest.mark.parametrize("raw", [b"", b"\xff", b"\xff" * 10, b"\xff\xff\xff\xff\x07", b"\x10\x00"])
def test_snappy_that_promises_what_it_cannot_hold_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRecordsError) as caught:
        decompress(memoryview(raw), Compression.SNAPPY, bytes_max=1 << 40)

    assert caught.value.fault is RecordsFault.INVALID


def test_gzip_in_several_members_is_read() -> None:
    data = gzip.compress(b"a" * 10) + gzip.compress(b"b" * 200_000)

    assert decompress(memoryview(data), Compression.GZIP, bytes_max=1 << 20) == (
        b"a" * 10 + b"b" * 200_000
    )


def test_columns_of_another_type_or_length_are_a_mistake_of_the_caller() -> None:
    sound = columns_of(_RECORDS)

    for wrong in (
        {"keys": sound.keys.cast(pa.string())},
        {"values": sound.values[1:]},
        {"timestamps_ms": sound.timestamps_ms.astype(np.int32)},
        {"headers": pa.nulls(20, pa.list_(pa.string()))},
        {"headers": pa.nulls(19, HEADERS_TYPE)},
    ):
        parts = {
            "keys": sound.keys, "values": sound.values, "timestamps_ms": sound.timestamps_ms
        } | wrong  # fmt: skip
        with pytest.raises(ValueError, match=r"not |columns of"):
            RecordColumns(**parts)


def test_the_fault_crosses_processes() -> None:
    error = InvalidRecordsError("no", fault=RecordsFault.TOO_LARGE)

    copy = pickle.loads(pickle.dumps(error))

    assert (copy.message, copy.fault) == ("no", RecordsFault.TOO_LARGE)
