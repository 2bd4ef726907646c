"""Speculative twins of tasks, on a real cluster: both attempts stage rows, each row is there once.

The cluster is one of processes: a master, and two workers under two names of this machine, because
Spark runs no twin on the host that runs the first attempt.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from integration.speculation_program import ROWS, SOURCE, TABLES
from streamhouse.client import StreamhouseClient
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SCHEMA = pa.schema([pa.field("id", pa.int64())])
HOSTS = ("127.0.0.1", "localhost")
CONF = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.01",
    # An attempt whose twin does not come fails the job: a retry is no twin.
    "spark.task.maxFailures": "1",
    "spark.locality.wait": "0s",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.driver.memory": "512m",
    "spark.driver.host": HOSTS[0],
    "spark.driver.bindAddress": HOSTS[0],
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
    "spark.ui.enabled": "false",
}
_MASTER_AT = re.compile(r"Starting Spark master at (spark://\S+)")
_START_S = 60.0


@contextlib.contextmanager
def _daemon(name: str, *arguments: str, folder: Path) -> Iterator[Path]:
    """Run a process of the cluster; yield where it logs."""
    import pyspark

    script = Path(pyspark.__file__).parent / "bin" / "spark-class"
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(script), f"org.apache.spark.deploy.{name.split('-')[0]}", *arguments],
            stdout=output,
            stderr=output,
            env={
                **os.environ,
                "SPARK_DAEMON_MEMORY": "256m",
                "PYSPARK_PYTHON": sys.executable,
            },
        )
    try:
        yield log
    finally:
        # The executors of a worker end with it.
        process.terminate()
        process.wait(60)


def _master_of(log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while (found := _MASTER_AT.search(log.read_text())) is None:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)  # sleep: the master says only in its log where it listens
    return found[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A master and two workers of one core; their address."""
    folder = tmp_path_factory.mktemp("cluster")
    own = ("--port", "0", "--webui-port", "0")
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(_daemon("master.Master", "--host", HOSTS[0], *own, folder=folder))
        master = _master_of(log)
        for number, host in enumerate(HOSTS):
            arguments = ("--host", host, *own, "--cores", "1", "--memory", "1g")
            work = ("--work-dir", str(folder / f"work-{number}"))
            stack.enter_context(
                _daemon(f"worker.Worker-{number}", *arguments, *work, master, folder=folder)
            )
        yield master


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, cluster: str) -> Iterator[tuple[Path, str]]:
    """All jobs have run: their marks, and the service that has their tables."""
    folder = tmp_path_factory.mktemp("jobs")
    with ServiceProcess(tmp_path_factory.mktemp("service")) as service:
        with StreamhouseClient(service.endpoint) as client:
            client.create_database("raced")
            for table in (SOURCE, *TABLES):
                client.create_table(table, SCHEMA, bucket_count=2)
            client.append(SOURCE, pa.table({"id": range(2 * ROWS)}, schema=SCHEMA))
        submitted = [part for key, value in CONF.items() for part in ("--conf", f"{key}={value}")]
        done = subprocess.run(
            [sys.executable, "-m", "integration.speculation_program", service.endpoint, folder],
            cwd=Path(__file__).parents[1],
            env={
                **os.environ,
                "PYSPARK_PYTHON": sys.executable,
                "PYSPARK_SUBMIT_ARGS": " ".join(["--master", cluster, *submitted, "pyspark-shell"]),
            },
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
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
    """The same job by `write.mode=direct`: what the twin writes is really written twice."""
    assert {"began-0", "began-1", "ended-1"} <= _marks(jobs, "raced.direct")

    found = _ids(jobs, "raced.direct")

    assert set(found) == set(range(2 * ROWS))
    assert len(found) > 2 * ROWS
