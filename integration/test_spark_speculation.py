"""Speculative twins of tasks, on a real cluster: both stage their rows, each row is there once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from integration.spark_cluster import run_on_cluster, spark_cluster
from integration.speculation_program import ROWS, SOURCE, TABLES
from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

SCHEMA = pa.schema([pa.field("id", pa.int64())])
CONF = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.01",
    # An attempt whose twin does not come fails the job: a retry is no twin.
    "spark.task.maxFailures": "1",
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """All jobs have run: their marks, and the service that has their tables."""
    folder = tmp_path_factory.mktemp("jobs")
    with ServiceProcess(tmp_path_factory.mktemp("service")) as service:
        with StreamhouseClient(service.endpoint) as client:
            client.create_database("raced")
            for table in (SOURCE, *TABLES):
                client.create_table(table, SCHEMA, bucket_count=2)
            client.append(SOURCE, pa.table({"id": range(2 * ROWS)}, schema=SCHEMA))
        with spark_cluster(tmp_path_factory.mktemp("cluster")) as master:
            run_on_cluster(
                master, "integration.speculation_program", service.endpoint, folder, conf=CONF
            )
        yield folder, service.endpoint


def _marks(jobs: tuple[Path, str], table: str) -> set[str]:
    return {mark.name for mark in (jobs[0] / table).iterdir()}


def _ids(jobs: tuple[Path, str], table: str) -> list[int]:
    with StreamhouseClient(jobs[1]) as client:
        ids: list[int] = client.read(table)["id"].to_pylist()
        return sorted(ids)


@pytest.mark.parametrize("table", ["raced.both", "raced.stream"])
def test_two_attempts_that_both_end_write_once(jobs: tuple[Path, str], table: str) -> None:
    # Spark may kill the first attempt between its last row and its end.
    assert {"began-0", "began-1", "ended-1"} <= _marks(jobs, table)

    assert _ids(jobs, table) == list(range(2 * ROWS))


def test_an_attempt_that_is_killed_for_its_twin_writes_nothing(jobs: tuple[Path, str]) -> None:
    assert _marks(jobs, "raced.killed") == {"began-0", "began-1", "ended-1"}

    assert _ids(jobs, "raced.killed") == list(range(2 * ROWS))


def test_without_a_transaction_both_attempts_rows_are_there(jobs: tuple[Path, str]) -> None:
    """The same job by `write.transactional=false`: what the twin writes is really written twice."""
    assert {"began-0", "began-1", "ended-1"} <= _marks(jobs, "raced.direct")

    found = _ids(jobs, "raced.direct")

    assert set(found) == set(range(2 * ROWS))
    assert len(found) > 2 * ROWS
