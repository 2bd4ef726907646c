"""Positions in checkpoints, and how a micro-batch's rows are spread over the buckets."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.errors import (
    InvalidRequestError,
    OffsetOutOfRangeError,
    TableNotFoundError,
)
from streamhouse.reading.follow.stream_position import StreamPosition, advance


def test_a_position_survives_its_json() -> None:
    position = StreamPosition(table_id=7, offsets={1: 9, 0: 12})

    text = json.dumps(position.to_json())

    assert text == '{"version": 1, "table_id": 7, "offsets": {"0": 12, "1": 9}}'
    assert StreamPosition.from_json(json.loads(text), table="t", table_id=7) == position


def test_a_table_created_again_is_detected() -> None:
    value = StreamPosition(table_id=7, offsets={0: 1}).to_json()

    with pytest.raises(TableNotFoundError, match=r"'db.t' was dropped and created again.*7, now 8"):
        StreamPosition.from_json(value, table="db.t", table_id=8)


@pytest.mark.parametrize("value", [{}, [], None, {"version": 1, "table_id": "x", "offsets": {}}])
def test_something_else_in_the_checkpoint(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="is not a Streamhouse position"):
        StreamPosition.from_json(value, table="t", table_id=1)


def test_a_position_of_another_version() -> None:
    with pytest.raises(InvalidRequestError, match="version 3"):
        StreamPosition.from_json({"version": 3}, table="t", table_id=1)


def test_a_service_with_older_data_is_noticed() -> None:
    position = StreamPosition(table_id=1, offsets={0: 5, 1: 9})

    position.check_not_beyond({0: 5, 1: 10}, table="t")
    with pytest.raises(OffsetOutOfRangeError, match="bucket 1: the stream has read up to offset 9"):
        position.check_not_beyond({0: 5, 1: 8}, table="t")


def test_without_a_limit_everything_is_read() -> None:
    assert advance({0: 1, 1: 5}, {0: 9, 1: 5}, rows_max=None) == {0: 9, 1: 5}


def test_a_small_backlog_does_not_wait_for_a_large_one() -> None:
    assert advance({0: 0, 1: 0}, {0: 10**9, 1: 10}, rows_max=100) == {0: 90, 1: 10}


def test_with_fewer_rows_than_buckets_every_bucket_gets_its_turn() -> None:
    position = dict.fromkeys(range(5), 0)
    for _ in range(10):
        position = advance(position, dict.fromkeys(range(5), 100), rows_max=2)

    assert set(position.values()) == {4}


@given(
    st.dictionaries(
        st.integers(0, 8), st.tuples(st.integers(0, 50), st.integers(0, 200)), min_size=1
    ),
    st.one_of(st.none(), st.integers(1, 500)),
)
def test_advancing_is_bounded_never_goes_back_and_leaves_no_row_unused(
    buckets: dict[int, tuple[int, int]], rows_max: int | None
) -> None:
    start = {b: offset for b, (offset, _) in buckets.items()}
    available = {b: offset + more for b, (offset, more) in buckets.items()}

    end = advance(start, available, rows_max=rows_max)

    waiting = sum(available.values()) - sum(start.values())
    granted = {b: end[b] - start[b] for b in start}
    assert all(start[b] <= end[b] <= available[b] for b in start)
    assert sum(granted.values()) == (waiting if rows_max is None else min(waiting, rows_max))
    # Nobody gets two rows more than another that could have had them.
    hungry = [granted[b] for b in start if end[b] < available[b]]
    assert not hungry or max(granted.values()) - min(hungry) <= 1


def test_a_position_elsewhere_is_one_here_as_far_as_its_rows_came_along() -> None:
    value = StreamPosition(table_id=3, offsets={0: 5, 1: 9}).to_json()

    here = StreamPosition.from_json(
        value, table="t", table_id=8, adopted_from={3: {0: 5, 1: 10}, 7: {0: 0, 1: 0}}
    )
    assert here == StreamPosition(table_id=8, offsets={0: 5, 1: 9})
    with pytest.raises(OffsetOutOfRangeError, match="bucket 1: the stream has read up to offset 9"):
        StreamPosition.from_json(value, table="t", table_id=8, adopted_from={3: {0: 5, 1: 8}})
    with pytest.raises(TableNotFoundError):
        StreamPosition.from_json(value, table="t", table_id=8, adopted_from={4: {0: 5, 1: 9}})


def test_a_position_names_its_table_and_is_refused_by_another() -> None:
    position = StreamPosition(table_id=7, offsets={0: 1}, table="db.t", consumer="spark-1")
    value = json.loads(json.dumps(position.to_json()))
    assert StreamPosition.from_json(value, table="db.t", table_id=7) == position

    message = r"is of table 'db\.t', and this stream reads 'db\.u': start it with the checkpoint of"
    with pytest.raises(InvalidRequestError, match=message):
        StreamPosition.from_json(value, table="db.u", table_id=7)
