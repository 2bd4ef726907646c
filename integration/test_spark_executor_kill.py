"""kill -9 of executors, and of the driver, while rows are staged: on a cluster that speculates."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from integration.executor_kill_program import BATCHES, ROWS, SOURCE
from integration.spark_cluster import run_on_cluster, spark_cluster
from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

SCHEMA = pa.schema([pa.field("id", pa.int64())])
CONF = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
}
PROGRAM = "integration.executor_kill_program"


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with spark_cluster(tmp_path_factory.mktemp("cluster")) as address:
        yield address


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamhouseClient]:
    with (
        ServiceProcess(tmp_path_factory.mktemp("service")) as service,
        StreamhouseClient(service.endpoint) as opened,
    ):
        opened.create_database("killed")
        opened.create_table(SOURCE, SCHEMA, bucket_count=2)
        opened.append(SOURCE, pa.table({"id": range(BATCHES * 2 * ROWS)}, schema=SCHEMA))
        yield opened


def _ids(client: StreamhouseClient, table: str) -> list[int]:
    return sorted(client.read(table)["id"].to_pylist())


@pytest.mark.parametrize("how", ["batch", "stream"])
def test_executors_killed_while_their_tasks_stage(
    master: str, client: StreamhouseClient, tmp_path: Path, how: str
) -> None:
    table = f"killed.executor_{how}"
    client.create_table(table, SCHEMA, bucket_count=2)

    run_on_cluster(master, PROGRAM, client.endpoint, tmp_path, "executor", how, conf=CONF)

    assert {mark.name for mark in tmp_path.glob("partition-*")} == {"partition-0", "partition-1"}
    expected = 2 * ROWS * (1 if how == "batch" else BATCHES)
    assert _ids(client, table) == list(range(expected))


@pytest.mark.parametrize("how", ["batch", "stream"])
def test_the_driver_killed_while_tasks_stage_and_started_again(
    master: str, client: StreamhouseClient, tmp_path: Path, how: str
) -> None:
    table = f"killed.driver_{how}"
    client.create_table(table, SCHEMA, bucket_count=2)
    arguments = (client.endpoint, tmp_path, "driver", how)

    killed = 0
    while not {"partition-0", "partition-1"} <= {mark.name for mark in tmp_path.iterdir()}:
        run_on_cluster(master, PROGRAM, *arguments, conf=CONF, expect=-signal.SIGKILL)
        killed += 1
        # The micro-batch before it is there, nothing of the one that was killed.
        found = _ids(client, table)
        assert len(found) == len(set(found)) == (0 if how == "batch" else 2 * ROWS)
    run_on_cluster(master, PROGRAM, *arguments, conf=CONF)

    assert killed in (1, 2), "both tasks may have been about to kill it"
    expected = 2 * ROWS * (1 if how == "batch" else BATCHES)
    assert _ids(client, table) == list(range(expected))
