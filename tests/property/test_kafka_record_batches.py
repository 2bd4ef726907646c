"""Record batches in columns against the same a record at a time; no bytes crash the reader."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.storage_service.kafka.protocol_errors import InvalidRecordsError
from streamhouse.storage_service.kafka.records.batches import (
    Compression,
    fitting_count,
    read_batch,
    read_batches,
    write_batch,
)
from streamhouse.storage_service.kafka.records.columns import TIMESTAMP_MS_MAX
from tests.support.record_batch_model import Batch, Record, columns_of, records_of, with_crc

BYTES_MAX = 1 << 24
RECORDS_MAX = 10_000

# Sizes about those where a varint gets another byte; short ones are the most.
_BYTES = st.one_of(
    st.binary(max_size=8),
    st.sampled_from([63, 64, 65, 8191, 8192]).map(lambda size: b"\xff" * size),
)
_HEADERS = st.lists(st.tuples(st.text(max_size=5), st.none() | _BYTES), max_size=4).map(tuple)
_TIMESTAMPS = st.one_of(
    st.integers(-1, 200),
    st.integers(1_700_000_000_000, 1_700_000_100_000),
    st.sampled_from([-1, 0, TIMESTAMP_MS_MAX]),
)
_STEPS = st.one_of(st.just(1), st.just(1), st.integers(1, 100), st.sampled_from([8192, 1 << 20]))


@st.composite
def _records(draw: st.DrawFn, *, is_dense: bool = False) -> tuple[Record, ...]:
    has_headers = draw(st.booleans())
    drawn = draw(
        st.lists(
            st.tuples(
                st.none() | _BYTES,
                st.none() | _BYTES,
                _TIMESTAMPS,
                _HEADERS if has_headers else st.just(()),
                st.just(1) if is_dense else _STEPS,
            ),
            min_size=1,
            max_size=30,
        )
    )
    deltas = itertools.accumulate(step for *_, step in drawn)
    return tuple(
        Record(key, value, time, headers, delta - drawn[0][4])
        for (key, value, time, headers, _), delta in zip(drawn, deltas, strict=True)
    )


@given(records=_records(), producer=st.tuples(st.integers(-1, 2**62), st.integers(-1, 2**15 - 1)))
def test_a_batch_reads_as_its_records(
    records: tuple[Record, ...], producer: tuple[int, int]
) -> None:
    batch = Batch(records, 77, 0x10, *producer, base_sequence=5)

    read = read_batch(memoryview(batch.encoded()), bytes_max=BYTES_MAX, records_max=RECORDS_MAX)

    assert records_of(read.columns, read.offset_deltas.tolist()) == records
    header = read.header
    assert (header.base_offset, header.producer_id, header.producer_epoch) == (77, *producer)
    assert (header.base_sequence, header.is_transactional, header.is_control) == (5, True, False)
    assert header.is_dense == (records[-1].offset_delta == len(records) - 1)


@given(records=_records())
def test_columns_are_written_as_their_records(records: tuple[Record, ...]) -> None:
    deltas = np.array([record.offset_delta for record in records], np.int64)

    pieces = write_batch(columns_of(records), base_offset=2**40, offset_deltas=deltas)

    assert b"".join(pieces) == Batch(records, 2**40).encoded()


@given(
    several=st.lists(_records(is_dense=True), max_size=3), compression=st.sampled_from(Compression)
)
def test_what_was_written_is_read(
    several: list[tuple[Record, ...]], compression: Compression
) -> None:
    written = [
        b"".join(write_batch(columns_of(records), base_offset=3, compression=compression))
        for records in several
    ]

    read = read_batches(memoryview(b"".join(written)), bytes_max=BYTES_MAX, records_max=RECORDS_MAX)

    found = [records_of(batch.columns, batch.offset_deltas.tolist()) for batch in read]
    assert found == several


@given(records=_records(), bytes_max=st.integers(0, 40_000))
def test_as_many_records_fit_as_are_written_in_so_many_bytes(
    records: tuple[Record, ...], bytes_max: int
) -> None:
    columns = columns_of(records)
    deltas = np.array([record.offset_delta for record in records])
    sizes = [
        sum(map(len, write_batch(columns.first(n), base_offset=0, offset_deltas=deltas[:n])))
        for n in range(1, len(records) + 1)
    ]

    count = fitting_count(columns, offset_deltas=deltas, bytes_max=bytes_max)

    assert count == sum(size <= bytes_max for size in sizes)


@given(records=_records(), cut=st.tuples(st.integers(0, 29), st.integers(0, 30)))
def test_a_part_of_columns_is_written_as_if_it_were_all(
    records: tuple[Record, ...], cut: tuple[int, int]
) -> None:
    whole = columns_of(records)
    part = slice(cut[0], cut[0] + cut[1])
    columns = type(whole)(
        keys=whole.keys[part],
        values=whole.values[part],
        timestamps_ms=whole.timestamps_ms[part],
        headers=None if whole.headers is None else whole.headers[part],
    )

    pieces = write_batch(columns, base_offset=0, last_offset_delta=100)

    read = read_batch(memoryview(b"".join(pieces)), bytes_max=BYTES_MAX, records_max=RECORDS_MAX)
    deltas = [record.offset_delta for record in records][part]
    assert records_of(read.columns, deltas) == records[part]


@given(
    records=_records(),
    # Of the batch's length on: the checksum is made right, so that the changes get past it.
    changes=st.lists(
        st.tuples(
            st.one_of(st.integers(21, 200), st.integers(57, 4000)),
            st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 0x7F, 0x80, 0xFF])),
        ),
        min_size=1,
        max_size=8,
    ),
    cut=st.none() | st.integers(0, 200),
)
def test_changed_bytes_are_refused_or_are_records(
    records: tuple[Record, ...], changes: list[tuple[int, int]], cut: int | None
) -> None:
    data = bytearray(Batch(records).encoded())
    if cut is not None:
        del data[max(61, len(data) - cut) :]
        data[8:12] = (len(data) - 12).to_bytes(4, "big")
    for position, byte in changes:
        data[position % (len(data) - 21) + 21] = byte

    try:
        read = read_batch(
            memoryview(with_crc(bytes(data))), bytes_max=BYTES_MAX, records_max=RECORDS_MAX
        )
    except InvalidRecordsError:
        return
    # What was read is whole: it can be written, and is read as the same.
    read.columns.keys.validate(full=True)
    read.columns.values.validate(full=True)
    again = records_of(read.columns, read.offset_deltas.tolist())
    if again:
        pieces = write_batch(
            read.columns, base_offset=0, offset_deltas=read.offset_deltas,
            last_offset_delta=read.header.last_offset_delta,
        )  # fmt: skip
        copy = read_batch(
            memoryview(b"".join(pieces)), bytes_max=BYTES_MAX, records_max=RECORDS_MAX
        )
        assert records_of(copy.columns, copy.offset_deltas.tolist()) == again


@given(data=st.binary(max_size=300), is_batch=st.booleans(), compression=st.integers(0, 7))
def test_any_bytes_are_refused_or_are_records(
    data: bytes, is_batch: bool, compression: int
) -> None:
    if is_batch:
        record = Record(b"k", b"v")
        data = Batch((record,), 0, compression, body=data, record_count=len(data) % 7).encoded()

    try:
        read_batches(memoryview(data), bytes_max=1000, records_max=10)
    except InvalidRecordsError:
        return


@pytest.mark.parametrize("compression", list(Compression)[1:])
@given(
    records=_records(is_dense=True),
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4),
)
def test_changed_compressed_bytes_are_refused_or_are_records(
    compression: Compression, records: tuple[Record, ...], changes: list[tuple[int, int]]
) -> None:
    pieces = write_batch(columns_of(records), base_offset=0, compression=compression)
    data = bytearray(b"".join(pieces))
    for position, byte in changes:
        data[position % (len(data) - 61) + 61] = byte

    try:
        read_batch(memoryview(with_crc(bytes(data))), bytes_max=1 << 20, records_max=RECORDS_MAX)
    except InvalidRecordsError:
        return
