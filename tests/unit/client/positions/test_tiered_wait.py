"""Waiting until rows are in the lake: when it ends, and what is said of rounds."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.client.positions._tiered_wait import TieredWait, rounds_text
from streamhouse.core.errors import (
    HistoryDivergedError,
    InvalidRequestError,
    TableNotFoundError,
)
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.offsets import BucketPositions
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.core.model.table_state import TableState

SCHEMA = Schema.from_arrow(pa.schema([pa.field("id", pa.int64())]))


def _state(
    *buckets: tuple[int, int],
    table_id: int = 1,
    diverged: str = "",
    first: int = 0,
    **properties: str,
) -> TableState:
    """Return a table whose buckets have these high watermarks and tiered offsets."""
    descriptor = TableDescriptor(
        path=TablePath.parse("db.t"),
        schema=SCHEMA,
        bucket_count=len(buckets),
        properties=properties,
    )
    info = TableInfo(table_id=table_id, descriptor=descriptor, created_at_us=0)
    positions = {
        bucket: BucketPositions(
            log_start_offset=0, high_watermark=high, tiered_offset=tiered, expired_offset=first
        )
        for bucket, (high, tiered) in enumerate(buckets)
    }
    offsets = {bucket: tiered for bucket, (_, tiered) in enumerate(buckets)}
    lake = LakeState(tiered_offsets=offsets, diverged=diverged)
    return TableState(table=info, positions=positions, lake=lake)


@given(st.lists(st.tuples(*[st.integers(0, 20)] * 4).map(sorted), min_size=1, max_size=4))
def test_it_waits_for_the_rows_of_the_call_and_for_no_later_ones(buckets: list[list[int]]) -> None:
    now = _state(*((high, tiered) for tiered, _, high, _ in buckets))
    later = _state(*((end, tiered) for _, tiered, _, end in buckets))

    wait = TieredWait.of(now)

    assert wait.missing_rows_of(now) == sum(high - tiered for tiered, _, high, _ in buckets)
    assert wait.missing_rows_of(later) == sum(high - tiered for _, tiered, high, _ in buckets)
    assert wait.missing_rows_of(_state(*((end, end) for *_, end in buckets))) == 0


def test_rows_that_have_expired_are_not_waited_for() -> None:
    assert TieredWait.of(_state((9, 2))).missing_rows_of(_state((9, 2), first=7)) == 2


def test_what_can_not_come_is_said_at_once() -> None:
    wait = TieredWait.of(_state((9, 2)))

    with pytest.raises(TableNotFoundError, match="created again"):
        wait.missing_rows_of(_state((9, 9), table_id=2))
    with pytest.raises(HistoryDivergedError, match="other rows"):
        wait.missing_rows_of(_state((9, 2), diverged="the lake has other rows"))
    with pytest.raises(InvalidRequestError, match=r"7 rows of 'db\.t'.*datalake\.enabled is false"):
        wait.missing_rows_of(_state((9, 2), **{"table.datalake.enabled": "false"}))


def test_a_late_wait_says_how_far_it_is() -> None:
    state = _state((9, 2), (5, 5))

    said = TieredWait.of(state).late_message(state, timeout_s=1.5, rounds="nobody works")

    assert said == "7 rows of 'db.t' are not in the lake after 1.5 s: nobody works"


IDLE: dict[str, Any] = {"workers": [], "idle_workers": [], "tables": []}
AT_IT = {
    "worker_id": "w-1",
    "lease_left_ms": 900,
    "progress": {"step": "writing", "rows_done": 5, "rows_planned": 9},
}
PAUSED = {"lease_left_ms": 0, "pause_left_ms": 8000, "failures": 3, "last_error": "no catalog"}
SOME = {"idle_workers": [{"worker_id": "embedded", "reason": "not_due"}]}


def _table(tiering: dict[str, Any]) -> dict[str, Any]:
    return {"tables": [{"table": "db.t", "freshness_ms": 180_000, "tiering": tiering}]}


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({}, "no worker has asked for a table in the last minute; start one: streamhouse tier"),
        (SOME, "1 of the service's workers run, none of them at this table"),
        (SOME | _table({}), "none of them at this table; a round is due within 180 s"),
        (_table(AT_IT), r"worker 'w-1' is at it \(writing, 5 of 9 rows\)"),
        (_table(AT_IT | {"progress": None}), "worker 'w-1' is at it$"),
        (_table(PAUSED), "3 failed rounds said 'no catalog', the next one begins in 8 s"),
    ],
)
def test_how_rounds_stand_is_one_sentence(status: dict[str, Any], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(rounds_text("db.t", IDLE | status))
