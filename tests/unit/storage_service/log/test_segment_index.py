"""The sparse index finds a frame at or before what is asked, in memory and from its file."""

from __future__ import annotations

import pytest

from streamhouse.storage_service.log.segments.segment_format import LogIdentity, MalformedError
from streamhouse.storage_service.log.segments.segment_index import (
    FrameStart,
    GrowingIndex,
    SparseIndex,
    decode_index,
    encode_index,
    read_index_header,
)

_IDENTITY = LogIdentity(1, 0)


def _index() -> GrowingIndex:
    """Frames of 10 rows and 100 bytes, an entry each 250 bytes; a new timestamp each 4 frames."""
    index = GrowingIndex(interval_bytes=250)
    for n in range(20):
        index.add(offset=n * 10, position=64 + n * 100, timestamp_us=n // 4 * 1000)
    return index


def _file(index: GrowingIndex) -> bytes:
    return b"".join(
        encode_index(
            index,
            identity=_IDENTITY,
            base_offset=0,
            end_offset=200,
            segment_bytes=2064,
            last_timestamp_us=4000,
        )
    )


def _decode(contents: bytes) -> SparseIndex:
    header = read_index_header(contents, identity=_IDENTITY, base_offset=0)
    return decode_index(memoryview(contents), header=header, check=True)


@pytest.fixture(params=["growing", "file"])
def index(request: pytest.FixtureRequest) -> SparseIndex:
    return _index() if request.param == "growing" else _decode(_file(_index()))


def test_entries_are_sparse_and_the_first_frame_has_one(index: SparseIndex) -> None:
    assert list(index.offsets) == [0, 30, 60, 90, 120, 150, 180]
    assert list(index.positions) == [64 + offset * 10 for offset in index.offsets]


@pytest.mark.parametrize(
    ("offset", "found"), [(0, 0), (29, 0), (30, 30), (31, 30), (179, 150), (180, 180), (199, 180)]
)
def test_lookup_by_offset(index: SparseIndex, offset: int, found: int) -> None:
    assert index.at_or_before_offset(offset) == FrameStart(found, 64 + found * 10)


@pytest.mark.parametrize(
    ("timestamp_us", "frame_at_most"),
    [(-5, 0), (0, 0), (1, 40), (1000, 40), (1001, 80), (9000, 190)],
)
def test_lookup_by_timestamp_starts_no_later_than_the_first_match(
    index: SparseIndex, timestamp_us: int, frame_at_most: int
) -> None:
    start = index.before_timestamp(timestamp_us)

    assert start.offset <= frame_at_most
    assert frame_at_most - start.offset <= 40


def test_a_damaged_index_is_noticed() -> None:
    contents = _file(_index())

    for position in range(0, len(contents), 7):
        damaged = bytearray(contents)
        damaged[position] ^= 0x10
        with pytest.raises(MalformedError):
            _decode(bytes(damaged))
    with pytest.raises(MalformedError):
        _decode(contents[:-8])


def test_an_index_of_another_segment_is_refused() -> None:
    with pytest.raises(MalformedError, match="for segment 10"):
        read_index_header(_file(_index()), identity=_IDENTITY, base_offset=10)


def test_a_million_one_row_frames_cost_little_memory() -> None:
    index = GrowingIndex(interval_bytes=4096)
    for n in range(1_000_000):
        index.add(offset=n, position=64 + n * 264, timestamp_us=n)

    assert sum(len(column) for column in index.columns()) < 2 * 1024 * 1024
