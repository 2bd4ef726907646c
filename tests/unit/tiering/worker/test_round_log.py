"""What a worker says of itself: little, and often enough."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from streamhouse.client import TieringIdle
from streamhouse.tiering.round._round import RoundResult
from streamhouse.tiering.worker._round_log import IdleLog, RoundLog


class _Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _round(table: str, *, rows: int) -> RoundResult:
    return RoundResult(
        table=table,
        kind="tiered",
        snapshot_id=1,
        tiered_offsets={},
        row_count=rows,
        size_bytes=10,
        seconds=0.5,
    )


def test_rounds_are_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = _Clock()
    log = RoundLog(clock)

    with caplog.at_level(logging.INFO):
        log.add(_round("default.a", rows=1))
        for _ in range(59):
            clock.now_s += 1
            log.add(_round("default.a", rows=2))
            log.tick()
        assert len(caplog.messages) == 1
        log.add(_round("default.b", rows=3))
        clock.now_s += 1
        log.tick()
        log.tick()

    assert caplog.messages == [
        "event=rounds tables=1 rounds=1 rows=1 bytes=10 seconds=0.500",
        "event=rounds tables=2 rounds=60 rows=121 bytes=600 seconds=30.000",
    ]


def test_a_table_whose_rounds_scatter_their_rows_is_named_once_an_hour(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = _Clock()
    log = RoundLog(clock)
    scattered = replace(_round("default.a", rows=70), rows_written=70, file_count=64)

    with caplog.at_level(logging.WARNING):
        log.add(replace(scattered, rows_written=6_400))
        log.add(replace(scattered, file_count=63))
        assert caplog.messages == []
        for _ in range(61):
            log.add(scattered)
            clock.now_s += 60

    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith("event=rows_scattered table=default.a files=64 rows=70 ")
    assert "fewer buckets or coarser partitions" in caplog.messages[0]


def test_what_is_left_is_said_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = _Clock()
    log = RoundLog(clock)

    with caplog.at_level(logging.INFO):
        log.close()
        log.add(_round("default.a", rows=1))
        log.add(_round("default.a", rows=2))
        log.close()
        log.close()

    assert [message.partition(" bytes")[0] for message in caplog.messages] == [
        "event=rounds tables=1 rounds=1 rows=1",
        "event=rounds tables=1 rounds=1 rows=2",
    ]


def test_why_it_is_idle_is_logged_when_it_changes_and_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = _Clock()
    log = IdleLog(clock)
    fresh = TieringIdle(reason="not_due", retry_after_ms=1_500)
    failed = TieringIdle(reason="paused_after_failure", retry_after_ms=90_000)
    with caplog.at_level(logging.DEBUG):
        for answer, pause_s in ((fresh, 1), (fresh, 1), (failed, 5), (failed, 1), (fresh, 59)):
            log.idle(answer)
            clock.now_s += pause_s
        log.idle(fresh)

    # The change after two seconds is too soon to tell; the one after seven is told.
    assert [message.partition(" why")[0] for message in caplog.messages] == [
        "event=idle reason=not_due",
        "event=idle reason=paused_after_failure",
        "event=idle reason=not_due",
    ]
    assert "why='every table is fresh enough' again_in_s=1.5" in caplog.messages[0]
    assert "again_in_s=5.0" in caplog.messages[1]
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
