"""A service whose clock is set back and forth while it is used."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False)])
HOUR_S = 3_600


def test_timestamps_never_decrease_and_rows_are_kept_for_their_time(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    command = ("-m", "tests.support.clocked_service", str(clock))
    arguments = ("--retention-interval-ms", "50")
    sent = 0

    def write(client: StreamhouseClient, ahead_s: int) -> None:
        nonlocal sent
        clock.write_text(str(ahead_s))
        row = pa.table({"id": [sent]}, schema=SCHEMA)
        client.append("log", row)
        client.upsert("keys", row)
        with client.begin_transaction("staged") as transaction:
            transaction.commit([transaction.stage(row)])
        sent += 1

    data = tmp_path / "data"
    with (
        ServiceProcess(data, *arguments, command=command) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        # Without a lake nothing but age keeps a row.
        aged = {"table.datalake.enabled": "false", "table.log.ttl": "2h"}
        client.create_table("log", SCHEMA, properties=aged)
        client.create_table("staged", SCHEMA, properties=aged)
        client.create_table("keys", SCHEMA, primary_key=["id"])
        for ahead_s in (0, HOUR_S, -HOUR_S, 0, -50 * HOUR_S, HOUR_S // 2):
            write(client, ahead_s)
        _check_order(client, sent)
        service.kill()
    # A restart far back in time goes on from the log's last time.
    clock.write_text(str(-100 * HOUR_S))
    with (
        ServiceProcess(data, *arguments, command=command) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        write(client, -100 * HOUR_S)
        _check_order(client, sent)
        assert client.lookup_one("keys", id=0) == {"id": 0}
        # Once the clock is past their age they go, and only then.
        assert client.positions("log")[0].log_start_offset == 0
        clock.write_text(str(4 * HOUR_S))
        pause = threading.Event()
        while client.positions("log")[0].log_start_offset < sent:
            pause.wait(0.02)
        write(client, 4 * HOUR_S)
        assert [b.base_offset for b in client.fetch("log", 0, sent - 1)] == [sent - 1]
        assert client.count("keys") == sent
        assert service.terminate() == 0


def _check_order(client: StreamhouseClient, count: int) -> None:
    for table in ("log", "keys", "staged"):
        batches = list(client.read_range(table, 0, 0, count))
        times = [batch.timestamp_us for batch in batches]
        assert times == sorted(times), f"{table}: {times}"
        assert sum(batch.data.num_rows for batch in batches) == count
    # The first rows of an hour that was only on the clock: those at and after its first row.
    batches = list(client.read_range("log", 0, 0, count))
    for batch in batches:
        found = client.offsets_for_timestamp("log", batch.timestamp_us)[0]
        assert found <= batch.base_offset
        assert all(b.timestamp_us < batch.timestamp_us for b in batches if b.end_offset <= found)
