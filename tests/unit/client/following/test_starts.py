"""Where subscriptions begin: one start for all tables, or one of each."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.client.following._starts import Starts, offsets_of, starts_of
from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.offsets import BucketPositions
from streamhouse.reading.options.options import as_options, read_options

POSITIONS = {
    0: BucketPositions(log_start_offset=5, tiered_offset=7, high_watermark=9),
    1: BucketPositions(log_start_offset=0, tiered_offset=0, high_watermark=3),
}


@pytest.mark.parametrize(
    ("path", "start", "found"),
    [
        ("t", "latest", {"default.t": "latest"}),
        ("t", {0: 4}, {"default.t": {0: 4}}),
        (["t", "db.u"], "earliest", {"default.t": "earliest", "db.u": "earliest"}),
        (["t", "db.u"], {"db.u": {0: 4}, "t": "latest"}, {"default.t": "latest", "db.u": {0: 4}}),
        (["t"], {"default.t": {"offsets": {}}}, {"default.t": {"offsets": {}}}),
        ("t", '{"0": 4}', {"default.t": {"0": 4}}),
        (
            ["t", "u"],
            '{"t": "latest", "u": {"0": 1}}',
            {"default.t": "latest", "default.u": {"0": 1}},
        ),
        (["t"], {"t": '{"0": 4}'}, {"default.t": {"0": 4}}),
    ],
)
def test_each_table_has_its_start(path: Any, start: Any, found: dict[str, Any]) -> None:
    assert starts_of(path, start) == found


@pytest.mark.parametrize(
    ("path", "start", "message"),
    [
        ([], "latest", "name 1 to 100 tables, each once, not 0"),
        (["t", "default.t"], "latest", "each once, not 2, 1 of them different"),
        ([f"t{n}" for n in range(101)], "latest", "not 101"),
        (["t", "u"], {"t": "latest"}, r"a dict with each of them once \(default.t, default.u\)"),
        (["t"], {"t": "latest", "default.t": "earliest"}, "with each of them once"),
        (["t", "u"], {0: 5, 1: 5}, "not with 0, 1"),
    ],
)
def test_a_wrong_start_of_several_is_refused(path: Any, start: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        starts_of(path, start)


@pytest.mark.parametrize(
    ("start", "committed", "found", "anew"),
    [
        ("latest", None, {0: 9, 1: 3}, [0, 1]),
        ("Earliest ", None, {0: 5, 1: 0}, [0, 1]),
        ("committed", None, {0: 5, 1: 0}, [0, 1]),
        ("committed", {0: 8}, {0: 8, 1: 0}, []),
        ({1: 2}, None, {1: 2}, []),
        ({"1": np.int64(2)}, None, {1: 2}, []),
        ({0: 6, "1": "earliest"}, None, {0: 6, 1: 0}, [1]),
        ({0: "latest", 7: "latest"}, None, {0: 9, 7: 0}, [0, 7]),
        ("2020-01-01T00:00:07Z", None, {0: 7, 1: 7}, [0, 1]),
    ],
)
def test_a_start_is_offsets(
    start: Any, committed: Any, found: dict[int, int], anew: list[int]
) -> None:
    starts = _starts(start, committed=committed)

    assert starts.offsets == found
    assert starts.fresh == {bucket: found[bucket] for bucket in anew}


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("newest", "must be full, earliest, latest, committed, a time, or bucket.*not 'newest'"),
        ("full", "StreamhouseClient does"),
        ([0, 0], r"must be full.*not \[0, 0\]"),
        ({"zero": 0}, "a bucket is a whole number from 0 on, not 'zero'"),
        ({0: "5"}, "the offset of bucket 0 is a whole number, 'earliest' or 'latest', not '5'"),
        ({0: 1.5}, "the offset of bucket 0"),
        ({0: True}, "the offset of bucket 0"),
        ({-1: 5}, "a bucket is"),
    ],
)
def test_an_unknown_start_is_refused(start: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        _starts(start)


def _starts(start: Any, *, committed: Any = None) -> Starts:
    def at_time(timestamp_us: int) -> dict[int, int]:
        return dict.fromkeys(POSITIONS, timestamp_us // 1_000_000 % 60)

    return offsets_of(start, lambda: POSITIONS, at_time=at_time, committed=committed)


@given(
    given_offsets=st.dictionaries(
        st.integers(0, 5), st.integers(0, 2**63 - 1) | st.sampled_from(["earliest", "latest"])
    )
)
def test_a_subscription_and_a_read_take_the_same_positions(
    given_offsets: dict[int, int | str],
) -> None:
    """One parser: a dict, its text and its buckets as texts say the same in both places."""
    as_text = json.dumps({str(bucket): offset for bucket, offset in given_offsets.items()})
    by_text = read_options({"table": "t", "startingOffsets": as_text}, use="batch read")
    positions = {
        b: BucketPositions(log_start_offset=b, tiered_offset=b, high_watermark=b + 1)
        for b in range(6)
    }

    for form in (given_offsets, json.loads(as_text), as_text):
        options = as_options({"startingOffsets": form})
        assert read_options({"table": "t"} | options, use="batch read").starting == by_text.starting
        (start,) = starts_of("t", form).values()
        found = offsets_of(start, lambda: positions, at_time=lambda _: {}, committed=None)
        assert found.offsets == {
            bucket: {"earliest": bucket, "latest": bucket + 1}.get(str(offset), offset)
            for bucket, offset in given_offsets.items()
        }
