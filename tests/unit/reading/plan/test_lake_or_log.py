"""Which offsets a read wants, and which tier each comes from."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.errors import (
    BucketNotFoundError,
    InvalidRequestError,
    OffsetOutOfRangeError,
)
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.values.positions import (
    EARLIEST,
    LATEST,
    StartingPosition,
    parse_starting_offsets,
)
from streamhouse.reading.plan._lake_or_log import (
    Readable,
    cut_by_tier,
    narrowed,
    refuse_loss,
    requested_ranges,
    resolve_starts,
)

TIERED = Readable(lake_end=100, log_start=60, end=150)
LOG_ONLY = Readable(lake_end=0, log_start=60, end=150)


def one(start: int, end: int) -> dict[int, OffsetRange]:
    return {0: OffsetRange(bucket=0, start=start, end=end)}


def starts(text: str, has: Readable) -> int:
    position = parse_starting_offsets(text, name="option 'startingOffsets'")
    return resolve_starts(position, {0: has}, table="db.t")[0]


@pytest.mark.parametrize(
    ("text", "tiered", "log_only"),
    [("full", 0, 60), ("earliest", 0, 60), ("latest", 150, 150), ('{"0": 77}', 77, 77)],
)
def test_where_a_read_starts(text: str, tiered: int, log_only: int) -> None:
    assert starts(text, TIERED) == tiered
    assert starts(text, LOG_ONLY) == log_only


def test_a_bucket_that_is_not_named_starts_at_its_oldest_row() -> None:
    position = StartingPosition(kind="offsets", offsets={1: LATEST, 2: EARLIEST})
    buckets = {0: LOG_ONLY, 1: LOG_ONLY, 2: LOG_ONLY}

    assert resolve_starts(position, buckets, table="t") == {0: 60, 1: 150, 2: 60}


def test_an_offset_above_the_end_names_the_valid_range() -> None:
    with pytest.raises(OffsetOutOfRangeError, match=r"offset 151, but the valid range is \[60, 15"):
        starts('{"0": 151}', LOG_ONLY)
    with pytest.raises(OffsetOutOfRangeError, match="'endingOffsets' asks for offset 151"):
        requested_ranges({0: 60}, {0: 151}, {0: LOG_ONLY}, table="t")


def test_a_bucket_that_does_not_exist() -> None:
    with pytest.raises(BucketNotFoundError, match="has no bucket 3; its buckets are 0 to 0"):
        starts('{"3": 1}', LOG_ONLY)
    with pytest.raises(BucketNotFoundError, match="has no bucket 3"):
        requested_ranges({0: 60}, {3: 1}, {0: LOG_ONLY}, table="t")


def test_a_read_that_ends_before_it_starts() -> None:
    with pytest.raises(InvalidRequestError, match="ends at offset 70, before it starts at 80"):
        requested_ranges({0: 80}, {0: 70}, {0: LOG_ONLY}, table="t")


def test_a_range_is_cut_at_the_tiered_offset() -> None:
    tiers = cut_by_tier(one(10, 140), {0: TIERED})

    assert tiers.lake == one(10, 100)
    assert tiers.log == one(100, 140)
    assert tiers.lost == []


def test_rows_in_neither_tier_are_lost_by_name() -> None:
    tiers = cut_by_tier(one(10, 70), {0: LOG_ONLY})

    assert (tiers.lake, tiers.log) == ({}, one(60, 70))
    with pytest.raises(OffsetOutOfRangeError) as caught:
        refuse_loss(tiers.lost, {0: LOG_ONLY}, table="db.t", fail_on_data_loss=True)
    assert caught.value.message == (
        "table 'db.t', bucket 0: rows [10, 60) are gone from the log and are not in the lake;"
        " readable are [60, 150); set failOnDataLoss=false to skip them"
    )


def test_loss_that_is_allowed_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    tiers = cut_by_tier(one(10, 70), {0: LOG_ONLY})

    with caplog.at_level(logging.WARNING):
        refuse_loss(tiers.lost, {0: LOG_ONLY}, table="db.t", fail_on_data_loss=False)

    assert "bucket 0: rows [10, 60) are gone" in caplog.text


def test_a_hole_between_the_tiers_is_a_loss_too() -> None:
    """A table whose lake was switched off for a while."""
    has = Readable(lake_end=20, log_start=60, end=150)

    tiers = cut_by_tier(one(0, 150), {0: has})

    assert (tiers.lake, tiers.log) == (one(0, 20), one(60, 150))
    assert list(tiers.lost) == [OffsetRange(bucket=0, start=20, end=60)]


@given(
    st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_every_offset_is_in_exactly_one_place(
    span: list[int], lake_end: int, log_start: int
) -> None:
    has = Readable(lake_end=lake_end, log_start=log_start, end=30)
    start, end = span

    tiers = cut_by_tier(one(start, end), {0: has})

    places = [*tiers.lake.values(), *tiers.lost, *tiers.log.values()]
    assert [o for p in places for o in range(p.start, p.end)] == list(range(start, end))
    assert all(p.end <= lake_end for p in tiers.lake.values())
    assert all(p.start >= max(lake_end, log_start) for p in tiers.log.values())
    assert all(p.row_count for p in places)


def test_times_narrow_the_log_and_drop_what_becomes_empty() -> None:
    ranges = one(60, 150) | {1: OffsetRange(bucket=1, start=0, end=10)}

    assert narrowed(ranges, starts={0: 70, 1: 10}, ends={0: 90}) == one(70, 90)
    assert narrowed(ranges, starts=None, ends=None) == ranges
