"""Kill -9 of a real worker process after each step: the next worker finishes, rows are there once.

The same steps are visited in one process, with every order of events, by
tests/simulation/test_tiering_crashes.py; here process, service, catalog and disk are real.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from streamhouse.client import StorageClient
from streamhouse.tiering.round._round import BATCH_STEPS, HISTORY_STEPS, ROUND_STEPS
from tests.support.python_process import run_python
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

MAINTENANCE_STEPS = (
    "rewrite-planned",
    "files-rewritten",
    "rewrite-staged",
    "rewrite-committed",
)
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("region", pa.string())])


def _rows(start: int, end: int) -> pa.Table:
    ids = range(start, end)
    return pa.table({"id": ids, "region": [f"r{i % 4}" for i in ids]}, schema=SCHEMA)


def _run_doomed(endpoint: str, step: str) -> None:
    done = run_python(["-m", "tests.support.doomed_worker", endpoint, step])
    assert done.returncode == -signal.SIGKILL, done.stderr


def _lake_rows(client: StorageClient, name: str, columns: tuple[str, ...]) -> list[Any]:
    described = client.lake_catalog()
    catalog = load_catalog(described.name, **described.properties)
    try:
        found = catalog.load_table(("default", name)).scan(selected_fields=columns).to_arrow()
        return sorted(zip(*(found[column].to_pylist() for column in columns), strict=True))
    finally:
        catalog.close()


def _lake_ids(client: StorageClient) -> list[int]:
    return [id_ for (id_,) in _lake_rows(client, "events", ("id",))]


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


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step, marks=[pytest.mark.end_to_end] if step in BATCH_STEPS else [])
        for step in (*ROUND_STEPS[3:], *HISTORY_STEPS, *BATCH_STEPS)
    ],
)
def test_a_killed_round_leaves_every_lake_table_right_in_the_end(tmp_path: Path, step: str) -> None:
    with (
        ServiceProcess(tmp_path, "--tiering-lease-ms", "1s") as service,
        StorageClient(service.endpoint) as client,
    ):
        layout = {"table.datalake.batch-layout.sort": "region, id"}
        client.create_table("logged", SCHEMA, bucket_count=2, properties=layout)
        client.create_table(
            "events",
            SCHEMA,
            primary_key=["id"],
            bucket_count=2,
            properties={"table.datalake.changelog": "true", **layout},
        )
        client.append("logged", _rows(0, 300))
        client.upsert("events", _rows(0, 300))
        tier_once(client)
        moved = _rows(200, 400).set_column(1, "region", pa.array(["x"] * 200))
        client.append("logged", _rows(300, 500))
        client.upsert("events", moved)
        client.delete("events", _rows(0, 50).select(["id"]))
        # The history is of one table; of the two, any may be the first to reach another step.
        _run_doomed(service.endpoint, step)

        tier_once(client)

        old, new = (table.to_pylist() for table in (_rows(0, 300), moved))
        rows = {row["id"]: row["region"] for row in (*old, *new) if row["id"] >= 50}
        changes = [
            *((row["id"], row["region"], "+I") for row in old),
            *((row["id"], row["region"], "-U") for row in old if row["id"] >= 200),
            *((row["id"], "x", "+U" if row["id"] < 300 else "+I") for row in new),
            *((row["id"], row["region"], "-D") for row in old if row["id"] < 50),
        ]
        logged = sorted((row["id"], row["region"]) for row in _rows(0, 500).to_pylist())
        columns = ("id", "region")
        for name in ("events", "events$batch"):
            assert _lake_rows(client, name, columns) == sorted(rows.items()), name
        history = _lake_rows(client, "events$changelog", (*columns, "__change_type"))
        assert history == sorted(changes)
        for name in ("logged", "logged$batch"):
            assert _lake_rows(client, name, columns) == logged, name
        for name in ("events", "logged"):
            state = client.table_state(name)
            tops = {b: at.high_watermark for b, at in state.positions.items()}
            assert state.lake.batch is not None
            assert state.lake.batch.tiered_offsets == state.lake.tiered_offsets == tops
