"""Kill -9 of a real worker process after each step: the next worker finishes, rows are there once.

The same steps are visited in one process, with every order of events, by
tests/simulation/test_tiering_crashes.py; here process, service, catalog and disk are real.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from streamhouse.storage_service.client import StorageClient
from streamhouse.tiering.round import HISTORY_STEPS, ROUND_STEPS
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

MAINTENANCE_STEPS = (
    "rewrite-planned",
    "files-rewritten",
    "rewrite-staged",
    "rewrite-committed",
)
ROOT = Path(__file__).parents[1]
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("region", pa.string())])


def _rows(start: int, end: int) -> pa.Table:
    ids = range(start, end)
    return pa.table({"id": ids, "region": [f"r{i % 4}" for i in ids]}, schema=SCHEMA)


def _run_doomed(endpoint: str, step: str) -> None:
    program = [sys.executable, "-m", "tests.support.doomed_worker", endpoint, step]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def _lake_ids(client: StorageClient) -> list[int]:
    described = client.lake_catalog()
    catalog = load_catalog(described.name, **described.properties)
    try:
        table = catalog.load_table(("default", "events"))
        return sorted(table.scan(selected_fields=("id",)).to_arrow()["id"].to_pylist())
    finally:
        catalog.close()


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step, marks=[pytest.mark.end_to_end] if step in ROUND_STEPS[3:6] else [])
        for step in ROUND_STEPS
    ],
)
def test_another_worker_finishes_what_a_killed_one_began(tmp_path: Path, step: str) -> None:
    with (
        ServiceProcess(tmp_path, "--tiering-lease-ms", "1s") as service,
        StorageClient(service.endpoint) as client,
    ):
        client.create_table("events", SCHEMA, bucket_count=3, partitioned_by=["region"])
        client.append("events", _rows(0, 500))
        tier_once(client)
        client.append("events", _rows(500, 1_000))
        _run_doomed(service.endpoint, step)

        tier_once(client)

        assert _lake_ids(client) == list(range(1_000))
        positions = client.positions("events").values()
        assert sum(p.tiered_offset for p in positions) == 1_000


@pytest.mark.end_to_end
def test_a_service_killed_during_a_round_does_not_lose_or_repeat_rows(tmp_path: Path) -> None:
    """The lake is committed while the service is down; the next round registers it."""
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_table("events", SCHEMA, bucket_count=3)
        client.append("events", _rows(0, 500))
        _run_doomed(service.endpoint, "committed")
        service.kill()

    with (
        ServiceProcess(tmp_path, "--tiering-lease-ms", "1s") as service,
        StorageClient(service.endpoint) as client,
    ):
        client.append("events", _rows(500, 600))
        moved = tier_once(client)

        assert moved == 100
        assert _lake_ids(client) == list(range(600))


@pytest.mark.parametrize("step", MAINTENANCE_STEPS)
def test_what_a_worker_killed_in_maintenance_leaves_is_maintained_by_the_next(
    tmp_path: Path, step: str
) -> None:
    properties = {
        "table.datalake.snapshot.max-age": "1ms",
        "table.datalake.snapshot.min-count": "1",
        "table.datalake.changelog": "true",
    }
    with (
        ServiceProcess(tmp_path, "--tiering-lease-ms", "1s") as service,
        StorageClient(service.endpoint) as client,
    ):
        client.create_table("events", SCHEMA, primary_key=["id"], properties=properties)
        for number in range(7):
            client.upsert("events", _rows(number * 50, number * 50 + 100))
            tier_once(client)
        client.upsert("events", _rows(350, 450))
        _run_doomed(service.endpoint, step)
        assert _lake_ids(client) == list(range(450))

        client.upsert("events", _rows(450, 500))
        for number in range(8):
            client.delete("events", _rows(number, number + 1).select(["id"]))
            tier_once(client)

        assert _lake_ids(client) == list(range(8, 500))
        described = client.lake_catalog()
        for name in ("events", "events$changelog"):
            catalog = load_catalog(described.name, **described.properties)
            table = catalog.load_table(("default", name))
            assert len(table.inspect.data_files()) <= 16
            catalog.close()


@pytest.mark.parametrize("step", [*ROUND_STEPS[3:6], *HISTORY_STEPS[2:]])
def test_a_killed_round_of_upserts_neither_loses_nor_repeats_a_retraction(
    tmp_path: Path, step: str
) -> None:
    with (
        ServiceProcess(tmp_path, "--tiering-lease-ms", "1s") as service,
        StorageClient(service.endpoint) as client,
    ):
        client.create_table(
            "events",
            SCHEMA,
            primary_key=["id"],
            bucket_count=3,
            partitioned_by=["region"],
            properties={"table.datalake.changelog": "true"},
        )
        client.upsert("events", _rows(0, 500))
        tier_once(client)
        client.upsert("events", _rows(400, 600).set_column(1, "region", pa.array(["x"] * 200)))
        client.delete("events", _rows(0, 100).select(["id"]))
        _run_doomed(service.endpoint, step)

        tier_once(client)

        assert _lake_ids(client) == list(range(100, 600))
        assert client.count("events") == 500
