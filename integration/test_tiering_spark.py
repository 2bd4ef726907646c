"""Tiering on Spark: in this process, by the command, by spark-submit, on several executors."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import SparkSession

from integration.spark_world import spark_session
from streamhouse.client import StorageClient
from streamhouse.core.errors import TableNotFoundError, UnavailableError
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.parquet_writer import FileFormat
from streamhouse.lake.lake_tables import IcebergLake
from streamhouse.reading.tail.lake_task import SplitResult, TieringSplit
from streamhouse.tiering import spark_job
from streamhouse.tiering.worker._service import TieringService
from streamhouse.tiering.worker._spark_runner import SparkRunner
from streamhouse.tiering.worker.maintain_job import maintain_table
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.spark]

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("region", pa.string())])


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorageClient]:
    with (
        ServiceProcess(tmp_path_factory.mktemp("service")) as service,
        StorageClient(service.endpoint) as opened,
    ):
        yield opened


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with spark_session() as session:
        yield session


@pytest.fixture
def lake(client: StorageClient) -> Iterator[IcebergLake]:
    opened = IcebergLake(client.lake_catalog())
    yield opened
    opened.close()


def _table(client: StorageClient, name: str, *, rows: int, buckets: int = 3) -> None:
    ids = range(rows)
    client.create_table(name, SCHEMA, bucket_count=buckets, partitioned_by=["region"])
    client.append(name, pa.table({"id": ids, "region": [f"r{i % 3}" for i in ids]}, schema=SCHEMA))


def _lake_ids(lake: IcebergLake, client: StorageClient, name: str) -> list[int]:
    state = client.table_state(name)
    table = lake.open_or_create(state.table, state.lake)._table
    return sorted(table.scan(selected_fields=("id",)).to_arrow()["id"].to_pylist())


def test_upserts_are_tiered_and_maintained_in_spark_jobs(
    client: StorageClient, lake: IcebergLake, spark: SparkSession
) -> None:
    """Rounds with retractions, then a rewrite that folds them: the tasks of both run in Spark."""
    properties = {"table.datalake.changelog": "true", "table.datalake.auto-maintenance": "false"}
    client.create_table("keyed", SCHEMA, primary_key=["id"], bucket_count=2, properties=properties)
    service = TieringService(client=client, lake=lake, runner=SparkRunner(spark), tables=["keyed"])
    for number in range(3):
        ids = range(number * 20, number * 20 + 40)
        regions = [f"r{number}"] * len(ids)
        client.upsert("keyed", pa.table({"id": ids, "region": regions}, schema=SCHEMA))
        client.delete("keyed", pa.table({"id": pa.array([number], pa.int64())}))
        (summary,) = service.run_once()
        assert summary.error is None
    expected = [{"id": i, "region": f"r{min(i // 20, 2)}"} for i in range(3, 80)]
    assert _lake_rows(lake, client, "keyed") == expected

    reports = dict(maintain_table(client, client.lake_catalog(), SparkRunner(spark), "keyed"))

    rows = reports["default.keyed"].rewritten
    assert rows is not None
    assert (rows.rows, rows.files_after, rows.deletes_after) == (77, 2, 0)
    assert rows.rows_dropped > 0
    history = reports["default.keyed$changelog"].rewritten
    assert history is not None
    assert history.files_after == 2
    assert history.rows == sum(p.high_watermark for p in client.positions("keyed").values())
    assert _lake_rows(lake, client, "keyed") == expected


def _lake_rows(lake: IcebergLake, client: StorageClient, name: str) -> list[dict[str, Any]]:
    state = client.table_state(name)
    table = lake.open_or_create(state.table, state.lake).iceberg
    found = table.scan(selected_fields=("id", "region")).to_arrow().to_pylist()
    return sorted(found, key=lambda row: row["id"])


class _Counting:
    """An observer that adds up what it is told."""

    def __init__(self) -> None:
        self.rows = 0
        self.planned = 0

    def started(self, table: str, *, rows: int, splits: int) -> None:
        self.planned += rows

    def wrote(self, table: str, *, rows: int) -> None:
        self.rows += rows

    def ended(self, table: str) -> None:
        pass


@pytest.mark.end_to_end
def test_spark_tasks_write_what_threads_would(
    client: StorageClient, spark: SparkSession, lake: IcebergLake
) -> None:
    _table(client, "on_spark", rows=5_000)
    observer = _Counting()
    runner = SparkRunner(spark)

    (summary,) = TieringService(
        client=client, lake=lake, runner=runner, tables=["on_spark"], observer=observer
    ).run_once()

    assert summary.error is None
    assert runner.parallelism == 2
    assert _lake_ids(lake, client, "on_spark") == list(range(5_000))
    assert observer.rows == observer.planned == 5_000
    assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") is None


def _split(client: StorageClient, folder: Path, **changes: Any) -> TieringSplit:
    values: dict[str, Any] = {
        "endpoint": client.endpoint,
        "token": None,
        "table": "on_spark",
        "table_id": 1_000_000,
        "schema_id": 0,
        "range": OffsetRange(bucket=0, start=0, end=1),
        "lake_schema": SCHEMA.serialize().to_pybytes(),
        "partitioning": (),
        "folder": f"file://{folder}",
        "file_format": FileFormat(),
        "files": LakeFilesystem({}),
    }
    return TieringSplit(**{**values, **changes})


def _run(
    spark: SparkSession, splits: Sequence[TieringSplit], *, is_cancelled: Any = lambda: False
) -> list[SplitResult]:
    return SparkRunner(spark).run(splits, on_rows=lambda _: None, is_cancelled=is_cancelled)


@pytest.mark.end_to_end
def test_an_error_that_will_not_pass_arrives_as_it_was_raised(
    client: StorageClient, spark: SparkSession, tmp_path: Path
) -> None:
    with pytest.raises(TableNotFoundError, match=r"'default\.nowhere' does not exist"):
        _run(spark, [_split(client, tmp_path, table="nowhere")])


@pytest.mark.end_to_end
def test_an_error_that_may_pass_is_told_in_one_sentence(
    client: StorageClient, spark: SparkSession, tmp_path: Path
) -> None:
    unreachable = _split(client, tmp_path, endpoint="http://127.0.0.1:9")

    with pytest.raises(
        UnavailableError,
        match=r"^tiering on Spark failed: cannot reach the Streamhouse service at http://127",
    ):
        _run(spark, [unreachable])


@pytest.mark.end_to_end
def test_a_lost_lease_cancels_the_spark_job(
    client: StorageClient, spark: SparkSession, tmp_path: Path
) -> None:
    has_connected, is_over = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def accept() -> None:
            connection, _ = silent.accept()
            has_connected.set()
            # A service that never answers: the task goes on until its request is given up.
            with connection:
                is_over.wait(60)

        thread = threading.Thread(target=accept)
        thread.start()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        try:
            with pytest.raises(UnavailableError, match="tiering on Spark was cancelled") as raised:
                _run(
                    spark,
                    [_split(client, tmp_path, endpoint=endpoint)],
                    is_cancelled=has_connected.is_set,
                )
        finally:
            is_over.set()
            thread.join()
    # Spark's own words: the job was ended; it did not fail by itself, and later.
    assert "cancelled part of cancelled job group" in str(raised.value.__cause__)


def _spark_home(tmp_path: Path) -> str:
    """A SPARK_HOME whose work folder is not inside site-packages."""
    home = tmp_path / "spark-home"
    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        (home / entry.name).symlink_to(entry)
    return str(home)


def _run_program(
    client: StorageClient, tmp_path: Path, *command: str
) -> subprocess.CompletedProcess[str]:
    binaries = Path(sys.executable).parent
    environment = {
        **os.environ,
        "STREAMHOUSE_ENDPOINT": client.endpoint,
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "SPARK_HOME": _spark_home(tmp_path),
        "PYSPARK_PYTHON": sys.executable,
    }
    return subprocess.run(
        command,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]"])
def test_the_command_tiers_on_the_master_it_is_given(
    client: StorageClient, lake: IcebergLake, tmp_path: Path, master: str
) -> None:
    name = "by_command_" + "".join(c for c in master if c.isalpha())
    _table(client, name, rows=3_000, buckets=4)

    done = _run_program(
        client,
        tmp_path,
        *(sys.executable, "-c", "from streamhouse.cli import main; main()"),
        *("tier", "--once", "--table", name, "--master", master),
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert f"default.{name}: 3,000 rows in " in done.stdout
    assert _lake_ids(lake, client, name) == list(range(3_000))


def test_the_script_tiers_under_spark_submit(
    client: StorageClient, lake: IcebergLake, tmp_path: Path
) -> None:
    _table(client, "by_submit", rows=3_000)

    done = _run_program(
        client,
        tmp_path,
        *("spark-submit", "--master", "local[2]", str(Path(spark_job.__file__))),
        *("--once", "--table", "by_submit"),
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert "default.by_submit: 3,000 rows in " in done.stdout
    assert _lake_ids(lake, client, "by_submit") == list(range(3_000))
