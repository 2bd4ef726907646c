"""Options of changes in Spark's form: what they mean, and the sentences that refuse them."""

from __future__ import annotations

import pytest

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.values.positions import moment_of_version, moment_us
from streamhouse.reading.options._change_options import time_bounds
from streamhouse.reading.options.options import BATCH, STREAM, read_options


def _times(**options: str) -> tuple[int | None, int | None]:
    read = read_options({"table": "d.t$changes", **options}, use=BATCH)
    return read.from_timestamp_us, read.to_timestamp_us


def test_bounds_are_inclusive_unless_told_otherwise() -> None:
    first, last = 10**15, 10**15 + 4
    versions = {"startingversion": str(first), "endingversion": str(last)}
    assert _times(**versions) == (first, last + 1)
    exclusive = {"startingboundinclusive": "false", "endingboundinclusive": "false"}
    assert _times(**versions, **exclusive) == (first + 1, last)
    times = {"startingtimestamp": "2001-09-09 01:46:41", "endingtimestamp": "2001-09-09 01:46:42"}
    assert _times(**times) == (1_000_000_001_000_000, 1_000_000_002_000_001)
    assert _times(startingversion="0") == (0, None)


@pytest.mark.parametrize(
    ("table", "options", "sentence"),
    [
        ("d.t", {"startingversion": "1"}, r"load 'd\.t\$changes', or set option 'changeFormat'"),
        ("d.t$changelog", {"computeupdates": "true"}, r"load 'd\.t\$changes'"),
        ("d.t$changes", {"changeformat": "streamhouse"}, r"load 'd\.t\$changelog' for ours"),
        ("d.t$changes", {"changeformat": "delta"}, "'spark' or 'streamhouse', not 'delta'"),
        ("d.t$changes", {"deduplicationmode": "all"}, "none, dropCarryovers or netChanges"),
        ("d.t$changes", {"startingversion": "x"}, "'startingVersion' = 'x'"),
        ("d.t$changes", {"startingversion": "9", "endingversion": "8"}, "end at version 8, before"),
        (
            "d.t$changes",
            {"startingversion": "9", "endingtimestamp": "2026-01-01"},
            "by versions or by times, not by both",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(
    table: str, options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(InvalidRequestError, match=sentence):
        read_options({"table": table, **options}, use=BATCH)


def test_a_stream_has_no_end() -> None:
    with pytest.raises(InvalidRequestError, match="'endingVersion' has no meaning for a stream"):
        read_options({"table": "d.t$changes", "endingversion": "1"}, use=STREAM)


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        # Any number is a version, also below and above the times that a caller may state.
        ({"startingversion": "0"}, (0, None)),
        ({"startingversion": "1"}, (0, None)),
        ({"startingversion": "1", "endingversion": "5"}, (0, 0)),
        ({"endingversion": str(10**17)}, (None, moment_us(moment_of_version(2**63), name=""))),
        ({"startingversion": str(10**15), "startingboundinclusive": "false"}, (10**15 + 1, None)),
    ],
)
def test_a_version_is_bounded_by_the_times_that_rows_can_have(
    given: dict[str, str], bounds: tuple[int | None, int | None]
) -> None:
    assert time_bounds(given, None, None) == bounds
