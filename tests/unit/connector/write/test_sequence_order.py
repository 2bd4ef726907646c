"""Rows in the order of `sequence.column` pass, in whatever tasks; others are refused."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.connector.write._write_jobs import SequenceCheck, SequenceSpan, tasks_in_sequence
from streamhouse.core.errors import InvalidRequestError, SchemaMismatchError


def span_of(*batches: Sequence[Any]) -> SequenceSpan | None:
    check = SequenceCheck("at", table="db.t")
    for values in batches:
        check.take(pa.record_batch({"at": pa.array(values)}))
    return check.span


def test_rising_rows_pass_batch_after_batch() -> None:
    assert span_of([1, 2, 2], [2, 5]) == SequenceSpan(1, 5)
    assert span_of(["a"], ["b", "c"]) == SequenceSpan("a", "c")
    days = [datetime.date(2026, 1, day) for day in (1, 2, 2)]
    assert span_of(days) == SequenceSpan(days[0], days[2])
    assert span_of() is None


@pytest.mark.parametrize("batches", [([1, 3, 2],), ([1, 3], [2]), ([1.0, float("nan"), 2.0],)])
def test_a_row_out_of_order_is_refused(batches: tuple[list[Any], ...]) -> None:
    with pytest.raises(InvalidRequestError, match=r"write df\.orderBy\('at'\)"):
        span_of(*batches)


def test_a_null_has_no_place() -> None:
    with pytest.raises(SchemaMismatchError, match="'at' must not be null, but row 1 is"):
        span_of([1, None])


@given(st.lists(st.lists(st.integers(0, 30), max_size=4), max_size=5))
def test_tasks_are_put_in_an_order_in_which_all_values_rise(tasks: list[list[int]]) -> None:
    spans = [span_of(sorted(values)) if values else None for values in tasks]
    present = sorted(task for task in range(len(tasks)) if tasks[task])

    try:
        order = tasks_in_sequence(spans, column="at", table="db.t")
    except InvalidRequestError:
        by_span = sorted((sorted(tasks[task]) for task in present), key=lambda v: (v[0], v[-1]))
        flat = [value for values in by_span for value in values]
        assert flat != sorted(flat)
    else:
        flat = [value for task in order for value in sorted(tasks[task])]
        assert sorted(order) == present
        assert flat == sorted(flat)
