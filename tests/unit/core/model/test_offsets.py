"""Offsets that know their table, and the one judge of whose an offset is."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.errors import (
    InvalidRequestError,
    OffsetOutOfRangeError,
    StreamhouseError,
    TableNotFoundError,
)
from streamhouse.core.model.offsets import (
    Offset,
    check_positions,
    offsets_in,
    table_of_offsets,
)
from streamhouse.core.model.values.positions import parse_starting_offsets


def test_an_offset_is_a_number_in_all_but_its_table() -> None:
    offset = Offset(12, 7)

    assert (offset, hash(offset), f"{offset}", repr(offset)) == (12, hash(12), "12", "12")
    assert json.dumps({"0": offset}) == '{"0": 12}'
    assert pa.array([offset], pa.int64()).to_pylist() == [12]
    assert np.array([offset]).dtype == np.int64
    assert offset + 0.5 == 12.5
    assert offset + np.int64(1) == 13
    assert type(offset - 2) is int
    assert sum([offset, offset]) == 24


@pytest.mark.parametrize(
    "same", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_a_copy_and_an_offset_further_on_are_of_the_same_table(same: object) -> None:
    assert callable(same)
    for offset in (same(Offset(12, 7)), Offset(10, 7) + 2, max(Offset(12, 7), 3)):
        assert isinstance(offset, Offset)
        assert (offset, offset.table_id) == (12, 7)


def test_offsets_of_two_tables_are_not_taken_together() -> None:
    assert table_of_offsets([1, Offset(0, 7), -1], what="w") == 7
    assert table_of_offsets([1, "latest"], what="w") is None
    with pytest.raises(InvalidRequestError, match=r"w: .* of two tables \(table ids 7, 8\)"):
        table_of_offsets([Offset(1, 7), Offset(1, 8)], what="w")


@given(
    said=st.none() | st.integers(1, 4),
    offsets=st.dictionaries(st.integers(0, 2), st.integers(0, 3), max_size=3),
    adopted=st.dictionaries(
        st.integers(1, 4), st.dictionaries(st.integers(0, 2), st.integers(0, 3))
    ),
)
def test_who_may_go_on_in_a_table(
    said: int | None, offsets: dict[int, int], adopted: dict[int, dict[int, int]]
) -> None:
    """Own offsets, those that came along when it was adopted, and those with nothing below."""
    own = 4
    ends = adopted.get(said or 0, {})
    if said == own:
        refusal: type[StreamhouseError] | None = None
    elif said is None:
        refusal = InvalidRequestError if any(offsets.values()) else None
    elif said not in adopted:
        refusal = TableNotFoundError
    else:
        is_beyond = any(offset > ends.get(bucket, 0) for bucket, offset in offsets.items())
        refusal = OffsetOutOfRangeError if is_beyond else None

    try:
        check_positions(offsets, stated_id=said, table="t", table_id=own, adopted_from=adopted)
        found: type[StreamhouseError] | None = None
    except StreamhouseError as error:
        found = type(error)
    assert found is refusal


@pytest.mark.parametrize(
    "start",
    [
        {"table_id": 7, "offsets": {"0": 12, "1": "latest"}},
        '{"table_id": 7, "offsets": {"0": 12, "1": "latest"}}',
        {0: Offset(12, 7), 1: "latest"},
        {0: Offset(12, 7), 1: -1},
        offsets_in(7, {0: 12}) | {1: -1},
    ],
)
def test_a_start_says_its_table(start: object) -> None:
    offsets = parse_starting_offsets(start, name="start").offsets

    assert offsets == {0: 12, 1: -1}
    assert table_of_offsets(offsets.values(), what="start") == 7


def test_a_start_of_plain_numbers_says_none() -> None:
    offsets = parse_starting_offsets({"0": 12}, name="start").offsets
    assert table_of_offsets(offsets.values(), what="start") is None


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ({"table_id": -1, "offsets": {}}, "table_id is a whole number, not -1"),
        ({"table_id": 7, "offsets": [12]}, r"offsets are bucket -> offset, not \[12\]"),
        ({"table_id": 7}, "a bucket is a whole number"),
        ({0: Offset(1, 7), 1: Offset(1, 8)}, "of two tables"),
    ],
)
def test_a_wrong_start_is_refused(start: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse_starting_offsets(start, name="start")
