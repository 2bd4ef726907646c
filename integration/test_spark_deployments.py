"""The format works where Spark runs in other ways: several executors, Connect, spark-submit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyspark
import pytest

from integration.spark_world import event_rows
from streamhouse.api.client import StreamhouseClient
from tests.support.python_process import python_for_spark
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

TABLE = "default.deployed"
PROGRAM = Path(__file__).parent / "spark_deployment_program.py"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service with 4,000 rows in the lake and 1,000 in the log."""
    with ServiceProcess(tmp_path_factory.mktemp("service")) as service:
        with StreamhouseClient(service.endpoint) as client:
            client.create_table(TABLE, event_rows(0, 0).schema, bucket_count=2)
            client.append(TABLE, event_rows(0, 4_000))
            tier_once(client, TABLE)
            client.append(TABLE, event_rows(4_000, 5_000))
            names = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
            client.create_table("default.looked_up", names, primary_key=["id"])
            rows = {"id": range(100), "name": [f"n{i}" for i in range(100)]}
            client.upsert("default.looked_up", pa.table(rows, schema=names))
        yield service.endpoint


def _run(command: list[str], endpoint: str, target: str, folder: Path, **env: str) -> str:
    """Run the program; a variable with an empty text is not set."""
    done = subprocess.run(
        [*command, str(PROGRAM), target, str(folder / "checkpoint")],
        cwd=folder,
        env={
            name: value
            for name, value in {
                **os.environ,
                # Spark gives a source's process ten seconds to start: a loaded machine needs more.
                "PYSPARK_PYTHON": python_for_spark(),
                "STREAMHOUSE_ENDPOINT": endpoint,
                **env,
            }.items()
            if value
        },
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def _check(endpoint: str, target: str, output: str) -> None:
    """Every program reads 5,000 rows, looks 100 up, and copies half by batch, half by stream."""
    assert "read 5000" in output
    assert "looked up 100 100" in output
    with StreamhouseClient(endpoint) as client:
        assert sorted(client.read(target)["id"].to_pylist()) == list(range(5_000))


def test_several_executors(endpoint: str, tmp_path: Path) -> None:
    home = tmp_path / "spark"
    home.mkdir()
    # local-cluster writes work/ into its home, which must not be the installed package.
    for item in Path(pyspark.__file__).parent.iterdir():
        (home / item.name).symlink_to(item)
    master = "local-cluster[2,1,1024]"

    output = _run(
        [sys.executable],
        endpoint,
        "default.by_cluster",
        tmp_path,
        SPARK_HOME=str(home),
        MASTER=master,
    )

    _check(endpoint, "default.by_cluster", output)
    # Batches of the lake and of the log were read by both executors.
    assert "executors 2" in output


def test_a_program_of_an_environment_that_nobody_activated(endpoint: str, tmp_path: Path) -> None:
    """`.venv/bin/python program.py`: `python3` of the PATH does not find the package."""
    unset = {"PYSPARK_PYTHON": "", "PYSPARK_DRIVER_PYTHON": "", "VIRTUAL_ENV": ""}
    output = _run([sys.executable], endpoint, "default.by_path", tmp_path, PATH=os.defpath, **unset)

    _check(endpoint, "default.by_path", output)


def test_spark_connect(endpoint: str, tmp_path: Path) -> None:
    output = _run(
        [sys.executable], endpoint, "default.by_connect", tmp_path, SPARK_REMOTE_URL="local[2]"
    )

    _check(endpoint, "default.by_connect", output)
    # 2,000 rows, of which the keys alone that a change names are read.
    by_key = re.search(r"^changed by key (.*) sent (\d+)$", output, re.M)
    assert by_key is not None
    counts = re.findall(r"rows_(?:inserted|updated|deleted)=(\d+)", by_key[1])
    assert counts == [*"111", *"010", *"002"]
    assert int(by_key[2]) <= 3 + 2 + 2
    # One row is new, and 1 + 2 + 9 of 1990 to 1999 are gone.
    left = set(range(2_000)) - {2, 9, 10} - (set(range(1_990, 2_000)) - {1_995}) | {5_000}
    balance = sum(10 * i for i in left) - 50_000 + 7 + 5 + 1
    assert f"changed 1 9 ({len(left)}, {balance}, 11)" in output
    assert "history 6" in output
    narrowed = "columns id, price; rows where ((`id` >= 3990) AND (`id` < 4010))"
    assert f"{TABLE}: {narrowed}" in output
    ids = range(3_990, 4_010)
    assert f"part (20, {sum(ids)}) {max(i % 100 for i in ids)} at" in output
    assert "by sql (5000, 0, 40)" in output
    assert "pairs Row(id=31, id=30)" in output


def test_spark_submit(endpoint: str, tmp_path: Path) -> None:
    submit = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")

    output = _run(
        [submit, "--master", "local[2]", "--conf", "spark.ui.enabled=false"],
        endpoint,
        "default.by_submit",
        tmp_path,
        # As a user has it: this one executes a Python for its driver and for each worker.
        PYSPARK_PYTHON=sys.executable,
    )

    _check(endpoint, "default.by_submit", output)
