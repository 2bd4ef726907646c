"""Marks of how old rows are, beside clocks that are set back and logs that are cut meanwhile."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from streamhouse.core.errors import OffsetOutOfRangeError
from streamhouse.storage_service.engine.upkeep.row_ages import RowAges
from tests.support.held_step import around
from tests.support.in_process_service import HOUR_US, TTL, expiry_world, table_descriptor
from tests.support.state_files import content_of, state_file

START_US = 1_800_000_000_000_000
MINUTE_US = 60_000_000


async def test_a_clock_that_is_set_back_costs_only_the_marks_of_the_time_it_was_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_us = START_US

    async with expiry_world(tmp_path, clock_us=lambda: now_us) as world:
        table = await world.table()
        (tablet,) = table.tablets
        ages = RowAges(state_file(tmp_path / "ages.json", "row_ages"))
        await world.upsert(table, [0])
        # The marks are made while the clock is a year ahead, but nothing is written then.
        year_us = 365 * 24 * HOUR_US
        now_us += year_us
        ages.advance(table.tablets, now_us=now_us, age_us=HOUR_US)
        now_us -= year_us
        # And the log forgets everything at once.
        around(monkeypatch, "time-looked-up", lambda _, log, __: log.log_start_offset)
        for minute in range(1, 120):
            now_us = START_US + minute * MINUTE_US
            await world.upsert(table, [minute])
            ages.advance(table.tablets, now_us=now_us, age_us=HOUR_US)

        times = [time_us for time_us, _ in content_of(tmp_path / "ages.json")["0"]]
        assert all(a < b for a, b in itertools.pairwise(times))
        # Minute 59 is an hour ago; a mark may be missing in between.
        assert ages.end_before(0, tablet, now_us - HOUR_US) in (58, 59)


async def test_a_log_that_is_cut_while_its_ages_are_read_is_read_again_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with expiry_world(tmp_path) as world:
        table = await world.manager.create_table(
            table_descriptor("default.db", primary_key=("id",), bucket_count=2, properties=TTL)
        )
        cut, whole = table.tablets
        for bucket in (0, 1):
            await world.upsert(table, range(5), bucket=bucket)
        around(monkeypatch, "log-read", _refuse)
        around(monkeypatch, "log-start-asked", lambda _, log: 2 * (log is cut))
        ages = RowAges(state_file(tmp_path / "ages.json", "row_ages"))
        far_us = START_US * 2
        ages.advance(table.tablets, now_us=START_US, age_us=HOUR_US)
        with monkeypatch.context() as patch:
            around(patch, "time-looked-up", lambda *_: 2)
            assert ages.end_before(0, cut, far_us) == 0
        assert ages.end_before(1, whole, far_us) == 5

        monkeypatch.undo()
        ages.advance(table.tablets, now_us=START_US, age_us=HOUR_US)
        assert ages.end_before(0, cut, far_us) == 5


def _refuse(*_: object, **__: object) -> None:
    raise OffsetOutOfRangeError("offset 2 is outside the stored range")
