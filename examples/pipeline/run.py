"""Run the declarative pipeline of this folder over 200 flights.

`python examples/pipeline/run.py` starts a service of its own, makes the tables, and calls
`spark-pipelines run` as a scheduler would. The pipeline itself is `flights.py`. Spark keeps the
pipeline's own tables; with a catalog that outlives a run (Hive's), a second run adds what is new.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from stage import console, step, storage_service  # noqa: E402  examples are no package

from streamhouse import StreamhouseClient  # noqa: E402

COLUMNS = "flight bigint, carrier string, delay double"


def main() -> None:
    """Make the tables, run the pipeline, show what it has written."""
    with (
        tempfile.TemporaryDirectory(prefix="streamhouse-pipeline-") as folder,
        storage_service(Path(folder, "data")),
        StreamhouseClient() as client,
    ):
        client.create_table("pipeline.flights", COLUMNS)
        client.create_table("pipeline.delays", COLUMNS, primary_key="flight")
        client.append("pipeline.flights", flights(200))
        with step("Run the pipeline"):
            run_pipeline(Path(folder))
        kept = Path(folder, "spark-warehouse")
        console.print(f"late_flights: {pq.read_table(kept / 'late_flights').num_rows} rows")
        for row in pq.read_table(kept / "delay_by_carrier").sort_by("carrier").to_pylist():
            console.print("delay_by_carrier: {carrier} {delay} of {n}".format(**row))
        late = client.count("pipeline.delays")
        console.print(f"pipeline.delays: {late} late flights")


def flights(count: int) -> pa.Table:
    """Return flights; every fourth is 30 minutes late."""
    return pa.table(
        {
            "flight": range(count),
            "carrier": [("AA", "UA")[i % 2] for i in range(count)],
            "delay": [30.0 if i % 4 == 0 else 0.0 for i in range(count)],
        }
    )


def run_pipeline(folder: Path) -> None:
    """Call `spark-pipelines run`; what Spark keeps lies in `folder`."""
    work = folder / "pipeline"
    work.mkdir(exist_ok=True)
    for name in ("flights.py", "spark-pipeline.yml"):
        text = (HERE / name).read_text(encoding="utf-8")
        (work / name).write_text(text.replace("${STORAGE}", (folder / "storage").as_uri()))
    command = Path(sys.executable).with_name("spark-pipelines")
    spec = str(work / "spark-pipeline.yml")
    subprocess.run(
        [str(command), "--conf", "spark.ui.enabled=false", "run", "--spec", spec],
        cwd=folder,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        check=True,
    )


if __name__ == "__main__":
    main()
