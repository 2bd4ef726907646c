"""Several workers share the tables of a real service; one of them is killed in a round."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from streamhouse.client import StorageClient, TieringIdle
from streamhouse.lake.lake_tables import IcebergLake
from streamhouse.tiering.worker._service import TieringService
from streamhouse.tiering.worker.thread_runner import ThreadRunner
from tests.support.python_process import run_python
from tests.support.service_process import ServiceProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False)])
TABLES = [f"default.t{number}" for number in range(6)]
ROWS = 300
WAIT_S = 90.0


@contextlib.contextmanager
def _worker(
    endpoint: str, name: str, *, checkpoint: Callable[[str], None] = lambda _: None
) -> Iterator[TieringService]:
    with StorageClient(endpoint) as client:
        lake = IcebergLake(client.lake_catalog())
        worker = TieringService(
            client=client,
            lake=lake,
            runner=ThreadRunner(1),
            worker_id=name,
            checkpoint=checkpoint,
            tables_in_flight=2,
            # Small rounds, so that tables take turns.
            rows_per_round_max=ROWS // 2,
        )
        thread = threading.Thread(target=worker.run_forever)
        thread.start()
        try:
            yield worker
        finally:
            worker.stop()
            thread.join(WAIT_S)
            lake.close()
            assert not thread.is_alive()


def _untiered(client: StorageClient) -> dict[str, int]:
    return {
        table["table"]: table["tiering"]["untiered_rows"] for table in client.status()["tables"]
    }


def _lake_ids(client: StorageClient, path: str) -> list[int]:
    described = client.lake_catalog()
    catalog = load_catalog(described.name, **described.properties)
    try:
        rows = catalog.load_table(tuple(path.split("."))).scan().to_arrow()
        return sorted(rows["id"].to_pylist())
    finally:
        catalog.close()


def _append(client: StorageClient, start: int) -> None:
    for path in TABLES:
        client.append(path, pa.table({"id": range(start, start + ROWS)}, schema=SCHEMA))


def test_workers_share_the_tables_and_take_over_those_of_a_dead_one(tmp_path: Path) -> None:
    with (
        ServiceProcess(tmp_path, "--tiering-lease-ms", "1s") as service,
        StorageClient(service.endpoint) as client,
    ):
        for path in TABLES:
            properties = {"table.datalake.freshness": "1s"}
            client.create_table(path, SCHEMA, bucket_count=2, properties=properties)
        client.create_table("empty", SCHEMA)
        _append(client, 0)
        dead = run_python(["-m", "tests.support.doomed_worker", service.endpoint, "files-written"])
        assert dead.returncode == -signal.SIGKILL, dead.stderr

        with _worker(service.endpoint, "one"), _worker(service.endpoint, "two"):
            wait_until(lambda: not any(_untiered(client).values()), "all is tiered")
            _append(client, ROWS)
            wait_until(lambda: not any(_untiered(client).values()), "all is tiered")
            wait_until(
                lambda: {w["worker_id"] for w in client.status()["idle_workers"]} >= {"one", "two"},
                "both workers are idle",
            )

        for path in TABLES:
            assert _lake_ids(client, path) == list(range(2 * ROWS))
        # A table without rows has no lake table, and was never claimed.
        empty = client.table_state("empty").lake
        assert (empty.snapshot_id, empty.tiering_epoch) == (None, 0)


def test_a_round_goes_on_across_a_restart_of_the_service(tmp_path: Path) -> None:
    is_written, may_go_on = threading.Event(), threading.Event()

    def stand_still(step: str) -> None:
        if step == "files-written" and not is_written.is_set():
            is_written.set()
            assert may_go_on.wait(WAIT_S)

    with contextlib.ExitStack() as stack:
        with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
            endpoint = service.endpoint
            properties = {"table.datalake.freshness": "1s"}
            client.create_table(TABLES[0], SCHEMA, properties=properties)
            client.append(TABLES[0], pa.table({"id": range(100)}, schema=SCHEMA))
            worker = stack.enter_context(_worker(endpoint, "one", checkpoint=stand_still))
            stack.callback(may_go_on.set)
            assert is_written.wait(WAIT_S)
            service.kill()

        port = endpoint.rpartition(":")[2]
        stack.enter_context(ServiceProcess(tmp_path, "--port", port))
        client = stack.enter_context(StorageClient(endpoint))
        refused = client.claim_tiering("two", tables=[TABLES[0]], force=True)
        assert isinstance(refused, TieringIdle)
        assert refused.reason == "leased"
        may_go_on.set()
        wait_until(lambda: not any(_untiered(client).values()), "all is tiered")
        # Before its service stops.
        worker.stop()

        assert client.table_state(TABLES[0]).lake.tiering_epoch == 1
        assert _lake_ids(client, TABLES[0]) == list(range(100))
