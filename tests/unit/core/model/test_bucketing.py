"""Rows land where Iceberg's bucket transform says, and composite keys where their bytes say."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.core.model.bucketing import (
    buckets_for_rows,
    encode_key,
    split_by_bucket,
    split_evenly,
)

UTC = datetime.UTC
MOMENT = datetime.datetime(2017, 11, 16, 22, 31, 8, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "data_type", "published_hash"),
    [
        (34, pa.int32(), 2017239379),
        (34, pa.int64(), 2017239379),
        (34, pa.int8(), 2017239379),
        (34, pa.int16(), 2017239379),
        (Decimal("14.20"), pa.decimal128(4, 2), -500754589),
        (datetime.date(2017, 11, 16), pa.date32(), -653330422),
        (MOMENT.replace(tzinfo=None), pa.timestamp("us"), -2047944441),
        (MOMENT.replace(microsecond=1, tzinfo=None), pa.timestamp("us"), -1207196810),
        (MOMENT, pa.timestamp("us", tz="UTC"), -2047944441),
        ("iceberg", pa.string(), 1210000089),
        (b"\x00\x01\x02\x03", pa.binary(), -188683207),
    ],
)
@pytest.mark.parametrize("bucket_count", [2, 7, 16, 4096])
def test_single_key_column_matches_published_iceberg_vectors(
    value: Any, data_type: pa.DataType, published_hash: int, bucket_count: int
) -> None:
    """Vectors of the Iceberg table spec, appendix B, "32-bit hash requirements"."""
    batch = pa.record_batch({"k": pa.array([value, value], data_type)})

    buckets = buckets_for_rows(batch, ["k"], bucket_count)

    assert buckets.tolist() == [(published_hash & 0x7FFF_FFFF) % bucket_count] * 2


def test_null_key_goes_to_bucket_zero() -> None:
    batch = pa.record_batch({"k": pa.array([None, 34], pa.int64())})

    assert buckets_for_rows(batch, ["k"], 16).tolist() == [0, (2017239379 & 0x7FFF_FFFF) % 16]


def test_composite_key_assignment_is_frozen() -> None:
    """Bucket numbers are stored for ever: a change here would lose rows of existing tables."""
    batch = pa.record_batch(
        {
            "a": pa.array([1, 1, None, -5], pa.int32()),
            "b": pa.array(["x", "y", "x", ""]),
            "c": pa.array([True, None, False, True]),
            "d": pa.array([0.5, -0.0, 0.0, float("nan")]),
        }
    )

    assert buckets_for_rows(batch, ["a", "b"], 64).tolist() == [8, 34, 38, 27]
    assert buckets_for_rows(batch, ["d"], 64).tolist() == [28, 5, 5, 38]
    assert buckets_for_rows(batch, ["a", "b", "c", "d"], 64).tolist() == [11, 31, 41, 59]


def test_split_by_bucket_keeps_every_row_and_their_order() -> None:
    rng = np.random.default_rng(7)
    batch = pa.record_batch({"k": rng.integers(0, 50, 1_000), "n": np.arange(1_000)})

    parts = split_by_bucket(batch, ["k"], 8)

    buckets = buckets_for_rows(batch, ["k"], 8)
    assert set(parts) == set(buckets.tolist())
    for bucket, part in parts.items():
        assert part.column("n").to_pylist() == np.flatnonzero(buckets == bucket).tolist()


@pytest.mark.parametrize("shift", [1, 4, 8])
@pytest.mark.parametrize(
    "column",
    [
        pa.array([Decimal(n) for n in range(100)], pa.decimal128(38, 0)),
        pa.array([None, *range(99)], pa.int64()),
        pa.array(range(100), pa.date32()),
        pa.array([f"{n}" for n in range(100)]),
    ],
    ids=["decimal", "integer", "date", "text"],
)
def test_rows_have_their_bucket_wherever_they_lie_in_memory(column: pa.Array, shift: int) -> None:
    buffers = []
    for buffer in column.buffers():
        moved = None
        if buffer is not None:
            room = pa.allocate_buffer(buffer.size + shift)
            np.frombuffer(room, dtype=np.uint8)[shift:] = np.frombuffer(buffer, dtype=np.uint8)
            moved = room.slice(shift)
        buffers.append(moved)
    shifted = pa.Array.from_buffers(column.type, len(column), buffers)

    for first in (0, 3):
        found = buckets_for_rows(pa.record_batch({"k": shifted.slice(first)}), ["k"], 7)
        assert (
            found.tolist()
            == buckets_for_rows(pa.record_batch({"k": column.slice(first)}), ["k"], 7).tolist()
        )


def test_split_by_bucket_of_no_rows_is_empty() -> None:
    assert split_by_bucket(pa.record_batch({"k": pa.array([], pa.int64())}), ["k"], 4) == {}


def test_split_evenly_cuts_large_batches_and_leaves_small_ones_whole() -> None:
    batch = pa.record_batch({"n": np.arange(100)})

    whole = split_evenly(batch, 4, first_bucket=3, rows_min=60)
    cut = split_evenly(batch, 4, first_bucket=3, rows_min=25)

    assert {b: p.num_rows for b, p in whole.items()} == {3: 100}
    # A copy would be written as a message once more.
    assert whole[3] is batch
    assert list(cut) == [3, 0, 1, 2]
    assert [n for p in cut.values() for n in p.column("n").to_pylist()] == list(range(100))


@pytest.mark.parametrize(
    ("values", "data_type"),
    [
        ([-128, -1, 0, 1, 127], pa.int8()),
        ([-(2**31), -1, 0, 1, 2**31 - 1], pa.int32()),
        ([-(2**63), -1, 0, 1, 2**63 - 1], pa.int64()),
        ([float("-inf"), -1.5, 0.0, 1e-300, 2.5, float("inf"), float("nan")], pa.float64()),
        ([False, True], pa.bool_()),
        (
            [Decimal("-99.99"), Decimal("-0.01"), Decimal("0.00"), Decimal("99.99")],
            pa.decimal128(4, 2),
        ),
        (["", "a", "a\x00", "a\x00b", "a\x01", "b", "é", "😀"], pa.string()),
        ([b"", b"\x00", b"\x00\x00", b"\x00\xff", b"\x01", b"\xff"], pa.binary()),
        (
            [datetime.date(1900, 1, 1), datetime.date(1970, 1, 1), datetime.date(2100, 1, 1)],
            pa.date32(),
        ),
    ],
)
def test_encoded_keys_sort_as_their_values(values: list[Any], data_type: pa.DataType) -> None:
    ascending = pa.array([None, *values], data_type)

    encoded = encode_key([ascending]).to_pylist()

    assert encoded == sorted(encoded)
    assert len(set(encoded)) == len(encoded)


def test_encoding_ignores_where_a_slice_lies_in_its_buffers() -> None:
    column = pa.array([None, 5, 6, None, 7], pa.int64())

    assert encode_key([column.slice(2, 3)]).to_pylist() == encode_key([column]).to_pylist()[2:]
