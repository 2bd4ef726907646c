"""Under Spark Connect, uses of one name with different options are right or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse import StreamhouseClient
from tests.support.service_process import ServiceProcess

PROBE = Path(__file__).parent / "connect_options_probe.py"
FEW, MANY, ALL = [0, 1, 2], [8, 9], list(range(10))


@pytest.mark.slow
def test_no_use_of_a_name_gets_the_options_of_another(tmp_path: Path) -> None:
    with (
        ServiceProcess(tmp_path) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        client.create_table("opt", pa.schema([("id", pa.int64())]))
        client.append("opt", pa.table({"id": ALL}))
        answer = subprocess.run(
            [sys.executable, str(PROBE), service.endpoint, "default.opt"],
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
            capture_output=True,
            text=True,
            check=False,
        )

    assert answer.returncode == 0, answer.stderr[-3_000:]
    assert json.loads(answer.stdout.splitlines()[-1]) == {
        "query": "refused",
        "queries": "refused",
        "query and table": "refused",
        "view of a query": "refused",
        "script with a view": "refused",
        "view": "refused",
        "frame": FEW,
        "frames": sorted(FEW + MANY),
        "frame and table": sorted(FEW + ALL),
        "frame and query": sorted(FEW + ALL),
        "frames in SQL": sorted(FEW + MANY + ALL),
    }


@pytest.mark.slow
def test_row_level_statements_run_once_under_spark_connect(tmp_path: Path) -> None:
    with (
        ServiceProcess(tmp_path) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        client.create_table(
            "acc", pa.schema([("id", pa.int64()), ("v", pa.int32())]), primary_key=("id",)
        )
        client.upsert("acc", pa.table({"id": range(5), "v": pa.array([0] * 5, pa.int32())}))
        answer = subprocess.run(
            [
                sys.executable,
                str(PROBE.with_name("connect_rows_probe.py")),
                service.endpoint,
                "default.acc",
            ],
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
            capture_output=True,
            text=True,
            check=False,
        )
        rows = {row["id"]: row["v"] for row in client.read("acc").to_pylist()}

    assert answer.returncode == 0, answer.stderr[-3_000:]
    assert json.loads(answer.stdout.splitlines()[-1]) == {
        "explain": [
            "== Streamhouse: MERGE default.acc ==",
            "reads default.acc: the keys of the source, looked up at the service",
        ],
        "merge": [[3, 1, 1, 1]],
        "update": [[1]],
        "delete": [[1]],
        "other side": "AnalysisException",
        "script": "UnsupportedError",
    }
    assert rows == {0: 0, 2: 5, 3: 30, 9: 7}
