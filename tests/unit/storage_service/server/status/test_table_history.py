"""A table's samples against a plain list of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.storage_service.server.status._table_history import (
    SAMPLES_MAX,
    SPARK_SAMPLES,
    TableHistory,
)

Sample = tuple[int, int, int, list[int]]


@st.composite
def _samples(draw: st.DrawFn) -> tuple[int, list[Sample]]:
    buckets = draw(st.integers(1, 3))
    at_us = written = read = 0
    samples: list[Sample] = []
    for _ in range(draw(st.sampled_from([0, 1, 2, 5, 6, 11, SAMPLES_MAX + 7]))):
        at_us += draw(st.integers(1_000, 10_000_000))
        written += draw(st.integers(0, 1 << 40))
        read += draw(st.integers(0, 1 << 40))
        lags = draw(st.lists(st.integers(0, 1 << 40), min_size=buckets, max_size=buckets))
        samples.append((at_us, written, read, lags))
    return buckets, samples


def _rate(before: Sample, after: Sample, column: int) -> float:
    return (after[column] - before[column]) / (after[0] - before[0]) * 1e6  # type: ignore[operator]


@given(_samples())
def test_a_history_says_what_a_list_of_samples_does(given: tuple[int, list[Sample]]) -> None:
    buckets, samples = given
    history = TableHistory(buckets)
    for at_us, written, read, lags in samples:
        history.add(at_us=at_us, written_rows=written, read_rows=read, lag_ms=lags)
    kept = samples[-SAMPLES_MAX:]
    pairs = list(itertools.pairwise(kept))

    assert len(history) == len(kept)
    assert history.lags_ms() == [lags for _, _, _, lags in kept]
    assert list(history.last_lags_ms) == (kept[-1][3] if kept else [])
    assert history.last_rows == (kept[-1][1:3] if kept else None)
    assert history.written_per_s() == pytest.approx([_rate(a, b, 1) for a, b in pairs])
    assert history.read_per_s() == pytest.approx([_rate(a, b, 2) for a, b in pairs])
    last = (_rate(*pairs[-1], 1), _rate(*pairs[-1], 2)) if pairs else (0.0, 0.0)
    assert history.last_per_s() == pytest.approx(last)


@given(_samples())
def test_a_short_history_has_the_rows_of_half_minutes(given: tuple[int, list[Sample]]) -> None:
    buckets, samples = given
    history = TableHistory(buckets)
    for at_us, written, read, lags in samples:
        history.add(at_us=at_us, written_rows=written, read_rows=read, lag_ms=lags)
    kept = samples[-SAMPLES_MAX:]

    short = history.written_per_s_short()

    if not kept or kept[0][1] == kept[-1][1]:
        assert short == []
    elif len(kept) <= SPARK_SAMPLES:
        assert short == pytest.approx([_rate(kept[0], kept[-1], 1)])
    else:
        ends = kept[::-1][::SPARK_SAMPLES][::-1]
        wanted = [_rate(a, b, 1) for a, b in itertools.pairwise(ends)]
        assert short == pytest.approx(wanted)
