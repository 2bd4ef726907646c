"""Every door that takes a time finds the rows since then, wherever they are, or refuses.

What came since is in the lake alone, but for the last rows. `test_since_time.py` has the function
that all doors ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import StorageClient
from streamhouse.core.errors import OffsetOutOfRangeError
from streamhouse.reading.follow.table_follower import TableFollower
from streamhouse.reading.options.options import STREAM, read_options
from streamhouse.reading.plan.row_form import table_columns
from tests.support.fetch_world import list_offsets
from tests.support.kafka_world import KafkaClient
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

OPTIONS = ("--kafka-port", "0", "--retention-interval-ms", "20")
SHORT = {"table.log.ttl": "1ms", "table.log.segment-bytes": "64kb"}
BEFORE, SINCE, LATE = 50, 200, 10
TABLES: dict[str, dict[str, Any]] = {
    "rows": {"properties": SHORT},
    "history": {
        "primary_key": "id",
        "properties": {**SHORT, "table.datalake.changelog": "true"},
    },
    "keys": {"primary_key": "id", "properties": SHORT},
}
WHOLE = ["rows", "history"]


class _World:
    """A service, and by table the time before `SINCE` rows were written."""

    def __init__(self, service: ServiceProcess, client: StreamhouseClient) -> None:
        self.service = service
        self.client = client
        self.times_us = {table: self._fill(table) for table in TABLES}

    def _fill(self, table: str) -> int:
        client, put = self.client, self.client.append
        client.create_table(table, "id BIGINT NOT NULL, s STRING", **TABLES[table])
        if "primary_key" in TABLES[table]:
            put = client.upsert
        put(table, [{"id": i, "s": "before"} for i in range(BEFORE)])
        put(table, [{"id": BEFORE + i, "s": "since" * 300} for i in range(SINCE)])
        batches = client.read_range(table, 0, 0, BEFORE + SINCE)
        time_us = max(batch.timestamp_us for batch in batches)
        tier_once(client, f"default.{table}")
        while client.positions(table)[0].log_start_offset < BEFORE + SINCE:
            pass
        put(table, [{"id": 1_000 + i, "s": "late"} for i in range(LATE)])
        return time_us

    def stream_start(self, table: str, **options: str) -> dict[int, int]:
        """Return where a stream begins that has no checkpoint."""
        given = {"table": table, "endpoint": self.service.endpoint, **options}
        client = StorageClient.of(self.client)
        state = client.table_state(table.partition("$")[0])
        output = table_columns(
            state.table, columns=None, include_metadata=True, has_change_type=False
        )
        follower = TableFollower(read_options(given, use=STREAM), state, output, lambda: client)
        return dict(follower.start().offsets)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_World]:
    with (
        ServiceProcess(tmp_path_factory.mktemp("since"), *OPTIONS) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        yield _World(service, client)


@pytest.mark.parametrize("table", WHOLE)
def test_the_offset_of_a_time_is_that_of_the_row_in_the_lake(world: _World, table: str) -> None:
    time_us = world.times_us[table]

    assert world.client.offsets_for_timestamp(table, time_us) == {0: BEFORE}
    assert world.stream_start(table, startingTimestamp=str(time_us)) == {0: BEFORE}
    assert world.stream_start(table, startingOffsets=str(time_us)) == {0: BEFORE}
    in_log = world.client.offsets_for_timestamp(table, time_us, start={0: BEFORE + SINCE})
    assert in_log == {0: BEFORE + SINCE}
    assert world.client.offsets_for_timestamp(table, time_us * 2) == {0: BEFORE + SINCE + LATE}


@pytest.mark.parametrize("table", WHOLE)
async def test_kafka_clients_are_told_the_same(world: _World, table: str) -> None:
    time_ms = world.times_us[table] // 1_000
    host, port = world.service.kafka_address.rsplit(":", 1)
    client = KafkaClient(*await asyncio.open_connection(host, int(port)))
    try:
        answer = await list_offsets(client, table, 0, time_ms)
    finally:
        await client.close()

    assert isinstance(answer, tuple)
    # Milliseconds are coarser: both batches may be of the same.
    assert answer[0] in (0, BEFORE)


@pytest.mark.parametrize("name", ["rows", "history$changelog", "rows$changelog"])
def test_a_batch_read_since_a_time_has_the_rows_of_both_tiers(world: _World, name: str) -> None:
    time_us = world.times_us[name.partition("$")[0]]

    since = world.client.read(name, startingTimestamp=time_us, columns=["id"])
    until = world.client.read(name, endingTimestamp=time_us, columns=["id"])

    assert (since.num_rows, until.num_rows) == (SINCE + LATE, BEFORE)


@pytest.mark.parametrize("table", WHOLE)
def test_a_subscription_since_a_time_says_where_older_rows_are(world: _World, table: str) -> None:
    start = str(world.times_us[table])
    with (
        world.client.subscribe(table, start=start) as batches,
        pytest.raises(OffsetOutOfRangeError) as refused,
    ):
        next(iter(batches))

    outside = f"offset {BEFORE} is outside the log, which has offsets {BEFORE + SINCE} to"
    name = "the table" if table == "rows" else "'default.history$changelog'"
    assert outside in str(refused.value)
    assert f"older rows are in the lake: read {name} with startingOffsets" in str(refused.value)


def test_changes_that_are_nowhere_are_refused_at_every_door(world: _World) -> None:
    client, time_us = world.client, world.times_us["keys"]
    why = rf"table 'default.keys', bucket 0: which row .* rows \[0, {BEFORE + SINCE}\) have left"

    with pytest.raises(OffsetOutOfRangeError, match=why) as refused:
        client.offsets_for_timestamp("keys", time_us)
    with pytest.raises(OffsetOutOfRangeError, match=why):
        client.read("keys$changelog", startingTimestamp=time_us)
    with pytest.raises(OffsetOutOfRangeError, match=why):
        client.read("keys$changelog", startingOffsets=str(time_us))
    with pytest.raises(OffsetOutOfRangeError, match=why):
        client.read("keys", asOfTimestamp=time_us - 1)
    with pytest.raises(OffsetOutOfRangeError, match=why):
        client.subscribe("keys", start=str(time_us))
    with pytest.raises(OffsetOutOfRangeError, match=why):
        world.stream_start("keys", startingTimestamp=str(time_us))

    assert "table.datalake.changelog" in str(refused.value)


def test_lost_changes_are_skipped_by_who_says_so(world: _World) -> None:
    client, time_us = world.client, world.times_us["keys"]
    begin = {0: BEFORE + SINCE}

    assert client.offsets_for_timestamp("keys", time_us, skip_lost=True) == begin
    left = client.read("keys$changelog", startingTimestamp=time_us, failOnDataLoss=False)
    assert left.num_rows == LATE
    assert client.read("keys$log", startingTimestamp=time_us).num_rows == LATE
    start = world.stream_start("keys", startingTimestamp=str(time_us), failOnDataLoss="false")
    assert start == begin
    assert world.stream_start("keys$log", startingTimestamp=str(time_us)) == begin


def test_a_time_since_which_nothing_was_lost_is_answered(world: _World) -> None:
    late_us = max(b.timestamp_us for b in world.client.read_range("keys", 0, 250, 260))

    assert world.client.offsets_for_timestamp("keys", late_us) == {0: BEFORE + SINCE}
    found = world.client.read("keys$changelog", startingTimestamp=late_us)
    assert found.num_rows == LATE
