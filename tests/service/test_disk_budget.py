"""A service with less disk than is written to it, and tiering that makes room."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
ROWS, BATCHES = 20_000, 12


def test_more_is_written_than_the_disk_may_hold_and_nothing_is_lost(tmp_path: Path) -> None:
    arguments = ("--disk-max", "1mb", "--disk-check-interval-ms", "50", "--tiering", "embedded")
    with (
        ServiceProcess(tmp_path, *arguments) as service,
        StreamhouseClient(service.endpoint, timeout_s=120) as client,
    ):
        client.create_table("default.t", SCHEMA, properties={"table.log.segment-bytes": "64kb"})
        for number in range(BATCHES):
            ids = pa.array(range(number * ROWS, (number + 1) * ROWS), pa.int64())
            rows = pa.table({"id": ids, "name": [f"n{i}" for i in range(ROWS)]}, schema=SCHEMA)
            # The client waits and repeats while the service refuses.
            client.append("default.t", rows)

        # Room is made down to the budget, whatever the table's own age for its log.
        while client.table_sizes("default.t").hot_bytes > 1 << 20:
            client.table_state("default.t", after={0: ROWS * BATCHES}, max_wait_ms=100)

        found = client.read("default.t", columns=["id"])["id"].to_pylist()
        assert sorted(found) == list(range(ROWS * BATCHES))
        assert client.positions("default.t")[0].log_start_offset > 0
