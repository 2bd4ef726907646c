"""How far a stream is behind, by its progress; and the line that it logs."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from streamhouse import lag
from streamhouse.core.errors import InvalidRequestError
from streamhouse.reading.follow.stream_lag import (
    LOG_LEVEL_VARIABLE,
    NEWEST_MEMBER,
    StreamLag,
    log_batch,
    show_if_wanted,
)
from streamhouse.reading.follow.stream_position import StreamPosition


def _offset(**offsets: int) -> dict[str, Any]:
    by_bucket = {int(name[1:]): offset for name, offset in offsets.items()}
    return StreamPosition(table_id=7, offsets=by_bucket, table="db.t").to_json()


def _source(end: Any, latest: Any) -> dict[str, Any]:
    return {"description": "x", "startOffset": None, "endOffset": end, "latestOffset": latest}


def test_rows_and_seconds_of_each_of_our_sources() -> None:
    behind = _source(json.dumps(_offset(b0=5, b1=9)), _offset(b0=7, b1=9) | {"lag_ms": 1_500})
    done = _source(_offset(b0=5), json.dumps(_offset(b0=5) | {"lag_ms": 30}))
    unknown = _source(_offset(b0=5), _offset(b0=6) | {"lag_ms": None})
    untold = _source(_offset(b0=5), None)
    rate = _source("17", "18")
    kafka = _source({"topic": {"0": 5}}, {"topic": {"0": 9}})
    progress = {"sources": [behind, rate, done, kafka, unknown, untold, _source(None, None)]}
    expected = [
        StreamLag("db.t", 2, 1.5),
        StreamLag("db.t", 0, 0.0),
        StreamLag("db.t", 1, None),
        StreamLag("db.t", 0, 0.0),
    ]

    assert lag(progress) == lag(json.dumps(progress)) == expected


def test_a_progress_of_spark_before_4_2_is_read_from_its_texts() -> None:
    """Its offsets are Python's texts of dictionaries, and the end has the newest end."""
    end = _offset(b0=5) | {NEWEST_MEMBER: _offset(b0=7) | {"lag_ms": 1_500}}
    progress = {"sources": [_source(str(end), "None"), _source("not an offset", None)]}

    assert lag(progress) == [StreamLag("db.t", 2, 1.5)]


def test_before_the_first_progress_there_is_nothing() -> None:
    assert lag(None) == []


@pytest.mark.parametrize("progress", [5, {}, "no json", object()])
def test_what_is_no_progress_is_refused(progress: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"lag takes query\.lastProgress"):
        lag(progress)


def test_a_micro_batch_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="streamhouse.stream")

    log_batch("db.t", {0: 5, 1: 9}, {0: 12, 1: 9}, latest={0: 20, 1: 9}, lag_ms=40)

    assert caplog.messages == [
        "event=micro_batch table=db.t offsets=0:5-12 rows=7 lag_rows=8 lag_ms=40"
    ]


def test_many_buckets_are_cut_short(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="streamhouse.stream")
    start, end = dict.fromkeys(range(20), 0), dict.fromkeys(range(20), 1)

    log_batch("db.t", start, end, latest={**end, 0: 2}, lag_ms=None)

    assert ",15:0-1,+4 rows=20 lag_rows=1 lag_ms=unknown" in caplog.messages[0]


@pytest.mark.parametrize("lag_ms", [16_164, None])
def test_a_micro_batch_that_read_all_rows_has_no_lag(
    caplog: pytest.LogCaptureFixture, lag_ms: int | None
) -> None:
    caplog.set_level(logging.INFO, logger="streamhouse.stream")

    log_batch("db.t", {0: 5}, {0: 6}, latest={0: 6}, lag_ms=lag_ms)

    assert caplog.messages[0].endswith("rows=1 lag_rows=0 lag_ms=0")


def test_the_environment_shows_the_line_where_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.Logger("streamhouse.stream")  # noqa: LOG001 - it must have no parent
    show_if_wanted(logger)
    monkeypatch.setenv(LOG_LEVEL_VARIABLE, "info")
    for _ in range(2):
        show_if_wanted(logger)
    logger.debug("too much")
    logger.info("a micro-batch")

    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("INFO streamhouse.stream a micro-batch")
