"""What a round takes, and how it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.errors import CorruptDataError, OffsetOutOfRangeError
from streamhouse.core.model.offsets import BucketPositions
from streamhouse.reading.tail.round_planner import PlanLimits, RoundPlan, plan_copy, plan_round


def _plan(
    covered: dict[int, int],
    ends: dict[int, int],
    starts: dict[int, int] | None = None,
    **limits: int,
) -> RoundPlan:
    positions = {
        bucket: BucketPositions(
            log_start_offset=(starts or {}).get(bucket, 0), high_watermark=end, tiered_offset=0
        )
        for bucket, end in ends.items()
    }
    return plan_round(
        table="db.t", covered=covered, positions=positions, limits=PlanLimits(**limits)
    )


def test_a_small_table_is_one_split_per_bucket_that_has_rows() -> None:
    plan = _plan({0: 5, 1: 7}, {0: 9, 1: 7, 2: 3})

    assert [(s.bucket, s.start, s.end) for s in plan.splits] == [(0, 5, 9), (2, 0, 3)]
    assert plan.base_offsets == {0: 5, 1: 7, 2: 0}
    assert plan.target_offsets == {0: 9, 1: 7, 2: 3}


def test_a_large_bucket_is_cut_to_keep_all_tasks_busy() -> None:
    plan = _plan({}, {0: 1_000}, parallelism=4, split_rows_min=100)

    assert [s.row_count for s in plan.splits] == [250, 250, 250, 250]


def test_cutting_stops_at_the_smallest_split() -> None:
    plan = _plan({}, {0: 1_000}, parallelism=100, split_rows_min=400)

    assert sorted(s.row_count for s in plan.splits) == [333, 333, 334]


def test_a_limit_is_shared_and_small_buckets_leave_their_share_to_others() -> None:
    plan = _plan({}, {0: 1_000, 1: 10, 2: 1_000}, rows_max=110)

    assert plan.target_offsets == {0: 50, 1: 10, 2: 50}


def test_a_limit_below_the_number_of_buckets_still_moves_rows() -> None:
    plan = _plan({}, dict.fromkeys(range(8), 10), rows_max=3)

    assert plan.row_count == 3


def test_rows_that_left_the_log_untiered_are_an_error_that_names_them() -> None:
    with pytest.raises(OffsetOutOfRangeError, match=r"bucket 1: offsets 4 to 6 are neither"):
        _plan({1: 4}, {1: 9}, starts={1: 7})


def test_a_lake_ahead_of_the_log_is_an_error() -> None:
    with pytest.raises(CorruptDataError, match="bucket 0: the lake table covers offsets up to 9"):
        _plan({0: 9}, {0: 4})


_BUCKETS = st.dictionaries(
    st.integers(0, 9), st.tuples(st.integers(0, 500), st.integers(0, 2_000)), min_size=1
)


@given(
    buckets=_BUCKETS,
    rows_max=st.integers(1, 3_000),
    parallelism=st.integers(1, 9),
    split_rows_min=st.integers(1, 700),
)
def test_splits_cover_exactly_the_rows_from_base_to_target(
    buckets: dict[int, tuple[int, int]], rows_max: int, parallelism: int, split_rows_min: int
) -> None:
    covered = {bucket: start for bucket, (start, _) in buckets.items()}
    ends = {bucket: start + lag for bucket, (start, lag) in buckets.items()}

    plan = _plan(
        covered, ends, rows_max=rows_max, parallelism=parallelism, split_rows_min=split_rows_min
    )

    assert plan.row_count == min(rows_max, sum(lag for _, lag in buckets.values()))
    for bucket, base in covered.items():
        pieces = sorted((s.start, s.end) for s in plan.splits if s.bucket == bucket)
        assert all(start < end for start, end in pieces)
        bounds = [base, *(end for _, end in pieces)]
        assert [start for start, _ in pieces] == bounds[:-1]
        assert bounds[-1] == plan.target_offsets[bucket] <= ends[bucket]
    sizes = [s.row_count for s in plan.splits]
    assert sizes == sorted(sizes, reverse=True)


@given(buckets=_BUCKETS, rows_max=st.integers(1, 3_000))
def test_no_bucket_is_given_more_while_another_waits_with_less(
    buckets: dict[int, tuple[int, int]], rows_max: int
) -> None:
    ends = {bucket: lag for bucket, (_, lag) in buckets.items()}

    plan = _plan({}, ends, rows_max=rows_max)

    unfinished = [plan.target_offsets[b] for b in ends if plan.target_offsets[b] < ends[b]]
    if unfinished:
        assert max(plan.target_offsets.values()) <= min(unfinished) + 1


def test_a_copy_ends_where_the_log_begins() -> None:
    positions = {
        bucket: BucketPositions(
            log_start_offset=start, high_watermark=50, tiered_offset=40, truncated_offset=gone
        )
        for bucket, (start, gone) in enumerate([(30, 0), (20, 0), (0, 0), (25, 5), (9, 9)])
    }

    plan = plan_copy(covered={0: 10, 1: 25}, positions=positions, limits=PlanLimits())

    assert sorted((s.bucket, s.start, s.end) for s in plan.splits) == [(0, 10, 30), (3, 5, 25)]
    assert plan.base_offsets == {0: 10, 1: 25, 2: 0, 3: 0, 4: 0}
    # Overwritten rows are nowhere any more: what covers none of them covers them too.
    assert plan.target_offsets == {0: 30, 1: 25, 2: 0, 3: 25, 4: 9}
    assert plan.truncated_offsets == {3: 5, 4: 9}
    few = plan_copy(covered={0: 10}, positions=positions, limits=PlanLimits(rows_max=12))
    assert few.target_offsets == {0: 14, 1: 4, 2: 0, 3: 9, 4: 9}
