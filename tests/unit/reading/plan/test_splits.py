"""Splits: similar in size, cut where nothing is read twice."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.model.offsets import OffsetRange
from streamhouse.reading.plan._splits import (
    FILE_OPEN_BYTES,
    LOG_ROW_BYTES,
    SPLIT_BYTES_MIN,
    SplitSizes,
    lake_pieces,
    log_pieces,
    pack,
    total_weight,
)
from streamhouse.reading.scan.scan import LakeFile, LakePiece, LogPiece, Piece

MB = 1 << 20
SIZES = SplitSizes(max_split_bytes=128 * MB, min_partitions=4)


def lake_file(
    size: int, *, start: int | None = 0, end: int | None = 100, **more: object
) -> LakeFile:
    values: dict[str, object] = {
        "path": "file:/f",
        "file_bytes": size,
        "row_count": 100,
        "bucket": 0,
        "offset_start": start,
        "offset_end": end,
        "timestamp_min_us": 10,
        "timestamp_max_us": 20,
    }
    return LakeFile(**(values | more))  # type: ignore[arg-type]


def piece(size: int, *, groups: int = 1, path: str = "file:/f") -> LakePiece:
    starts = tuple(4 + size * g // groups for g in range(groups))
    return LakePiece(
        path=path,
        file_bytes=size,
        start_byte=0,
        end_byte=size,
        row_count=1_000,
        row_group_starts=starts,
    )


def whole(start: int, end: int) -> dict[int, OffsetRange]:
    return {0: OffsetRange(bucket=0, start=start, end=end)}


def only(file: LakeFile, ranges: dict[int, OffsetRange] | None, **times: int) -> LakePiece:
    bounds = {"from_timestamp_us": None, "to_timestamp_us": None} | times
    (found,) = lake_pieces([file], ranges, **bounds)
    return found


def test_a_file_inside_its_range_needs_no_check() -> None:
    assert only(lake_file(10), whole(0, 100)).ranges is None
    assert only(lake_file(10), None).ranges is None


def test_a_file_across_a_border_is_checked_for_that_range_only() -> None:
    wanted = whole(0, 99) | {1: OffsetRange(bucket=1, start=0, end=5)}

    assert only(lake_file(10), wanted).ranges == (wanted[0],)


@pytest.mark.parametrize("unknown", [{"bucket": None}, {"start": None}, {"end": None}])
def test_a_file_without_bounds_is_checked_for_everything(unknown: dict[str, None]) -> None:
    wanted = whole(0, 100) | {1: OffsetRange(bucket=1, start=0, end=5)}

    assert only(lake_file(10, **unknown), wanted).ranges == tuple(wanted.values())


def test_a_file_outside_its_range_is_left_out() -> None:
    assert (
        lake_pieces([lake_file(10)], whole(100, 200), from_timestamp_us=None, to_timestamp_us=None)
        == []
    )


@pytest.mark.parametrize(
    ("bounds", "is_checked"),
    [
        ({"from_timestamp_us": 10}, False),
        ({"from_timestamp_us": 11}, True),
        ({"to_timestamp_us": 21}, False),
        ({"to_timestamp_us": 20}, True),
    ],
)
def test_times_are_checked_only_where_the_file_straddles_them(
    bounds: dict[str, int], is_checked: bool
) -> None:
    assert only(lake_file(10), None, **bounds).check_timestamp is is_checked


def test_little_data_is_one_split() -> None:
    pieces: list[Piece] = [
        *(piece(100_000, path=f"file:/{i}") for i in range(3)),
        *log_pieces({b: OffsetRange(bucket=b, start=0, end=500) for b in range(4)}),
    ]

    (split,) = pack(pieces, SIZES)

    assert list(split.pieces) == pieces


def test_nothing_is_no_split() -> None:
    assert pack([], SIZES) == []


def test_much_data_is_spread_evenly() -> None:
    pieces = [piece(40 * MB, groups=10, path=f"file:/{i}") for i in range(5)]

    splits = pack(pieces, SIZES)

    weights = [total_weight(split.pieces) for split in splits]
    assert len(splits) >= 4
    assert max(weights) < 1.5 * min(weights)
    assert max(weights) <= SIZES.max_split_bytes


def test_a_log_range_is_cut_into_neighbouring_parts() -> None:
    rows = 8 * SPLIT_BYTES_MIN // LOG_ROW_BYTES

    splits = pack([LogPiece(bucket=3, start=7, end=7 + rows)], SIZES)

    parts = sorted((p.start, p.end) for s in splits for p in s.pieces if isinstance(p, LogPiece))
    assert len(splits) == 4
    assert parts[0][0] == 7
    assert parts[-1][1] == 7 + rows
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))


def test_a_file_of_one_row_group_is_never_cut() -> None:
    splits = pack([piece(500 * MB)], SIZES)

    assert [split.pieces for split in splits] == [(piece(500 * MB),)]


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(1, 16),
    st.integers(4, 128),
)
def test_every_row_group_is_in_exactly_one_split(
    files: list[tuple[int, int]], min_partitions: int, max_mb: int
) -> None:
    pieces = [
        piece(size * MB, groups=groups, path=f"file:/{i}") for i, (size, groups) in enumerate(files)
    ]
    sizes = SplitSizes(max_split_bytes=max_mb * MB, min_partitions=min_partitions)

    splits = pack(pieces, sizes)

    read: Counter[tuple[str, int]] = Counter()
    for part in (p for split in splits for p in split.pieces):
        assert isinstance(part, LakePiece)
        original = pieces[int(part.path.rpartition("/")[2])]
        for start in original.row_group_starts:
            read[part.path, start] += part.start_byte <= start < part.end_byte
    assert set(read.values()) == {1}
    assert splits == pack(pieces, sizes)
    assert total_weight(p for s in splits for p in s.pieces) >= total_weight(pieces)
    assert FILE_OPEN_BYTES > 0


def test_splits_are_small_plain_data() -> None:
    (split,) = pack([piece(1_000, path="file:/" + "x" * 100)], SIZES)

    assert pickle.loads(pickle.dumps(split)) == split
    assert len(pickle.dumps(split)) < 700
